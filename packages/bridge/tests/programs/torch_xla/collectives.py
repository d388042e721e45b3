"""Every collective of torch_xla on this process's replicas, which are threads."""

import torch
import torch_xla
import torch_xla.core.functions as xf
import torch_xla.runtime as xr
from torch_xla_helpers import everywhere, xm


def check() -> str:
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    mine = torch.tensor([ordinal + 1.0, 2.0], device=device)
    every = [torch.tensor([i + 1.0, 2.0]) for i in range(size)]
    stacked = torch.stack(every)
    expected = {
        xm.REDUCE_SUM: stacked.sum(0),
        xm.REDUCE_MUL: stacked.prod(0),
        xm.REDUCE_MIN: stacked.min(0).values,
        xm.REDUCE_MAX: stacked.max(0).values,
    }
    for op, value in expected.items():
        assert torch.allclose(xm.all_reduce(op, mine).cpu(), value), op
    flags = torch.tensor([ordinal == 0, True], device=device)
    assert xm.all_reduce(xm.REDUCE_AND, flags).cpu().tolist() == [size == 1, True]
    assert xm.all_reduce(xm.REDUCE_OR, flags).cpu().tolist() == [True, True]
    assert torch.allclose(xm.all_reduce(xm.REDUCE_SUM, mine, scale=1 / size).cpu(), stacked.mean(0))
    pair = [torch.ones(2, device=device), torch.full((3,), float(ordinal), device=device)]
    xm.all_reduce(xm.REDUCE_SUM, pair)
    assert pair[0].cpu().tolist() == [size] * 2
    assert pair[1].cpu()[0].item() == size * (size - 1) / 2
    groups = [[i, i + 1] for i in range(0, size, 2)]
    near = xm.all_reduce(xm.REDUCE_SUM, mine, groups=groups).cpu()[0].item()
    first = ordinal - ordinal % 2
    assert near == (first + 1) + (first + 2)
    for pinned in (True, False):
        assert torch.equal(xm.all_gather(mine, pin_layout=pinned).cpu(), torch.cat(every))
    whole = torch.arange(2.0 * size, device=device) + ordinal
    part = xm.reduce_scatter(xm.REDUCE_SUM, whole, scale=1.0, scatter_dim=0, shard_count=size).cpu()
    base = torch.arange(2.0 * size) * size + size * (size - 1) / 2
    assert torch.allclose(part, base[2 * ordinal : 2 * ordinal + 2])
    turned = xm.all_to_all(torch.arange(float(size), device=device) + 100 * ordinal, 0, 0, size).cpu()
    assert turned.tolist() == [100.0 * i + ordinal for i in range(size)]
    ring = xm.collective_permute(mine, [[i, (i + 1) % size] for i in range(size)]).cpu()
    assert ring[0].item() == (ordinal - 1) % size + 1.0
    assert xm.mesh_reduce("sum", ordinal + 1, sum) == size * (size + 1) // 2
    assert xm.rendezvous("tag", str(ordinal).encode()) == [str(i).encode() for i in range(size)]
    model = torch.nn.Linear(2, 2).to(device)
    with torch.no_grad():
        model.weight.fill_(float(ordinal + 3))
    xm.broadcast_master_param(model)
    assert model.weight.cpu()[0, 0].item() == 3.0
    leaf = torch.full((2,), ordinal + 1.0, device=device, requires_grad=True)
    (xf.all_gather(leaf) * (ordinal + 1.0)).sum().backward()
    # torch_xla's backward takes this replica's slice of its own gradient.
    assert leaf.grad is not None
    assert leaf.grad.cpu().tolist() == [ordinal + 1.0] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((4, 2), ordinal + 1.0, device=device)).sum().backward()
    xm.optimizer_step(optimizer, barrier=True)
    weights = xm.all_gather(model.weight.detach()[None])
    assert torch.equal(weights.cpu()[0], weights.cpu()[-1])
    return "right"


print(*everywhere(check), sep="\n")
