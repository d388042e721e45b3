"""Gradients through collectives, and training with them, against plain torch on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyxla import Replica, UsageError
from polyxla.plugin import map_tensors
from polyxla_testing import RuntimeUnderTest

LAYOUTS = [
    pytest.param((1, 1), id="1-alone", marks=pytest.mark.long),
    pytest.param((2, 2), id="2-processes", marks=pytest.mark.long),
    pytest.param((4, 1), id="4-threads", marks=pytest.mark.long),
    pytest.param((4, 2), id="4-mixed"),
    pytest.param((4, 4), id="4-processes", marks=pytest.mark.long),
    pytest.param((8, 4), id="8-mixed", marks=pytest.mark.long),
]
# Without threads: torch.compile shares compiled functions among the threads of a process, and torch_xla
# writes one replica's graphs into them while another replica uses them.
PROCESSES = [
    pytest.param((1, 1), id="1-alone", marks=pytest.mark.long),
    pytest.param((2, 2), id="2-processes"),
    pytest.param((4, 4), id="4-processes", marks=pytest.mark.long),
]
SHARE, STEPS = 6, 3


def shares(size: int, *shape: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return each replica's records; a record has `shape`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size * SHARE, *shape, generator=generator).chunk(size)


def _gradient(function: Callable[[Tensor], Tensor], given: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the function's value, and the gradient of its weighted sum."""
    given = given.detach().requires_grad_()
    result = function(given)
    (result * weight).sum().backward()
    assert given.grad is not None
    return [result.detach(), given.grad]


class Functions:
    """torch_xla.core.functions: a replica gets the gradient of its own loss by its own input."""

    @staticmethod
    def run(replica: Replica) -> dict[str, Any]:
        from torch_xla.core import functions

        size, ordinal = replica.world_size, replica.ordinal
        mine, weight = (replica.to_device(shares(size, 4, seed=seed)[ordinal]) for seed in (0, 1))
        halves = [[*range(0, size, 2)], [*range(1, size, 2)]] if size > 1 else [[0]]
        results = {
            "sum": _gradient(lambda x: functions.all_reduce("sum", x, scale=1 / size), mine, weight),
            "mul": _gradient(lambda x: functions.all_reduce("mul", x), mine, weight),
            "min": _gradient(lambda x: functions.all_reduce("min", x), mine, weight),
            "max": _gradient(lambda x: functions.all_reduce("max", x), mine, weight),
            "groups": _gradient(lambda x: functions.all_reduce("sum", x, groups=halves), mine, weight),
        }
        for dim in (0, 1):
            wide = torch.cat([weight * (i + 1) for i in range(size)], dim)
            results[f"gather {dim}"] = _gradient(functools.partial(functions.all_gather, dim=dim), mine, wide)
        inputs = replica.to_device(torch.stack(shares(size, 3, seed=2))[:, 0].repeat_interleave(2, 0))
        results["distributed_mm"] = functions.distributed_mm(mine[:, :2], inputs + ordinal)
        return results

    @staticmethod
    def expected(ordinal: int, size: int) -> dict[str, Any]:
        every, weight = torch.stack(shares(size, 4)), shares(size, 4, seed=1)[ordinal]
        mine = every[ordinal]
        product, low, high = every.prod(0), every.amin(0), every.amax(0)
        wanted: dict[str, Any] = {
            "sum": [every.mean(0), weight / size],
            "mul": [product, weight * product / mine],
            "min": [low, torch.where(mine == low, weight, 0)],
            "max": [high, torch.where(mine == high, weight, 0)],
            "groups": [every[ordinal % 2 :: 2].sum(0), weight],
            "gather 0": [torch.cat([*every], 0), weight * (ordinal + 1)],
            "gather 1": [torch.cat([*every], 1), weight * (ordinal + 1)],
        }
        inputs = torch.stack(shares(size, 3, seed=2))[:, 0].repeat_interleave(2, 0)
        wanted["distributed_mm"] = torch.cat([part[:, :2] for part in every], 1) @ (inputs + ordinal)
        return wanted


class SyncBatchNorm:
    """SyncBatchNorm normalizes by the whole batch, in the backward pass too."""

    @staticmethod
    def run(replica: Replica) -> dict[str, Any]:
        from torch_xla.core.functions import SyncBatchNorm

        results = {}
        for shape in ((4,), (4, 2, 3)):
            norm = SyncBatchNorm(4).to(replica.device)
            given, weight = (
                replica.to_device(shares(replica.world_size, *shape, seed=seed)[replica.ordinal])
                for seed in (0, 1)
            )
            results[str(shape)] = [
                *_gradient(norm, given, weight),
                replica.all_reduce(norm.weight.grad),
                replica.all_reduce(norm.bias.grad),
                norm.running_mean,
            ]
        return results

    @staticmethod
    def expected(ordinal: int, size: int) -> dict[str, Any]:
        wanted = {}
        for shape in ((4,), (4, 2, 3)):
            norm = nn.BatchNorm1d(4) if len(shape) == 1 else nn.BatchNorm2d(4)
            whole, weights = (torch.cat(shares(size, *shape, seed=seed)) for seed in (0, 1))
            value, gradient = _gradient(norm, whole, weights)
            wanted[str(shape)] = [
                value.chunk(size)[ordinal],
                gradient.chunk(size)[ordinal],
                norm.weight.grad,
                norm.bias.grad,
                norm.running_mean,
            ]
        return wanted


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


# Replicas may be threads, which share torch's generator, so they get their weights from here.
INITIAL = {name: value.clone() for name, value in _model().state_dict().items()}


def _train(
    inputs: Tensor, targets: Tensor, step: Callable[[torch.optim.Optimizer], None], wrap: Any = None
) -> list[Tensor]:
    """Train the model on these records; return the trained parameters."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model.load_state_dict(INITIAL)
    model.to(inputs.device)
    forward = wrap(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(forward(inputs), targets).backward()
        step(optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def _train_replica(
    replica: Replica, step: Callable[[torch.optim.Optimizer], None], wrap: Any = None
) -> list[Tensor]:
    inputs, targets = (
        replica.to_device(shares(replica.world_size, width, seed=width)[replica.ordinal]) for width in (4, 1)
    )
    return _train(inputs, targets, step, wrap)


def _train_whole(ordinal: int, size: int) -> list[Tensor]:
    inputs, targets = (torch.cat(shares(size, width, seed=width)) for width in (4, 1))
    return _train(inputs, targets, lambda optimizer: optimizer.step())


class Steps:
    """Both kinds of step give the parameters that one process gets from the whole batch."""

    @staticmethod
    def run(replica: Replica) -> dict[str, Any]:
        import torch_xla.core.xla_model as xm

        return {
            "xm.optimizer_step": _train_replica(
                replica, lambda optimizer: xm.optimizer_step(optimizer, barrier=True)
            ),
            "Replica.step": _train_replica(replica, replica.step),
        }

    @staticmethod
    def expected(ordinal: int, size: int) -> dict[str, Any]:
        trained = _train_whole(ordinal, size)
        return {"xm.optimizer_step": trained, "Replica.step": trained}


class Compile:
    """torch.compile with torch_xla's backend: values, gradients, and a collective inside."""

    @staticmethod
    def run(replica: Replica) -> dict[str, Any]:
        import torch_xla.core.xla_model as xm

        def add_up(given: Tensor) -> Tensor:
            reduced: Any = xm.all_reduce(xm.REDUCE_SUM, given.sin())
            total: Tensor = reduced + 1
            return total

        def compiled(function: Any) -> Any:
            return torch.compile(function, backend="openxla")

        given = replica.to_device(shares(replica.world_size, 4)[replica.ordinal])
        with torch.no_grad():
            sums = [compiled(add_up)(given), compiled(add_up)(given * 2)]
        return {"sums": sums, "steps": _train_replica(replica, replica.step, compiled)}

    @staticmethod
    def expected(ordinal: int, size: int) -> dict[str, Any]:
        every = torch.stack(shares(size, 4))
        sums = [every.sin().sum(0) + 1, (every * 2).sin().sum(0) + 1]
        return {"sums": sums, "steps": _train_whole(ordinal, size)}


class ReplicaCollectives:
    """The collectives of Replica, for tensors, numbers and other objects."""

    @staticmethod
    def run(replica: Replica) -> dict[str, Any]:
        ordinal, last = replica.ordinal, replica.world_size - 1
        tensor = replica.to_device(torch.tensor([ordinal + 1.0, 2.0]))
        replica.barrier()
        return {
            "tensors": [replica.all_reduce(tensor, op) for op in ("sum", "mean", "min", "max", "mul")],
            "numbers": [replica.all_reduce(ordinal + 1, op) for op in ("sum", "mean", "min", "max", "mul")],
            "dict": replica.all_reduce({"t": tensor, "n": ordinal, "deep": [1, (True,)]}),
            "sets": replica.all_reduce({f"of {ordinal}"}, "or"),
            "gathered": replica.all_gather({"name": "x" * ordinal, "at": {ordinal}}),
            "gathered tensors": replica.all_gather(tensor),
            "broadcast": [
                replica.broadcast(tensor, last),
                replica.broadcast(["of", ordinal, str], source=last),
            ],
            "reduced": replica.reduce({"t": tensor, "n": ordinal}, "max", destination=last),
        }

    @staticmethod
    def expected(ordinal: int, size: int) -> dict[str, Any]:
        every = [torch.tensor([i + 1.0, 2.0]) for i in range(size)]
        stack, numbers = torch.stack(every), torch.arange(1.0, size + 1)
        return {
            "tensors": [stack.sum(0), stack.mean(0), stack.amin(0), stack.amax(0), stack.prod(0)],
            "numbers": [int(numbers.sum()), float(numbers.mean()), 1, size, int(numbers.prod())],
            "dict": {"t": stack.sum(0), "n": sum(range(size)), "deep": [size, (size,)]},
            "sets": {f"of {i}" for i in range(size)},
            "gathered": [{"name": "x" * i, "at": {i}} for i in range(size)],
            "gathered tensors": every,
            "broadcast": [every[-1], ["of", size - 1, str]],
            "reduced": {"t": stack.amax(0), "n": size - 1} if ordinal == size - 1 else None,
        }


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", LAYOUTS, indirect=True)
def test_gradients_and_training_match_plain_torch(
    runtime: RuntimeUnderTest, everywhere: Callable[..., list[Any]]
) -> None:
    of_torch_xla = [] if runtime.name == "torchtpu" else [Functions, SyncBatchNorm, Steps]
    _check(everywhere, *of_torch_xla, ReplicaCollectives)


@pytest.mark.torch_xla("torch.compile for torch_xla's backend")
@pytest.mark.parametrize("everywhere", PROCESSES, indirect=True)
def test_compiled_functions_and_modules_match_plain_torch(everywhere: Callable[..., list[Any]]) -> None:
    _check(everywhere, Compile)


def _train_compiled(replica: Replica) -> Tensor:
    layer = torch.compile(nn.Linear(2, 1).to(replica.device), backend="openxla")
    result: Tensor = layer(torch.ones(3, 2, device=replica.device)).cpu()
    return result


@pytest.mark.torch_xla("replicas that are threads")
@pytest.mark.parametrize("everywhere", [pytest.param((2, 1), id="2-threads")], indirect=True)
def test_torch_compile_is_refused_where_replicas_are_threads(everywhere: Callable[..., list[Any]]) -> None:
    with pytest.raises(UsageError, match="would mix the programs of replicas that are threads"):
        everywhere(_train_compiled)


def _check(everywhere: Callable[..., list[Any]], *groups: Any) -> None:
    results = everywhere(_run_groups, groups)
    wrong = [
        f"{group.__name__}, {name}, ordinal {ordinal}: {text}"
        for ordinal, result in enumerate(results)
        for group in groups
        for name, wanted in group.expected(ordinal, len(results)).items()
        if (text := _difference(result[group.__name__], name, wanted))
    ]
    assert not wrong, "\n".join(wrong)


def _run_groups(replica: Replica, groups: Sequence[Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for group in groups:
        try:
            result = group.run(replica)
            # All at once: read one by one, each value would be a program of its own.
            replica.sync()
            results[group.__name__] = map_tensors(Tensor.cpu, result)
        except Exception as error:  # one failing group must not hide the others
            results[group.__name__] = f"{type(error).__name__}: {error}"
    return results


def _difference(result: Any, name: str, wanted: Any) -> str:
    if isinstance(result, str):
        return result.splitlines()[0]
    found = _flat(result[name])
    for value, other in zip(found, _flat(wanted), strict=True):
        try:
            # The precision of float32 for sums in another order, some of numbers near 20 that almost cancel.
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)
        except AssertionError as error:
            return f"{str(error).splitlines()[0]} {value!r}, not {other!r}".replace("\n", " ")
        except TypeError:
            if value != other:
                return f"{value!r}, not {other!r}"
    return ""


def _flat(value: Any) -> list[Any]:
    """Return the leaves: no single comparison works for containers of sets and tensors."""
    if isinstance(value, dict):
        return [*value, *(leaf for item in value.values() for leaf in _flat(item))]
    if isinstance(value, list | tuple):
        return [type(value), *(leaf for item in value for leaf in _flat(item))]
    return [value]
