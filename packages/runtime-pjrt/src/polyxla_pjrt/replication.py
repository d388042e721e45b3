"""One replica on torch_xla. Heavy: imported in the replica, never for discovery."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from polyxla import Replication, UsageError, World
from polyxla.replication import ReduceOp
from polyxla_pjrt import env


class XlaReplication(Replication):
    """What every replica on torch_xla does alike; its collectives are its subclasses'.

    Args:
        kind: the device type that this process must run on, ``CPU`` or ``TPU``.
        local_index: the device's number among those that this process sees.

    Raises:
        UsageError: torch_xla already runs in this process, on other devices.
    """

    def __init__(self, kind: str, local_index: int) -> None:
        # Before torch_xla.device(), whose own range check is off by one.
        if local_index >= torch_xla.device_count():
            raise UsageError(
                f"device {local_index} is not among the {torch_xla.device_count()} that torch_xla already "
                "runs with in this process",
                where="devices",
                fix="Launch with start_method='spawn', which starts a fresh process.",
            )
        self.device = torch_xla.device(local_index)
        self.kind = xm.xla_device_hw(self.device)
        if self.kind != kind:
            raise UsageError(
                f"torch_xla already runs on {self.kind} in this process, and cannot change to {kind}",
                where=f"{env.PJRT_DEVICE}={kind}",
                fix="Launch with start_method='spawn', which starts a fresh process.",
            )

    def sync(self, wait: bool = False) -> None:
        """Cut the graph here and hand it to the device."""
        torch_xla.sync(wait=wait)

    def seed(self, seed: int) -> None:
        """Seed the device's generator; torch.manual_seed does not reach it."""
        xm.set_rng_state(seed, str(self.device))

    def report(self) -> str:
        """Return torch_xla's metrics report."""
        report: str = met.metrics_report()
        return report

    def close(self) -> None:
        """Wait until the device has finished what it was given."""
        # For this device alone: waiting takes a device's lock, and another replica may be using its own.
        xm.wait_device_ops(xm.xla_real_devices([self.device]))


class SingleReplication(XlaReplication):
    """The only replica of its job, on torch_xla's own client: every collective is the identity."""

    def __init__(self, kind: str, local_index: int) -> None:
        super().__init__(kind, local_index)
        self.world = World()
        self._check_autograd()

    def _check_autograd(self) -> None:
        """Refuse a process whose autograd knows nothing of the device.

        torch makes a queue for each device at the first ``backward()`` of a process, and never again; a
        device that came later ends every ``backward()`` with an internal assertion.
        """
        try:
            torch.zeros((), device=self.device, requires_grad=True).backward()
        except RuntimeError as error:
            raise UsageError(
                f"this process called backward() before it had {self.device}, which torch's autograd "
                "therefore cannot use",
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

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the gradients: the mean over one replica is its own."""

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Return the one payload."""
        if any(ordinal != 0 for ordinal in replicas):
            raise ValueError(f"rendezvous {tag!r}: replicas={list(replicas)}, but there is only ordinal 0")
        return [payload]
