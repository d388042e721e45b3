"""The contexts: what they change, that they end, and that they do not affect other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polyxla_precision.contexts import Autocast, DefaultDtype

BF16 = torch.bfloat16


def _made() -> torch.dtype:
    return torch.zeros(1).dtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2),
        lambda: torch.zeros(2, dtype=None),
        lambda: torch.randn(2),
        lambda: torch.eye(2),
        lambda: torch.linspace(0, 1, 3),
        lambda: torch.hann_window(4),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.tensor(2.5),
        lambda: torch.full((2,), 0.5),
        lambda: torch.arange(0.0, 2.0),
        lambda: torch.normal(0.0, 1.0, (2,)),
        lambda: torch.nn.Linear(2, 2).weight,
    ],
)
def test_a_tensor_without_a_dtype_gets_the_contexts_dtype(make: Callable[[], torch.Tensor]) -> None:
    with DefaultDtype(BF16):
        assert make().dtype == BF16
    assert make().dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.arange(3), torch.int64),
        (lambda: torch.tensor([1, 2]), torch.int64),
        (lambda: torch.full((2,), True), torch.bool),
        (lambda: torch.zeros(2, dtype=torch.float64), torch.float64),
        (lambda: torch.tensor(np.ones(2, np.float32)), torch.float32),
        (lambda: torch.as_tensor(np.ones(2)), torch.float64),
        (lambda: torch.tensor([np.float64(1)]), torch.float64),
        (lambda: torch.normal(torch.zeros(2, dtype=torch.float64), 1.0), torch.float64),
        (lambda: torch.ones_like(torch.ones(2, dtype=torch.float32)), torch.float32),
    ],
)
def test_a_stated_dtype_is_kept(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
    with DefaultDtype(BF16):
        assert make().dtype == dtype


@pytest.mark.parametrize(
    "make",
    [lambda: torch.Tensor(2, 3), lambda: torch.tensor([1]) / torch.tensor([2])],
    ids=["class", "quotient"],
)
def test_what_is_no_factory_function_keeps_torchs_default_dtype(make: Callable[[], torch.Tensor]) -> None:
    with DefaultDtype(BF16):
        assert make().dtype == torch.float32


def test_a_tensor_passed_as_out_keeps_its_dtype() -> None:
    out = torch.empty(2)
    with DefaultDtype(BF16):
        torch.zeros(2, out=out)
    assert torch.equal(out, torch.zeros(2))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_leaf_stays_a_leaf(wanted: bool) -> None:
    with DefaultDtype(BF16):
        made = torch.tensor([1.0], requires_grad=wanted)
    assert (made.is_leaf, made.requires_grad, made.dtype) == (True, wanted, BF16)


def test_nested_contexts_end_one_by_one() -> None:
    with DefaultDtype(BF16):
        with DefaultDtype(torch.float64):
            assert _made() == torch.float64
            assert torch.tensor(1 / 3).item() == 1 / 3
        assert _made() == BF16
    assert _made() == torch.float32


@pytest.mark.parametrize("context", [lambda: DefaultDtype(BF16), lambda: Autocast(enabled=True)])
def test_an_exception_ends_a_context(context: Callable[[], Any]) -> None:
    def state() -> tuple[Any, ...]:
        kinds = ("cpu", "xla")
        cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return _made(), *cast, torch.is_autocast_cache_enabled()

    before = state()
    inside = []
    with pytest.raises(KeyboardInterrupt), context():  # noqa: PT012
        inside.append(state())
        raise KeyboardInterrupt
    assert inside != [before]
    assert state() == before


def test_overlapping_contexts_of_two_threads_do_not_affect_each_other() -> None:
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, Any] = {}

    def first() -> None:
        with DefaultDtype(BF16), Autocast(enabled=True):
            first_in.set()
            assert second_in.wait(10)
            seen["first"] = _made(), torch.is_autocast_enabled("xla")
        seen["first out"] = _made(), torch.is_autocast_enabled("xla")
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        seen["before"] = _made(), torch.is_autocast_enabled("xla")
        with DefaultDtype(torch.float64), Autocast(enabled=True):
            second_in.set()
            assert first_out.wait(10)
            seen["second"] = _made(), torch.is_autocast_enabled("xla")

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    nothing = (torch.float32, False)
    assert seen == {
        "first": (BF16, True),
        "first out": nothing,
        "before": nothing,
        "second": (torch.float64, True),
    }
    assert (_made(), torch.is_autocast_enabled("xla"), torch.get_default_dtype()) == (*nothing, torch.float32)


def test_autocast_computes_in_bfloat16_and_can_be_switched_off_inside() -> None:
    x, weight = torch.ones(2, 2), torch.ones(2, 2)
    with Autocast(enabled=True):
        assert (x @ weight).dtype == BF16
        with Autocast(enabled=False):
            assert (x @ weight).dtype == torch.float32
        assert (x @ weight).dtype == BF16
    assert (x @ weight).dtype == torch.float32


def test_a_weight_used_under_no_grad_first_still_gets_its_gradient() -> None:
    linear = torch.nn.Linear(2, 2)
    with Autocast(enabled=True):
        with torch.no_grad():
            linear(torch.ones(1, 2))
        loss = linear(torch.ones(1, 2)).sum()
    loss.backward()
    assert linear.weight.grad is not None
