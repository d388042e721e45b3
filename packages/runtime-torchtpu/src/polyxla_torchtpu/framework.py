"""What torch loads with itself in every process, and what is changed in torch and TorchTPU then.

torch calls `load` at the end of its import, also in programs that do not know polyxla. No import here may
lead to torch_tpu, which opens libtpu when it is imported, and the emulated one only if `prepare` has set its
path.
`polyxla_torchtpu.before_torch` is the part that must be there before torch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from polyxla.plugin import (
    GENERATION_BY_DEVICE,
    GENERATIONS,
    POLYXLA_DEVICES,
    POLYXLA_LIBTPU_HOST,
    POLYXLA_RUNTIME,
    POLYXLA_SECRET,
    EmulatedTpu,
    ended_by_errors,
    free_ports,
    keep_lazy_parameters,
    shared_secret,
    snapshot,
    torchrun,
    tpu_env,
    update_environ,
)
from polyxla_torchtpu import env

BACKEND = "tpu_dist"
"""TorchTPU's name of its process groups."""
_EXPERIMENTAL = r"<TorchTpu/ApiStage/ExperimentalApi/> (the TORCH_TPU_|'default_generators'|is_initialized)"
"""How TorchTPU warns of what may change in later versions."""
_library = torch.library.Library("aten", "IMPL")
_torchs_batch_norm = F.batch_norm
_NEGATIVE = torch._C.DispatchKey.Negative


def load() -> None:
    """Prepare this process for an emulated TPU, if the environment asks for one, and load TorchTPU."""
    environ = snapshot()
    # Another runtime was chosen by name; it must find torch as it is.
    if environ.get(POLYXLA_RUNTIME) not in (None, "", "torchtpu"):
        return
    with ended_by_errors():
        update_environ(prepare(environ))
    _mend_anywhere()
    environ = snapshot()
    if POLYXLA_LIBTPU_HOST in environ:
        _load_torch_tpu(environ)


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put a plain TorchTPU program on an emulated TPU; none unless asked for.

    Raises:
        UsageError: the environment asks for a TPU that cannot be emulated.
    """
    emulated = EmulatedTpu.read(environ)
    if emulated is None:
        return {}
    addresses = environ.get(env.TORCH_TPU_SLICEBUILDER_ADDRESSES)
    variables: dict[str, str] = {}
    # A launch, or `polyxla run`, may have prepared this process: its chips then stay as they are. In what a
    # replica starts, TorchTPU's own variables would describe a slice of as many hosts as there are replicas.
    is_prepared = POLYXLA_LIBTPU_HOST in environ
    started = torchrun.process_count(environ)
    meets_by_torchrun = started is not None and not addresses
    if not is_prepared or meets_by_torchrun:
        # Imported here: every program that imports torch would pay for the discovery otherwise.
        from polyxla_torchtpu.discovery import requested_plan

        # torchrun may use some of a host's chips.
        # `POLYXLA_DEVICES` of the user comes last, so it wins over torchrun's number.
        plan = requested_plan(environ if started is None else {POLYXLA_DEVICES: str(started), **environ})
        variables = {} if is_prepared else plan.program_environment(environ)
        if meets_by_torchrun:
            variables |= torchrun.environment(plan, {**environ, **variables}, os.cpu_count() or 1)
    if addresses and not environ.get(POLYXLA_SECRET):
        # TorchTPU's own launch, or the user's, has chosen where the processes meet, and knows no secret.
        # The processes of one user derive the same secret from the addresses, without a message.
        where = environ.get(tpu_env.MEGASCALE_COORDINATOR_ADDRESS) or addresses
        variables[POLYXLA_SECRET] = shared_secret(environ, f"processes that meet at {where}")
    is_first = environ.get(tpu_env.RANK, "0") == "0" and multiprocessing.parent_process() is None
    if is_first and not is_prepared:
        count = emulated.device_count
        devices = "1 device" if count == 1 else f"{count} devices"
        emulated.say(f"{devices}, one for each process of the program")
    return variables


def load_in_replica() -> None:
    """Load TorchTPU in this process without what it prints when all is well."""
    # Silence warnings about APIs that this runtime calls on purpose.
    warnings.filterwarnings("ignore", message=_EXPERIMENTAL)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _load_torch_tpu(snapshot())
            _mend()
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


def _load_torch_tpu(environ: Mapping[str, str]) -> None:
    """Load TorchTPU in this process, as torch's autoloading does; a second call does nothing."""
    # The answer must be there before TorchTPU looks for chips.
    _answer(environ)
    from torch_tpu import _loader

    _loader.load()
    if POLYXLA_LIBTPU_HOST in environ:
        _leave_out_kernels()


def _leave_out_kernels() -> None:
    """Have attention computed by XLA's own operations: the CPU cannot run TorchTPU's kernel for TPU cores."""
    # This switch is torch's for every device, whatever its name says.
    torch.backends.cuda.enable_flash_sdp(False)


def _answer(environ: Mapping[str, str]) -> None:
    """Answer TorchTPU's search for chips, and for ports, from now on, if this machine emulates a TPU.

    TorchTPU reads the kernel's list of PCI devices. Here it finds a host with the chips of
    `POLYXLA_LIBTPU_HOST`. Imports torch_tpu, which opens libtpu.
    """
    text = environ.get(POLYXLA_LIBTPU_HOST)
    if not text:
        return
    import portpicker
    from torch_tpu._internal.utils import hardware

    generation, _, shape = text.partition(":")
    chips = math.prod(int(number) for number in shape.split("x"))
    # TorchTPU counts two devices of a TPU7x, each of which has an entry in the kernel's list.
    count = chips * GENERATIONS[generation].devices_per_chip
    device_id = next(pci_id for pci_id, name in GENERATION_BY_DEVICE.items() if name == generation)
    any_hardware: Any = hardware
    topologies = any_hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID.get(device_id, {})
    any_hardware._scan_pci_tpus = lambda: (count, topologies)
    any_hardware.get_tpu_device_name = lambda: any_hardware._PCI_DEVICE_ID_TO_NAME.get(device_id, "TPU")
    # `set_tpu_launch_env` asks portpicker, whose ports are also given to outgoing connections: one may have
    # such a port when the process of the chip wants to listen there.
    any_portpicker: Any = portpicker
    any_portpicker.pick_unused_port = lambda *_, **__: free_ports(1)[0]


def _mend_anywhere() -> None:
    """Mend what TorchTPU 0.2.0 gets wrong in any program, also on a real TPU. A second call does nothing."""
    replace_operators()
    restore_to_own_device()
    keep_lazy_parameters()


def _mend() -> None:
    """Do what TorchTPU 0.2.0 leaves undone, as docs/torchtpu.md lists it. A second call does nothing."""
    # Here too: torch has not called `load` in a replica's process.
    _mend_anywhere()
    any_torch: Any = torch
    # torch.utils.checkpoint keeps a device's random numbers only if this says that it is in use. Otherwise
    # the backward pass draws other masks of dropout than the forward pass.
    any_torch.tpu._initialized = True
    if F.batch_norm is not _batch_norm:
        F.batch_norm = _batch_norm


def _batch_norm(
    input: torch.Tensor,  # noqa: A002  (torch's name)
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise as torch does, and move the running statistics, which TorchTPU leaves as they are."""
    moves = training and input.device.type == "tpu" and running_mean is not None and running_var is not None
    if not moves:
        return _torchs_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result = _torchs_batch_norm(input, None, None, weight, bias, training, momentum, eps)
    with torch.no_grad():
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        variance, mean = torch.var_mean(input.detach().float(), others)
        for running, current in ((running_mean, mean), (running_var, variance)):
            assert running is not None
            running.mul_(1 - momentum).add_(current.to(running.dtype), alpha=momentum)
    return result


@functools.cache
def replace_operators() -> None:
    """Compute from now on what TorchTPU 0.2.0 computes wrongly, also on a real TPU.

    torch makes ``avg_pool1d`` of other operators. TorchTPU has a kernel of its own for it, and none for its
    gradient: the result requires no gradient, and what is before it is silently not trained.

    In torch, ``z.conj().imag`` is a view of the memory with the opposite sign, which becomes numbers by
    ``clone`` and ``copy_``. Those of TorchTPU take the memory's numbers.

    torch makes ``celu`` of ``elu``, where TorchTPU divides what is above 0 by ``alpha``.
    """
    _library.impl("avg_pool1d", _avg_pool1d, "AutogradPrivateUse1")
    _library.impl("celu", _celu, "PrivateUse1")
    _library.impl("celu_", lambda x, alpha=1.0: x.copy_(_celu(x, alpha)), "PrivateUse1")
    # torch warns that its own are replaced.
    with warnings.catch_warnings(action="ignore"):
        _library.impl("clone", _clone_negated, "Negative", with_keyset=True)
        _library.impl("copy_", _copy_negated, "Negative", with_keyset=True)


def _clone_negated(
    keys: torch._C.DispatchKeySet, x: torch.Tensor, *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if x.device.type != "tpu":
        below = keys & torch._C._dispatch_keyset_full_after(_NEGATIVE)
        any_clone: Callable[..., torch.Tensor] = torch.ops.aten.clone.default.redispatch
        return any_clone(below, x, memory_format=memory_format)
    return torch._neg_view(x).clone(memory_format=memory_format).neg_()


def _copy_negated(
    keys: torch._C.DispatchKeySet, x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if "tpu" not in (x.device.type, source.device.type):
        below = keys & torch._C._dispatch_keyset_full_after(_NEGATIVE)
        any_copy: Callable[..., torch.Tensor] = torch.ops.aten.copy_.default.redispatch
        return any_copy(below, x, source, non_blocking)
    if source.is_neg():
        source = torch._neg_view(source).neg()
    if x.is_neg():
        torch._neg_view(x).copy_(source, non_blocking).neg_()
    else:
        x.copy_(source, non_blocking)
    return x


def _celu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    return torch.where(x > 0, x, torch.expm1(x / alpha) * alpha)


def _avg_pool1d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> torch.Tensor:
    plane = F.avg_pool2d(
        x.unsqueeze(-2),
        [1, *kernel_size],
        [1, *(stride or kernel_size)],
        [0, *padding],
        ceil_mode,
        count_include_pad,
    )
    return plane.squeeze(-2)


@functools.cache
def restore_to_own_device() -> None:
    """Have `torch.load` restore tensors of TorchTPU to the device of the process, from now on.

    TorchTPU 0.2.0 gives a restored tensor the device's number in the job, ``tpu:2`` in the third process. All
    other tensors of that process are on ``tpu:0``, and an operation on both is an error.
    """
    # Before torch's own function for such devices; no two may have the same priority.
    torch.serialization.register_package(15, lambda _: None, _restore)


def _restore(storage: Any, location: str) -> Any:
    if location.partition(":")[0] != "tpu" or not torch.accelerator.is_available():
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage).to("tpu").untyped_storage()
