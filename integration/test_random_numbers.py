"""Random numbers of the device have the distributions of the CPU's, and are drawn anew each time.

The samples of torch's operator database leave out what is random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from polyxla import Replica
from polyxla_testing import RuntimeUnderTest

COUNT = 20_000
Draw = Callable[[Any], torch.Tensor]


def _empty(device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COUNT, device=device, dtype=dtype)


def _ones(device: Any, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (COUNT,), device=device)


DRAWS: dict[str, Draw] = {
    "rand": lambda device: torch.rand(COUNT, device=device),
    "rand-half": lambda device: torch.rand(COUNT, device=device, dtype=torch.bfloat16),
    "randn": lambda device: torch.randn(COUNT, device=device),
    "randn-half": lambda device: torch.randn(COUNT, device=device, dtype=torch.bfloat16),
    "randint": lambda device: torch.randint(-5, 11, (COUNT,), device=device),
    "randperm": lambda device: torch.cat([torch.randperm(100, device=device)[:50] for _ in range(10)]),
    "rand-like": lambda device: torch.rand_like(_ones(device)),
    "randint-like": lambda device: torch.randint_like(_ones(device), 2, 9),
    "uniform": lambda device: _empty(device).uniform_(-2, 5),
    "normal": lambda device: _empty(device).normal_(3, 2),
    "normal-of-tensors": lambda device: torch.normal(2 * _ones(device), 3 * _ones(device)),
    "exponential": lambda device: _empty(device).exponential_(2.5),
    "bernoulli": lambda device: torch.bernoulli(0.7 * _ones(device)),
    "bernoulli-in-place": lambda device: _empty(device).bernoulli_(0.3),
    "bernoulli-of-tensor": lambda device: _empty(device).bernoulli_(0.2 * _ones(device)),
    "random": lambda device: _empty(device, torch.int32).random_(-3, 10),
    "multinomial": lambda device: torch.multinomial(
        torch.tensor([1.0, 2, 0, 7], device=device), COUNT, replacement=True
    ),
    "multinomial-once": lambda device: torch.multinomial(
        torch.tensor([[0.1, 0.2, 0.3, 0.4]], device=device).expand(5000, 4), 2
    ),
    "dropout": lambda device: F.dropout(_ones(device), 0.3),
    "dropout-of-features": lambda device: F.dropout2d(_ones(device, 200, 50, 2, 2), 0.3),
    "alpha-dropout": lambda device: F.alpha_dropout(_ones(device), 0.3, training=True),
    "native-dropout": lambda device: torch.native_dropout(_ones(device), 0.3, True)[0],
    "gumbel": lambda device: F.gumbel_softmax(torch.zeros(COUNT // 2, 2, device=device)),
    "truncated-normal": lambda device: nn.init.trunc_normal_(_empty(device), 1, 2, -1, 3),
    "orthogonal": lambda device: torch.stack(
        [nn.init.orthogonal_(torch.empty(20, 20, device=device)) for _ in range(4)]
    ),
    "linear": lambda device: nn.Linear(100, 200, device=device).weight.detach(),
    "laplace": lambda device: torch.distributions.Laplace(_ones(device), _ones(device)).sample(),
}
TORCH_XLA_DRAWS: dict[str, Draw] = {
    "attention-dropout": lambda device: F.scaled_dot_product_attention(
        _ones(device, 50, 2, 8, 4), _ones(device, 50, 2, 8, 4), _ones(device, 50, 2, 8, 4), dropout_p=0.3
    ),
    "cauchy": lambda device: _empty(device).cauchy_(1, 2).atan(),
    "log-normal": lambda device: _empty(device).log_normal_(0.3, 0.7),
    "geometric": lambda device: _empty(device).geometric_(0.3),
    "poisson": lambda device: torch.poisson(3.5 * _ones(device)),
    "binomial": lambda device: torch.binomial(10 * _ones(device), 0.3 * _ones(device)),
    "rrelu": lambda device: F.rrelu(-_ones(device), 0.4, 0.6, training=True),
    "gamma": lambda device: torch.distributions.Gamma(2 * _ones(device), 3 * _ones(device)).sample(),
    "random-bool": lambda device: _empty(device, torch.bool).random_(),
}
"""What TorchTPU 0.2.0 refuses, or warns of. Its `random_` of booleans is always False."""


def _drawn(replica: Replica) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    replica.seed_everything(0)
    draws = DRAWS | (TORCH_XLA_DRAWS if replica.device.type == "xla" else {})
    return {name: (draw(replica.device).cpu(), draw(replica.device).cpu()) for name, draw in draws.items()}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest distance of two distribution functions (Kolmogorov and Smirnov's statistic)."""
    # Equal numbers may be rounded otherwise.
    a, b = (x.double().flatten().mul(1e4).round().sort().values for x in (a, b))
    places = torch.cat([a, b])
    shares = [torch.searchsorted(x, places, right=True) / len(x) for x in (a, b)]
    return (shares[0] - shares[1]).abs().max().item()


def test_random_numbers_have_the_distributions_of_the_cpus(runtime: RuntimeUnderTest) -> None:
    (found,) = runtime.launch(_drawn, devices=1)
    assert found.keys() >= DRAWS.keys()
    torch.manual_seed(0)
    wrong = {}
    for name, (once, again) in found.items():
        expected = (DRAWS | TORCH_XLA_DRAWS)[name]("cpu")
        assert (once.shape, once.dtype) == (expected.shape, expected.dtype), name
        assert not torch.equal(once, again), name
        # Two samples of one distribution are farther apart once in 100,000.
        limit = 2.47 * math.sqrt(2 / once.numel())
        if (distance := _distance(once, expected)) > limit:
            wrong[name] = distance
    assert wrong == {}


def _programs(replica: Replica) -> list[torch.Tensor]:
    drawn = []
    for seed in (0, 0, 1):
        replica.seed_everything(seed)
        for _ in range(3):
            drawn += [torch.rand(COUNT, device=replica.device) for _ in range(2)]
            replica.sync()
    return [numbers.cpu() for numbers in drawn]


def test_numbers_depend_on_seed_and_replica_and_on_nothing_else(runtime: RuntimeUnderTest) -> None:
    first, second = runtime.launch(_programs, devices=2)
    assert all(torch.equal(*pair) for pair in zip(first[:6], first[6:12], strict=True))
    different = torch.stack([*first[6:], *second[6:]])
    others = different.corrcoef().fill_diagonal_(0)
    assert others.abs().max() < 6 / math.sqrt(COUNT)
    # Neighbours within one draw.
    for numbers, lag in itertools.product(different, (1, 2, 128)):
        assert torch.stack([numbers[:-lag], numbers[lag:]]).corrcoef()[0, 1].abs() < 6 / math.sqrt(COUNT)
