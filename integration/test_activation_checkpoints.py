"""`torch.utils.checkpoint` on torch_xla: what it computes, and that XLA computes it twice."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

pytestmark = pytest.mark.pjrt

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
POLICY = functools.partial(torchs.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


def _network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), nn.Tanh()]
    return nn.Sequential(*layers).to(device)


def _gradients(device: str, run: Callable[[nn.Sequential, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    network, x = _network(device), torch.linspace(-1, 1, 12).reshape(3, 4).to(device).requires_grad_()
    run(network, x * 2).square().sum().backward()
    return [leaf.grad.cpu() for leaf in (x, *network.parameters()) if leaf.grad is not None]


RUNS: dict[str, Callable[[nn.Sequential, torch.Tensor], torch.Tensor]] = {
    "hooks": lambda network, x: checkpoint(network, x, use_reentrant=False),
    "reentrant": lambda network, x: checkpoint(network, x, use_reentrant=True),
    "keyword": lambda network, x: checkpoint(lambda *, x: network(x), x=x, use_reentrant=False),
    "nested": lambda network, x: checkpoint(
        lambda x: checkpoint(network[2:], network[:2](x), use_reentrant=False), x, use_reentrant=False
    ),
    "sequential": lambda network, x: checkpoint_sequential(network, 2, x, use_reentrant=False),
    "sequential-reentrant": lambda network, x: checkpoint_sequential(network, 2, x, use_reentrant=True),
    "selective": lambda network, x: checkpoint(network, x, use_reentrant=False, context_fn=POLICY),
    "nothing-kept": lambda network, x: checkpoint(network, x, use_reentrant=False, preserve_rng_state=False),
    "pairs": lambda network, x: checkpoint(
        lambda pair: {"sum": network(pair[0]) + pair[1]}, (x, x * 3), use_reentrant=False
    )["sum"],
}


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_the_cpu_without_checkpoints(name: str) -> None:
    def plain(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = network(x)
        return y + x * 3 if name == "pairs" else y

    found, expected = _gradients("xla", RUNS[name]), _gradients("cpu", plain)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@VARIANTS
def test_random_numbers_are_drawn_again(use_reentrant: bool) -> None:
    masks = []
    for _ in range(2):
        x = torch.ones(4096, device="xla", requires_grad=True)
        y = checkpoint(lambda x: F.dropout(F.dropout(x, 0.3), 0.3), x, use_reentrant=use_reentrant)
        after = torch.rand(4096, device="xla")
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())
        masks += [y.detach().cpu() > 0, after.cpu() < 0.5, torch.rand(4096, device="xla").cpu() < 0.5]
    # The numbers that are drawn afterwards are not those of the checkpoint, and every pass has others.
    shares = [(a == b).double().mean().item() for i, a in enumerate(masks) for b in masks[:i]]
    assert all(0.4 < share < 0.6 for share in shares)


@VARIANTS
def test_what_is_computed_again_is_in_the_dtype_of_the_first_pass(use_reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        seen.append(y.dtype)
        return y @ x

    x = torch.eye(4, device="xla", requires_grad=True)
    with torch.autocast("xla", torch.bfloat16):
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.float().sum().backward()
    if not use_reentrant:
        with torch.autocast("xla", torch.bfloat16):
            # It gets no tensor from which the device would be known.
            z = checkpoint(lambda: layer(x), use_reentrant=False)
        z.float().sum().backward()
    assert {*seen} == {torch.bfloat16}
    assert len(seen) == (2 if use_reentrant else 4)


@VARIANTS
def test_xla_does_not_keep_what_is_computed_again(use_reentrant: bool) -> None:
    def barriers(run: Callable[..., torch.Tensor]) -> int:
        x = torch.ones(8, 8, device="xla", requires_grad=True)
        y = run(x * 2)
        for _ in range(2):
            y = run(y)
        y.sum().backward()
        native: Any = importlib.import_module("_XLAC")
        return len(re.findall(r" opt-barrier\(", native._get_xla_tensors_hlo([x.grad])))

    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to("xla")
    assert barriers(layer) == 0
    assert barriers(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)) == 3


def test_a_block_keeps_the_devices_random_numbers() -> None:
    with torch.random.fork_rng(device_type="xla"):
        drawn = torch.rand(8, device="xla")
    assert torch.equal(torch.rand(8, device="xla").cpu(), drawn.cpu())
    with torch.random.fork_rng(device_type="xla", enabled=False):
        drawn = torch.rand(8, device="xla")
    assert not torch.equal(torch.rand(8, device="xla").cpu(), drawn.cpu())


@VARIANTS
def test_the_cpu_has_checkpoints_too(use_reentrant: bool) -> None:
    x = torch.ones(512, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y.detach(), x.grad)
