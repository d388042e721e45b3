"""Floating-point operations of a call, compared with torch's own count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from polyxla.plugin import Counters, Counts, location
from polyxla_training.observe.tracer import WITH_BACKWARD, Tracer, flops


class NoCounters(Counters):
    def counts(self) -> Counts:
        return Counts()

    def compile_s(self) -> float:
        return 0.0

    def fallbacks(self) -> dict[str, int]:
        return {}

    def memory(self) -> None:
        return None


def counted(call: Any) -> int:
    """Return what the tracer counts of a call."""
    tracer = Tracer(NoCounters())
    tracer.start()
    call()
    tracer.stop()
    return tracer.flops


def by_torch(call: Any) -> int:
    """Return what torch counts of the forward pass alone."""
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel([SDPBackend.MATH]):
        call()
    return int(counter.get_total_flops())


def some(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CALLS = {
    "linear": lambda: F.linear(some(5, 2, 3), some(4, 3), some(4)),
    "linear-named": lambda: F.linear(input=some(5, 3), weight=some(4, 3)),
    "matmul": lambda: some(2, 3) @ some(3, 4),
    "matmul-broadcast": lambda: some(6, 1, 2, 3).matmul(some(5, 3, 4)),
    "mm": lambda: torch.mm(some(2, 3), some(3, 4)),
    "bmm": lambda: some(6, 2, 3).bmm(some(6, 3, 4)),
    "addmm": lambda: torch.addmm(some(4), some(2, 3), some(3, 4)),
    "baddbmm": lambda: torch.baddbmm(some(6, 2, 4), some(6, 2, 3), some(6, 3, 4)),
    "conv1d": lambda: F.conv1d(some(2, 3, 9), some(4, 3, 3), stride=2),
    "conv2d": lambda: torch.nn.Conv2d(6, 4, 3, groups=2, padding=1)(some(2, 6, 8, 7)).detach(),
    "conv3d": lambda: torch.conv3d(some(1, 2, 4, 4, 4), some(3, 2, 2, 2, 2)),
    "transposed": lambda: F.conv_transpose2d(some(2, 3, 5, 5), some(3, 4, 3, 3), stride=2),
    "attention": lambda: F.scaled_dot_product_attention(some(2, 4, 5, 8), some(2, 4, 7, 8), some(2, 4, 7, 8)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", some(2, 3, 4), some(2, 4, 5)),
    "einsum-dots": lambda: torch.einsum("...ij, kj -> ...ik", some(2, 6, 3, 4), some(5, 4)),
    "heads": lambda: torch.nn.MultiheadAttention(8, 2)(*[some(5, 3, 8)] * 3, need_weights=False),
    "heads-unbatched": lambda: torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=4)(
        some(5, 8), some(7, 6), some(7, 4)
    ),
    "encoder": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16)(some(5, 3, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_pass_is_counted_as_torch_counts_it(name: str) -> None:
    with torch.no_grad():
        assert counted(CALLS[name]) == by_torch(CALLS[name]) > 0


def test_recurrence_is_counted_per_record() -> None:
    network = torch.nn.LSTM(3, 4, num_layers=2)
    whole = 2 * (5 * 2) * 16 * (3 + 4 + 4 + 4)
    with torch.no_grad():
        assert counted(lambda: network(some(5, 2, 3))) == whole
        packed = torch.nn.utils.rnn.pack_sequence([some(5, 3), some(4, 3)])
        assert counted(lambda: network(packed)) == whole * 9 // 10


def test_a_trained_product_costs_its_backward_pass_too() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    forward = counted(lambda: some(2, 3) @ weight.detach())
    assert counted(lambda: (some(2, 3) @ weight).sum().backward()) == WITH_BACKWARD * forward


def test_recomputed_activations_are_not_counted_again() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    call = lambda: checkpoint(lambda: some(2, 3) @ weight, use_reentrant=False).sum().backward()  # noqa: E731
    assert counted(call) == WITH_BACKWARD * 2 * 2 * 3 * 4


def test_other_functions_are_not_counted() -> None:
    assert flops(torch.add, (some(1), some(1)), {}, some(1)) == 0
    assert counted(lambda: torch.einsum("ij,jk,kl->il", some(2, 3), some(3, 4), some(4, 5))) == 0
    assert counted(lambda: torch.tensordot(some(2, 3), some(3, 4), dims=1)) == 0
    assert counted(lambda: F.bilinear(some(2, 3), some(2, 4), some(5, 3, 4))) == 0


def test_a_reentrant_checkpoint_counts_as_a_forward_pass() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    inputs = some(2, 3).requires_grad_()
    call = lambda: checkpoint(lambda x: x @ weight, inputs, use_reentrant=True).sum().backward()  # noqa: E731
    assert counted(call) == 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("call", "percentage"),
    [
        pytest.param(lambda: F.linear(some(2, 3), some(4, 3)), 75, id="two-rows"),
        pytest.param(lambda: F.linear(some(1, 3), some(4, 3)), 88, id="one-row"),
        pytest.param(lambda: F.linear(some(6, 3), some(4, 3)), 25, id="six-rows"),
        pytest.param(lambda: F.linear(some(7, 3), some(4, 3)), None, id="seven-rows"),
        pytest.param(lambda: F.linear(some(8, 3), some(4, 3)), None, id="a-whole-tile"),
        pytest.param(lambda: F.linear(some(1, 16, 3), some(4, 3)), None, id="a-sequence"),
        pytest.param(lambda: F.conv2d(some(1, 3, 8, 8), some(4, 3, 3, 3)), None, id="a-picture"),
        pytest.param(lambda: some(3).dot(some(3)), None, id="no-rows"),
    ],
)
def test_a_batch_that_a_tpu_pads_is_found_with_its_line(call: Any, percentage: int | None) -> None:
    for on_tpu in (True, False):
        tracer = Tracer(NoCounters(), on_tpu=on_tpu)
        tracer.start()
        call()
        tracer.stop()
        found = {finding.describe(count) for finding, count in tracer.found.items()}
        rows = call().shape[0] if percentage else 0
        expected = (
            f"{location(call.__code__)}: a product of {rows} row{'s' * (rows > 1)}, "
            f"which a TPU pads to a multiple of 8: {percentage}% of the work of the step's products is "
            "padding; give each replica a larger batch"
        )
        assert found == ({expected} if on_tpu and percentage else set())


def test_padding_counts_by_the_work_of_the_whole_step() -> None:
    tracer = Tracer(NoCounters(), on_tpu=True)
    tracer.start()
    F.linear(some(4, 2), some(3, 2))
    F.linear(some(800, 2), some(3, 2))
    tracer.stop()
    assert not tracer.found, "a small head after a large body"
