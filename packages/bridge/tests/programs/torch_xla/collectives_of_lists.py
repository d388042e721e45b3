"""Collectives of lists of tensors, of groups and of several dtypes.

Layouts are not pinned: with lists, torch_xla 2.9.0 would end the process ("Check failed: has_layout()").
"""

from collections.abc import Sequence

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla_helpers import everywhere, xm

UNPINNED = {"scale": 1.0, "scatter_dim": 0, "pin_layout": False}


def same(found: Sequence[torch.Tensor], *expected: torch.Tensor) -> None:
    torch_xla.sync()
    for tensor, other in zip(found, expected, strict=True):
        assert torch.allclose(tensor.cpu(), other), (xr.global_ordinal(), tensor.cpu(), other)


def constant(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(value), device=torch_xla.device())


def reduce_scatters() -> None:
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    total = size * (size + 1) / 2

    def whole(count: int, more: float = 0.0) -> torch.Tensor:
        return torch.arange(float(count), device=device).reshape(size, -1) * (ordinal + 1) + more

    def mine(count: int, more: float = 0.0) -> torch.Tensor:
        return (torch.arange(float(count)).reshape(size, -1) * total + size * more)[ordinal : ordinal + 1]

    scatter = {**UNPINNED, "shard_count": size}
    lists = [whole(size * 2), whole(size * 3, 1.0), whole(size)]
    expected = [mine(size * 2), mine(size * 3, 1.0), mine(size)]
    same(xm.reduce_scatter(xm.REDUCE_SUM, lists, **scatter), *expected)
    most = xm.reduce_scatter(xm.REDUCE_MAX, lists, **scatter)
    same(most[:1], (torch.arange(size * 2.0).reshape(size, -1) * size)[ordinal : ordinal + 1])
    outputs = [torch.zeros(1, columns, device=device) for columns in (2, 3, 1)]
    xm.reduce_scatter(xm.REDUCE_SUM, lists, output=outputs, **scatter)
    same(outputs, *expected)
    for bucket in (0, 1):
        same(xm.reduce_scatter_bucketized(xm.REDUCE_SUM, lists, bucket_cap_mb=bucket, **scatter), *expected)
    half = xm.reduce_scatter_bucketized(xm.REDUCE_SUM, lists, bucket_cap_mb=0, **{**scatter, "scale": 0.5})
    same(half, *[tensor * 0.5 for tensor in expected])


def groups_of_two() -> None:
    """Run collectives within the groups [0, 2] and [1, 3] of four replicas."""
    device, ordinal = torch_xla.device(), xr.global_ordinal()
    groups = [[0, 2], [1, 3]]
    group = groups[ordinal % 2]
    place = group.index(ordinal)
    lists = [torch.arange(4.0, device=device) + ordinal, torch.arange(2.0, device=device)]
    found = xm.reduce_scatter(xm.REDUCE_SUM, lists, groups=groups, shard_count=2, **UNPINNED)
    same(found[:1], (2 * torch.arange(4.0) + sum(group))[2 * place : 2 * place + 2])
    number = constant(ordinal, 1)
    same([xm.all_reduce(xm.REDUCE_SUM, number, groups=groups)], torch.tensor([float(sum(group))]))
    same([xm.all_gather(number, groups=groups)], torch.tensor([float(member) for member in group]))


def all_gathers() -> None:
    ordinal, size = xr.global_ordinal(), xr.world_size()
    pair = [constant(ordinal, 2), constant(2.0 * ordinal, 3)]
    every = [torch.tensor([k * i for i in range(size) for _ in range(n)]) for k, n in ((1.0, 2), (2.0, 3))]
    same(xm.all_gather(pair, pin_layout=False), *every)
    same(xm.all_gather_bucketized(pair, pin_layout=False, bucket_cap_mb=1), *every)
    output = constant(0, size * 2)
    xm.all_gather(pair[0], output=output)
    same([output], every[0])
    wide = xm.all_gather(constant(ordinal, 2, 2), dim=1)
    same([wide], torch.stack([every[0], every[0]]))


def all_reduces() -> None:
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    for op, combine in ((xm.REDUCE_SUM, sum), (xm.REDUCE_MIN, min), (xm.REDUCE_MAX, max)):
        two = [constant(ordinal + 1.0, 2), torch.full((3,), ordinal + 2, device=device)]
        xm.all_reduce(op, two)
        torch_xla.sync()
        assert two[0].cpu()[0].item() == combine([i + 1.0 for i in range(size)]), op
        assert two[1].cpu()[0].item() == combine([i + 2 for i in range(size)]), op
    for op, expected in ((xm.REDUCE_AND, [size == 1, True]), (xm.REDUCE_OR, [True, True])):
        flags = [torch.tensor([ordinal == 0, True], device=device), torch.tensor([True], device=device)]
        xm.all_reduce(op, flags)
        torch_xla.sync()
        assert flags[0].cpu().tolist() == expected, op
    reals = [torch.bfloat16, torch.float16, torch.float64]
    for dtype in [*reals, torch.int32, torch.int64, torch.uint8, torch.int8]:
        found = xm.all_reduce(xm.REDUCE_SUM, torch.ones(3, device=device, dtype=dtype)).cpu()
        assert found.tolist() == [size] * 3, dtype
        assert found.dtype == dtype


def exchanges() -> None:
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    sent = torch.arange(size * 2.0, device=device).reshape(size, 2) + 100 * ordinal
    got = xm.all_to_all(sent, 0, 1, size).cpu()
    assert got.tolist() == [[100.0 * i + 2 * ordinal + k for i in range(size) for k in range(2)]], got
    ring = [[i, (i + 1) % size] for i in range(size)]
    found = xm.collective_permute(constant(ordinal, 1), ring).cpu()
    assert found.item() == (ordinal - 1) % size
    found = xm.collective_permute(constant(ordinal + 5.0, 1), [[0, size - 1]]).cpu()
    assert found.item() == (5.0 if ordinal == size - 1 else 0.0)


def check() -> str:
    reduce_scatters()
    if xr.world_size() == 4:
        groups_of_two()
    all_gathers()
    all_reduces()
    exchanges()
    return "right"


print(*everywhere(check))
