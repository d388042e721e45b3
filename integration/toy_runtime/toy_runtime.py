"""A runtime that computes with eager torch: one replica, no XLA, one file.

``TOY_DEVICE=1`` selects it. It uses public names of polyxla only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyxla import hookimpl
from polyxla.plugin import Claim, Device, Discovery, Job, Replication, World, run_inline, run_processes

if TYPE_CHECKING:
    import torch

TOY_DEVICE = "TOY_DEVICE"


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    asked = environ.get(TOY_DEVICE)
    return Discovery(
        claim=Claim.EXPLICIT if asked else Claim.NONE,
        reason=f"{TOY_DEVICE}={asked}" if asked else f"{TOY_DEVICE} is not set",
        kind="TOY",
        devices=(Device(0, "TOY", "this machine's CPU, eager torch"),),
    )


@hookimpl
def polyxla_environment() -> dict[str, str]:
    return {TOY_DEVICE: "1"}


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    if job.process_method is None:
        return run_inline(job)
    return run_processes(job, [None], [job.environ], method=job.process_method)


@hookimpl
def polyxla_replication() -> Replication:
    return ToyReplication()


class ToyReplication(Replication):
    kind = "TOY"

    def __init__(self) -> None:
        import torch

        self.world = World()
        self.device = torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        return [payload]

    def sync(self, wait: bool = False) -> None:
        pass

    def seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def rng_state(self) -> int:
        import torch

        return torch.initial_seed()

    def report(self) -> str:
        return "toy: nothing to report"

    def close(self) -> None:
        pass
