"""Import torch without loading TorchTPU, in a process that others are forked from.

TorchTPU does not work in a fork of a process that has loaded it.
"""

from __future__ import annotations

from polyxla.plugin import snapshot, temporary_environ
from polyxla_torchtpu import before_torch, env

with temporary_environ({**snapshot(), env.TORCH_DEVICE_BACKEND_AUTOLOAD: "0"}):
    import torch


def load() -> None:
    """Do what the import of torch would have done in this environment: load the devices' packages."""
    before_torch.show_library()
    # Replicas load TorchTPU themselves, and have switched this off.
    if torch._is_device_backend_autoload_enabled():  # noqa: SLF001
        torch._import_device_backends()  # noqa: SLF001
