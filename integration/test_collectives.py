"""Every collective of torch_xla, in each layout of threads and processes, compared with plain torch.

Starting replicas takes seconds, so one launch runs all cases, and the test names the cases that failed.
"""

# ruff: noqa: ARG005 -- all cases have the same signature
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyxla import Replica
from polyxla.plugin import map_tensors

LAYOUTS = [
    pytest.param((1, 1), id="1-alone", marks=pytest.mark.long),
    pytest.param((2, 2), id="2-processes", marks=pytest.mark.long),
    pytest.param((4, 1), id="4-threads", marks=pytest.mark.long),
    pytest.param((4, 2), id="4-mixed"),
    pytest.param((4, 4), id="4-processes", marks=pytest.mark.long),
    pytest.param((8, 1), id="8-threads", marks=pytest.mark.long),
    pytest.param((8, 4), id="8-mixed", marks=pytest.mark.long),
]


@dataclass(frozen=True)
class Here:
    """The replica that runs a case, or for which the expected value is computed.

    Attributes:
        ordinal: ordinal of the replica.
        size: number of replicas.
        xm: torch_xla.core.xla_model in a replica; None for computing the expected value.
    """

    ordinal: int
    size: int
    xm: Any = None

    @property
    def halves(self) -> list[list[int]]:
        """Two groups of consecutive ordinals."""
        return _split(self.size, lambda ordinal: ordinal < self.size // 2)

    @property
    def combs(self) -> list[list[int]]:
        """Two groups of every second ordinal."""
        return _split(self.size, lambda ordinal: ordinal % 2 == 0)

    @property
    def uneven(self) -> list[list[int]]:
        """The first ordinal, and the others."""
        return _split(self.size, lambda ordinal: ordinal == 0)

    def mine(self, groups: list[list[int]]) -> list[int]:
        """Return the group that this replica is in."""
        return next(group for group in groups if self.ordinal in group)


def _split(size: int, first: Callable[[int], bool]) -> list[list[int]]:
    parts = [[i for i in range(size) if first(i)], [i for i in range(size) if not first(i)]]
    return [part for part in parts if part]


def values(ordinal: int, size: int, dtype: torch.dtype = torch.float32, factor: int = 1) -> Tensor:
    """Return a replica's input: small integers, so that sums are exact in every order."""
    shape = (2 * size, 3 * size)
    count = shape[0] * shape[1]
    return ((torch.arange(count) * (ordinal + factor + 1)) % 5 + 1).to(dtype).reshape(shape)


def _two(ordinal: int, size: int) -> list[Tensor]:
    return [values(ordinal, size), values(ordinal, size, factor=3)[:, :size] / 2]


@dataclass(frozen=True)
class Case:
    """One use of a collective.

    Attributes:
        run: computes the result on the device, from this replica's input.
        expected: computes the same result on the host, from all replicas' inputs.
        make: makes one replica's input.
    """

    run: Callable[[Here, Any], Any]
    expected: Callable[[Here, list[Any]], Any]
    make: Callable[[int, int], Any] = values


def _in_place(here: Here, given: Any, **options: Any) -> Any:
    here.xm.all_reduce("sum", given, **options)
    return given


def _gathered(every: list[Tensor], dim: int, who: list[int]) -> Tensor:
    return torch.cat([every[ordinal] for ordinal in who], dim)


def _scattered(here: Here, every: list[Tensor], dim: int, who: list[int]) -> Tensor:
    total = sum((every[ordinal] for ordinal in who), torch.tensor(0))
    return total.chunk(len(who), dim)[who.index(here.ordinal)]


def _everyone(here: Here) -> list[int]:
    return list(range(here.size))


def _pairwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Here, list[Any]], Any]:
    return lambda here, every: functools.reduce(function, every)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "mul": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": operator.and_,
    "or": operator.or_,
}
DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def _reduction(op: str, dtype: torch.dtype) -> Case:
    return Case(
        lambda here, given: here.xm.all_reduce(op, given),
        _pairwise(REDUCTIONS[op]),
        functools.partial(values, dtype=dtype),
    )


def _bool_reduction(op: str) -> Case:
    return Case(
        lambda here, given: here.xm.all_reduce(op, given > 2),
        lambda here, every: functools.reduce(REDUCTIONS[op], [part > 2 for part in every]),
    )


def _grouped(kind: str) -> Case:
    return Case(
        lambda here, given: here.xm.all_reduce("sum", given, groups=getattr(here, kind)),
        lambda here, every: sum(every[i] for i in here.mine(getattr(here, kind))),
    )


def _all_reduce_cases() -> dict[str, Case]:
    return {
        **{f"all_reduce {op}": _reduction(op, torch.float32) for op in ("sum", "mul", "min", "max")},
        **{f"all_reduce {op} int32": _reduction(op, torch.int32) for op in REDUCTIONS},
        **{f"all_reduce sum {dtype}": _reduction("sum", dtype) for dtype in DTYPES},
        **{f"all_reduce {op} bool": _bool_reduction(op) for op in ("and", "or")},
        "all_reduce of a number": Case(
            lambda here, given: here.xm.all_reduce("sum", given[0, 1]),
            lambda here, every: sum(part[0, 1] for part in every),
        ),
        "all_reduce of nothing": Case(
            lambda here, given: here.xm.all_reduce("sum", given[:0]), lambda here, every: every[0][:0]
        ),
        "all_reduce scaled": Case(
            lambda here, given: here.xm.all_reduce("sum", given, scale=1 / here.size),
            lambda here, every: sum(every) / here.size,
        ),
        "all_reduce in place, scaled, unpinned": Case(
            lambda here, given: _in_place(here, given, scale=1 / here.size, pin_layout=False),
            lambda here, every: [sum(parts) / here.size for parts in zip(*every, strict=True)],
            _two,
        ),
        **{f"all_reduce in {kind}": _grouped(kind) for kind in ("halves", "combs", "uneven")},
        "all_reduce twice in one step": Case(
            lambda here, given: here.xm.all_reduce("sum", given * here.xm.all_reduce("max", given)),
            lambda here, every: sum(every) * functools.reduce(torch.maximum, every),
        ),
        "bucketized gradients": Case(
            _bucketized_gradients,
            lambda here, every: [
                sum(parts) / (1 if here.size == 1 else 4) for parts in [*zip(*every, strict=True)] * 2
            ],
            _two,
        ),
    }


def _bucketized_gradients(here: Here, given: list[Tensor]) -> list[Tensor]:
    alone, together = [tensor.clone() for tensor in given], [tensor.clone() for tensor in given]
    # A cap of 0 puts each tensor into its own bucket. A single replica does not change its gradients.
    here.xm.all_reduce_bucketized_gradients(alone, 0.25, None, pin_layout=True, bucket_cap_mb=0)
    here.xm.all_reduce_bucketized_gradients(together, 0.25, None, pin_layout=False, bucket_cap_mb=1)
    return alone + together


def _gathered_buckets(cap: int) -> Case:
    return Case(
        lambda here, given: here.xm.all_gather_bucketized(given, dim=1, bucket_cap_mb=cap),
        lambda here, every: [torch.cat(parts, 1) for parts in zip(*every, strict=True)],
        _two,
    )


def _all_gather_cases() -> dict[str, Case]:
    def gather(dim: int, pin: bool, kind: str | None) -> Case:
        def run(here: Here, given: Tensor) -> Tensor:
            groups = getattr(here, kind) if kind else None
            gathered: Tensor = here.xm.all_gather(given, dim=dim, groups=groups, pin_layout=pin)
            return gathered

        def expected(here: Here, every: list[Tensor]) -> Tensor:
            return _gathered(every, dim, here.mine(getattr(here, kind)) if kind else _everyone(here))

        return Case(run, expected)

    return {
        f"all_gather dim {dim}{', pinned' if pin else ''}{f', in {kind}' if kind else ''}": gather(
            dim, pin, kind
        )
        for dim, pin, kind in [
            (0, True, None),
            (0, False, None),
            (1, True, None),
            (1, False, None),
            (-1, False, None),
            (0, True, "halves"),
            (1, False, "combs"),
        ]
    } | {
        "all_gather of a list": Case(
            lambda here, given: here.xm.all_gather(given, pin_layout=False),
            lambda here, every: [torch.cat(parts) for parts in zip(*every, strict=True)],
            _two,
        ),
        "all_gather into a tensor": Case(
            lambda here, given: here.xm.all_gather(
                given, output=torch.cat([given] * here.size), pin_layout=False
            ),
            lambda here, every: torch.cat(every),
        ),
        **{f"all_gather_bucketized, cap {cap}": _gathered_buckets(cap) for cap in (0, 160)},
    }


def _reduce_scatter_cases() -> dict[str, Case]:
    def scatter(dim: int, pin: bool, kind: str | None) -> Case:
        def run(here: Here, given: Tensor) -> Tensor:
            groups = getattr(here, kind) if kind else None
            count = len(here.mine(groups)) if groups else here.size
            part: Tensor = here.xm.reduce_scatter(
                "sum", given, 0.5, dim, count, groups=groups, pin_layout=pin
            )
            return part

        def expected(here: Here, every: list[Tensor]) -> Tensor:
            who = here.mine(getattr(here, kind)) if kind else _everyone(here)
            return _scattered(here, every, dim, who) / 2

        return Case(run, expected)

    def parts(here: Here, every: list[list[Tensor]]) -> list[Tensor]:
        return [_scattered(here, list(parts), 0, _everyone(here)) / 2 for parts in zip(*every, strict=True)]

    def buckets(cap: int) -> Case:
        return Case(
            lambda here, given: here.xm.reduce_scatter_bucketized(
                "sum", given, 0.5, 0, here.size, bucket_cap_mb=cap
            ),
            parts,
            _two,
        )

    return {
        "reduce_scatter dim 0": scatter(0, True, None),
        "reduce_scatter dim 1, unpinned": scatter(1, False, None),
        "reduce_scatter in halves": scatter(0, True, "halves"),
        "reduce_scatter max": Case(
            lambda here, given: here.xm.reduce_scatter("max", given, 1.0, 0, here.size),
            lambda here, every: functools.reduce(torch.maximum, every).chunk(here.size)[here.ordinal],
        ),
        "reduce_scatter into a tensor": Case(
            lambda here, given: here.xm.reduce_scatter("sum", given, 0.5, 0, here.size, output=given[:2] + 0),
            lambda here, every: _scattered(here, every, 0, _everyone(here)) / 2,
        ),
        # With pin_layout, torch_xla 2.9 ends the process while it builds the program, on any runtime.
        "reduce_scatter of a list": Case(
            lambda here, given: here.xm.reduce_scatter("sum", given, 0.5, 0, here.size, pin_layout=False),
            parts,
            _two,
        ),
        "reduce_scatter of a list into a list": Case(
            lambda here, given: here.xm.reduce_scatter(
                "sum", given, 0.5, 0, here.size, output=[tensor[:2] + 0 for tensor in given], pin_layout=False
            ),
            parts,
            _two,
        ),
        **{f"reduce_scatter_bucketized, cap {cap}": buckets(cap) for cap in (0, 160)},
    }


def _transposed(here: Here, every: list[Tensor], split: int, concat: int, who: list[int]) -> Tensor:
    place = who.index(here.ordinal)
    return torch.cat([every[i].chunk(len(who), split)[place] for i in who], concat)


def _moving_cases() -> dict[str, Case]:
    return {
        "all_to_all": Case(
            lambda here, given: here.xm.all_to_all(given, 0, 1, here.size),
            lambda here, every: _transposed(here, every, 0, 1, _everyone(here)),
        ),
        "all_to_all unpinned": Case(
            lambda here, given: here.xm.all_to_all(given, 1, 0, here.size, pin_layout=False),
            lambda here, every: _transposed(here, every, 1, 0, _everyone(here)),
        ),
        "all_to_all in halves": Case(
            lambda here, given: here.xm.all_to_all(
                given, 0, 1, len(here.mine(here.halves)), groups=here.halves
            ),
            lambda here, every: _transposed(here, every, 0, 1, here.mine(here.halves)),
        ),
        "collective_permute in a ring": Case(
            lambda here, given: here.xm.collective_permute(
                given, [[i, (i + 1) % here.size] for i in range(here.size)]
            ),
            lambda here, every: every[here.ordinal - 1],
        ),
        "collective_permute to the last": Case(
            lambda here, given: here.xm.collective_permute(given, [[0, here.size - 1]]),
            lambda here, every: every[0] * (here.ordinal == here.size - 1),
        ),
        "collective_broadcast": Case(
            lambda here, given: here.xm.collective_broadcast(given, here.size - 1) or given,
            lambda here, every: every[-1],
            _two,
        ),
        "broadcast_master_param": Case(
            _broadcast_module, lambda here, every: [every[0] + 1, every[0] + 2, torch.tensor(3)]
        ),
    }


def _broadcast_module(here: Here, given: Tensor) -> list[Tensor]:
    module = torch.nn.Module()
    module.one, module.two = torch.nn.Parameter(given + 1), torch.nn.Parameter(given + 2)
    module.register_buffer("count", torch.tensor(3 + here.ordinal, device=given.device))
    here.xm.broadcast_master_param(module)
    return [*module.parameters(), *module.buffers()]


def _in_view(
    rows: Callable[[Here], int],
    write: Callable[[Here, Tensor, Tensor], Any],
    expected: Callable[[Here, list[Tensor]], Tensor],
) -> Case:
    def run(here: Here, given: Tensor) -> Tensor:
        whole = torch.ones(rows(here) + 4, given.shape[1], device=given.device)
        write(here, given, whole[2:-2])
        # After an operation in place, a view has the values of the tensor behind it.
        whole[2:-2].add_(1)
        return whole

    return Case(
        run, lambda here, every: torch.nn.functional.pad(expected(here, every) + 1, (0, 0, 2, 2), value=1.0)
    )


def _accumulated_gradient(here: Here, given: Tensor) -> Tensor:
    weight = torch.ones(2, given.shape[1], device=given.device, requires_grad=True)
    for _ in range(2):
        torch.nn.functional.linear(given, weight).sum().backward()
    assert weight.grad is not None
    here.xm.all_reduce("sum", [weight.grad])
    return weight.grad.mul_(0.5)


def _view_cases() -> dict[str, Case]:
    def scattered(here: Here, every: list[Tensor]) -> Tensor:
        return _scattered(here, every, 0, _everyone(here))

    return {
        "all_reduce of a view": _in_view(
            lambda here: 2 * here.size,
            lambda here, given, view: here.xm.all_reduce("sum", [view.mul_(given)]),
            lambda here, every: torch.stack(every).sum(0),
        ),
        "collective_broadcast of a view": _in_view(
            lambda here: 2 * here.size,
            lambda here, given, view: here.xm.collective_broadcast([view.mul_(given)], here.size - 1),
            lambda here, every: every[-1],
        ),
        "all_gather into a view": _in_view(
            lambda here: 2 * here.size**2,
            lambda here, given, view: here.xm.all_gather(given, output=view, pin_layout=False),
            lambda here, every: torch.cat(every),
        ),
        "all_gather of a list into views": _in_view(
            lambda here: 2 * here.size**2,
            lambda here, given, view: here.xm.all_gather([given], output=[view], pin_layout=False),
            lambda here, every: torch.cat(every),
        ),
        "reduce_scatter into a view": _in_view(
            lambda here: 2,
            lambda here, given, view: here.xm.reduce_scatter("sum", given, 1.0, 0, here.size, output=view),
            scattered,
        ),
        "reduce_scatter of a list into views": _in_view(
            lambda here: 2,
            lambda here, given, view: here.xm.reduce_scatter(
                "sum", [given], 1.0, 0, here.size, output=[view], pin_layout=False
            ),
            scattered,
        ),
        "an accumulated gradient, reduced and clipped": Case(
            _accumulated_gradient, lambda here, every: torch.stack(every).sum((0, 1)).expand(2, -1)
        ),
    }


def _payload_cases() -> dict[str, Case]:
    return {
        "rendezvous": Case(
            # Payloads of different lengths, the first one empty.
            lambda here, given: here.xm.rendezvous("names", b"ab" * here.ordinal),
            lambda here, every: [b"ab" * i for i in range(here.size)],
        ),
        "rendezvous without payloads": Case(
            lambda here, given: here.xm.rendezvous("nothing"), lambda here, every: [b""] * here.size
        ),
        "mesh_reduce of numbers": Case(
            lambda here, given: here.xm.mesh_reduce("numbers", here.ordinal + 0.5, list),
            lambda here, every: [i + 0.5 for i in range(here.size)],
        ),
        "mesh_reduce of a dict with a tensor": Case(
            lambda here, given: here.xm.mesh_reduce(
                "dicts", {"t": given, "n": here.ordinal}, lambda all_: [all_[-1]["t"], all_[-1]["n"]]
            ),
            lambda here, every: [every[-1], here.size - 1],
        ),
    }


def _own_program_cases() -> dict[str, Case]:
    return {
        "other constants before it": Case(
            lambda here, given: here.xm.all_reduce("sum", given * here.ordinal + here.ordinal),
            lambda here, every: sum(part * i + i for i, part in enumerate(every)),
        ),
        "other operations before it": Case(
            lambda here, given: here.xm.all_reduce(
                "sum", given.square() if here.ordinal % 2 else given + given.sum()
            ),
            lambda here, every: sum(
                part.square() if i % 2 else part + part.sum() for i, part in enumerate(every)
            ),
        ),
        "waiting for the device after each step": Case(_waits, lambda here, every: 5 * sum(every)),
        "other steps between two": Case(_own_steps, lambda here, every: sum(every) + sum(every)),
    }


def _waits(here: Here, given: Tensor) -> Tensor:
    total = torch.zeros_like(given)
    for _ in range(5):
        total = total + here.xm.all_reduce("sum", given)
        here.xm.mark_step()
        here.xm.wait_device_ops()
    return total


def _own_steps(here: Here, given: Tensor) -> Tensor:
    total = here.xm.all_reduce("sum", given)
    here.xm.mark_step()
    rest = given * 1
    for _ in range(here.ordinal):
        # A step that only this replica takes.
        rest = rest + 1
        here.xm.mark_step()
    result: Tensor = total + here.xm.all_reduce("sum", rest - here.ordinal)
    return result


CASES = (
    _all_reduce_cases()
    | _all_gather_cases()
    | _reduce_scatter_cases()
    | _moving_cases()
    | _view_cases()
    | _payload_cases()
    | _own_program_cases()
)


@pytest.mark.slow
@pytest.mark.torch_xla("torch_xla's own collectives")
@pytest.mark.parametrize("everywhere", LAYOUTS, indirect=True)
def test_every_collective_gives_the_right_result(everywhere: Callable[..., list[Any]]) -> None:
    _check(everywhere, CASES)


def _gather_many_sizes(replica: Replica) -> list[int]:
    counters = replica.counters()
    assert counters is not None
    compiled = []
    for size in range(140, 148):
        assert replica.all_gather("x" * size) == ["x" * size] * replica.world_size
        compiled.append(counters.counts().compiles)
    return compiled


@pytest.mark.pjrt
@pytest.mark.parametrize("everywhere", [pytest.param((2, 2), id="processes")], indirect=True)
def test_objects_of_similar_size_share_one_program(everywhere: Callable[..., list[Any]]) -> None:
    # The first two times, for the program and for the state that it leaves.
    assert all(len(set(compiled[2:])) == 1 for compiled in everywhere(_gather_many_sizes))


def _check(everywhere: Callable[..., list[Any]], cases: dict[str, Case]) -> None:
    results = everywhere(_run_cases, [*cases])
    wrong = {
        f"{name}, ordinal {ordinal}": text
        for name, case in cases.items()
        for ordinal, result in enumerate(results)
        if (text := _difference(case, Here(ordinal, len(results)), result[name]))
    }
    assert not wrong, "\n".join(f"{where}: {text}" for where, text in wrong.items())


def _run_cases(replica: Replica, names: Sequence[str]) -> dict[str, Any]:
    import torch_xla.core.xla_model as xm

    here = Here(replica.ordinal, replica.world_size, xm)
    return {name: _run_case(replica, here, CASES[name]) for name in names}


def _run_case(replica: Replica, here: Here, case: Case) -> Any:
    given = replica.to_device(case.make(here.ordinal, here.size))
    replica.sync()
    try:
        result = case.run(here, given)
        # All at once: read one by one, each tensor of a list would be a program of its own.
        replica.sync()
        return map_tensors(lambda tensor: tensor.detach().cpu(), result)
    except Exception as error:  # one failing case must not hide the others
        return f"{type(error).__name__}: {error}"


def _difference(case: Case, here: Here, result: Any) -> str:
    if isinstance(result, str):
        return result.splitlines()[0]
    expected = case.expected(here, [case.make(ordinal, here.size) for ordinal in range(here.size)])
    if not _has_tensors(expected):
        return "" if result == expected else f"{result!r}, not {expected!r}"
    try:
        torch.testing.assert_close(result, expected)
    except AssertionError as error:
        return str(error).splitlines()[0] + f" {_short(result)}, not {_short(expected)}"
    return ""


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and any(map(_has_tensors, value)))


def _short(value: Any) -> str:
    return repr(value)[:200].replace("\n", " ")
