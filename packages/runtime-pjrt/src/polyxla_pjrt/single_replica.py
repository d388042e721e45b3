"""The replication of a job's only replica. Heavy: imported in the replica, never for discovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polyxla import UsageError
from polyxla.plugin import EmulatedTpu, ReduceOp, World, XlaReplication, naming_holders


class SingleReplication(XlaReplication):
    """The only replica of its job, also on an emulated TPU: every collective is the identity."""

    def __init__(self, kind: str, local_index: int, environ: Mapping[str, str]) -> None:
        with naming_holders():
            super().__init__(kind, local_index, environ)
        self.world = World()
        if EmulatedTpu.read(environ):
            from polyxla_bridge.torch_xla_plugin import CACHE_COUNTERS

            self.cache_counters = CACHE_COUNTERS
        self._check_autograd()

    def _check_autograd(self) -> None:
        """Refuse a process whose autograd engine was created before the device.

        torch creates a queue for each device at a process's first ``backward()``, and never again. With a
        device that was opened later, every ``backward()`` fails with an internal assertion.
        """
        try:
            torch.zeros((), device=self.device, requires_grad=True).backward()
        except RuntimeError as error:
            raise UsageError(
                f"this process called backward() before it had {self.device}, so torch's autograd cannot use "
                "that device",
                where="start_method",
                fix="Launch with start_method='forkserver', which starts a fresh process, or call backward() "
                "after the launch.",
            ) from error

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the one replica's tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the one replica's tensor."""
        return [tensor]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the tensors as they are: the mean over one replica."""

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Return the only payload."""
        if any(ordinal != 0 for ordinal in replicas):
            raise ValueError(f"rendezvous {tag!r}: replicas={list(replicas)}, but there is only ordinal 0")
        return [payload]
