"""torch.distributed with torch_xla's backend: collectives, groups and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from polyxla import Replica
from polyxla.plugin import free_ports, map_tensors

LAYOUTS = [
    pytest.param((1, 1), id="1-alone", marks=pytest.mark.long),
    pytest.param((2, 2), id="2-processes", marks=pytest.mark.long),
    pytest.param((4, 1), id="4-threads"),
    pytest.param((4, 2), id="4-mixed", marks=pytest.mark.long),
    pytest.param((4, 4), id="4-processes"),
]
SHARE, STEPS = 6, 3


@pytest.fixture(autouse=True)
def _store_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a free port for the store of torch_xla's ``xla://``, instead of 12355."""
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))


@pytest.mark.slow
@pytest.mark.torch_xla("torch.distributed's backend xla")
@pytest.mark.parametrize("everywhere", LAYOUTS, indirect=True)
def test_torch_distributed_gives_the_right_results(everywhere: Callable[..., list[Any]]) -> None:
    results = everywhere(_run)
    for ordinal, result in enumerate(results):
        wanted = _expected(ordinal, len(results))
        assert result.keys() == wanted.keys()
        for name, value in wanted.items():
            try:
                torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
            except AssertionError as error:
                error.add_note(f"in {name}, ordinal {ordinal}")
                raise


def _run(replica: Replica) -> dict[str, Any]:
    import torch_xla.distributed.xla_backend  # noqa: F401 -- registers the backend

    dist.init_process_group("xla", init_method="xla://")
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (replica.ordinal, replica.world_size)
        results = {**_collectives(replica), **_groups(replica)}
        results |= {
            f"DistributedDataParallel, views: {views}": _ddp(replica, views) for views in (False, True)
        }
        replica.sync()
        on_host: dict[str, Any] = map_tensors(lambda tensor: tensor.detach().cpu(), results)
        return on_host
    finally:
        dist.destroy_process_group()


def _given(ordinal: int, size: int) -> Tensor:
    return torch.arange(size * 2, dtype=torch.float32) * (ordinal + 1) + 1


def _collectives(replica: Replica) -> dict[str, Any]:
    size, ordinal = replica.world_size, replica.ordinal
    mine = replica.to_device(_given(ordinal, size))
    results: dict[str, Any] = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        results[f"all_reduce {name}"] = reduced = mine.clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, name))
    results["all_gather"] = gathered = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    results["all_gather_into_tensor"] = whole = mine.repeat(size)
    dist.all_gather_into_tensor(whole, mine)
    results["reduce_scatter"] = part = torch.zeros_like(mine[:2])
    dist.reduce_scatter(part, list(mine.split(2)))
    results["reduce_scatter_tensor"] = piece = torch.zeros_like(mine[:2])
    dist.reduce_scatter_tensor(piece, mine)
    results["broadcast"] = sent = mine.clone()
    dist.broadcast(sent, size - 1)
    results["all_to_all_single"] = exchanged = torch.zeros_like(mine)
    dist.all_to_all_single(exchanged, mine)
    dist.barrier()
    results["reduce"] = kept = mine.clone()
    dist.reduce(kept, size - 1)
    return results


def _groups(replica: Replica) -> dict[str, Any]:
    result = replica.to_device(_given(replica.ordinal, replica.world_size))
    pairs = [
        dist.new_group(ranks, pg_options={"xla_pg_options": {"spmd": True}})
        for ranks in _pairs(replica.world_size)
    ]
    dist.all_reduce(result, group=pairs[replica.ordinal // 2])
    return {"a group's all_reduce": result}


def _pairs(size: int) -> list[list[int]]:
    return [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]


def _ddp(replica: Replica, views: bool) -> list[list[Tensor]]:
    inputs, targets = (
        replica.to_device(records[replica.ordinal]) for records in _records(replica.world_size)
    )
    model = _model().to(replica.device)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    return _trained(wrapped, inputs, targets, replica.sync)


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        # From a separate generator: replicas that are threads share torch's.
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def _records(size: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size * SHARE, width, generator=generator).chunk(size) for width in (4, 1)]


def _trained(
    model: nn.Module, inputs: Tensor, targets: Tensor, sync: Callable[[], None] = lambda: None
) -> list[list[Tensor]]:
    """Return the last step's gradients and the trained parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        sync()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradients, list(model.parameters())]


def _expected(ordinal: int, size: int) -> dict[str, Any]:
    every = torch.stack([_given(i, size) for i in range(size)])
    total = every.sum(0)
    pair = _pairs(size)[ordinal // 2]
    inputs, targets = (torch.cat(records) for records in _records(size))
    trained = _trained(_model(), inputs, targets)
    return {
        "all_reduce SUM": total,
        "all_reduce PRODUCT": every.prod(0),
        "all_reduce MIN": every.amin(0),
        "all_reduce MAX": every.amax(0),
        "all_gather": list(every),
        "all_gather_into_tensor": every.flatten(),
        "reduce_scatter": total.split(2)[ordinal],
        "reduce_scatter_tensor": total.split(2)[ordinal],
        "broadcast": every[-1],
        "all_to_all_single": torch.cat([part.split(2)[ordinal] for part in every]),
        "reduce": total if ordinal == size - 1 else every[ordinal],
        "a group's all_reduce": every[pair].sum(0),
        **{
            f"DistributedDataParallel, views: {views}": [
                [tensor.detach() for tensor in part] for part in trained
            ]
            for views in (False, True)
        },
    }
