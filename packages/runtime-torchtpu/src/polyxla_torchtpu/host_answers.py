"""TorchTPU's search for chips, answered on a machine that emulates a TPU.

TorchTPU reads the kernel's list of PCI devices when torch is imported. On an emulated TPU the answers are
those of a host with the chips of ``POLYXLA_LIBTPU_HOST``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyxla.plugin import GENERATION_BY_DEVICE, GENERATIONS, POLYXLA_LIBTPU_HOST


def load(environ: Mapping[str, str]) -> None:
    """Load TorchTPU in this process, as torch's autoloading does; a second call does nothing."""
    answer(environ)
    from torch_tpu import _loader

    _loader.load()
    if POLYXLA_LIBTPU_HOST in environ:
        _leave_out_kernels()


def _leave_out_kernels() -> None:
    """Have attention computed by XLA's own operations: the CPU cannot run TorchTPU's kernel for TPU cores."""
    import torch

    torch.backends.cuda.enable_flash_sdp(False)


def answer(environ: Mapping[str, str]) -> None:
    """Answer TorchTPU from now on, if this machine emulates a TPU. Imports torch_tpu, which opens libtpu."""
    text = environ.get(POLYXLA_LIBTPU_HOST)
    if not text:
        return
    from torch_tpu._internal.utils import hardware

    generation, _, shape = text.partition(":")
    chips = math.prod(int(number) for number in shape.split("x"))
    # TorchTPU counts two devices of a TPU7x, each of which has an entry in the kernel's list.
    count = chips * GENERATIONS[generation].devices_per_chip
    device_id = next(one for one, of_device in GENERATION_BY_DEVICE.items() if of_device == generation)
    any_hardware: Any = hardware
    topologies = any_hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID.get(device_id, {})
    any_hardware._scan_pci_tpus = lambda: (count, topologies)
    any_hardware.get_tpu_device_name = lambda: any_hardware._PCI_DEVICE_ID_TO_NAME.get(device_id, "TPU")
