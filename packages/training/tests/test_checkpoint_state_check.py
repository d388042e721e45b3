"""States that do not fit: everything that is wrong, in one error."""

from __future__ import annotations

import pytest
import torch

from polyxla_training.checkpoint import CheckpointError, check_state


def _state(*names: str, shape: tuple[int, ...] = (2, 3)) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name in names}


def test_a_state_that_fits_raises_nothing() -> None:
    check_state(_state("a", "b"), _state("b", "a"))
    check_state({}, {})
    check_state({"extra": 1, **_state("a")}, {"extra": {"any": "thing"}, **_state("a")})


def test_all_differences_are_in_one_error() -> None:
    expected = {**_state("a", "b", "c"), **_state("wide", shape=(4, 5))}
    found = {**_state("b", "d"), **_state("wide", shape=(4, 6)), "c": 3}
    with pytest.raises(CheckpointError) as caught:
        check_state(expected, found, where="step-7")
    assert caught.value.what == (
        "the state does not fit: missing: a; not expected: d; "
        "of another shape: c (None, not (2, 3)), wide ((4, 6), not (4, 5))"
    )
    assert caught.value.where == "step-7"


def test_long_lists_are_cut() -> None:
    with pytest.raises(CheckpointError, match=r"missing: n0, n1, n2, n3, n4 and 12 more \("):
        check_state(_state(*(f"n{at}" for at in range(17))), {})
    with pytest.raises(CheckpointError, match=r"not expected: n0, n1, n2, n3, n4 \("):
        check_state({}, _state(*(f"n{at}" for at in range(5))))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "net."])
def test_a_prefix_that_explains_everything_is_named(prefix: str) -> None:
    names = ["weight", "0.weight", "0.bias"]
    with pytest.raises(CheckpointError, match="All names found begin with") as caught:
        check_state(_state(*names), _state(*(prefix + name for name in names)))
    assert f"name.removeprefix({prefix!r}): value" in caught.value.fix
    with pytest.raises(CheckpointError, match=f"All names expected begin with '{prefix}'"):
        check_state(_state(*(prefix + name for name in names)), _state(*names))


def test_other_prefixes_are_not_named() -> None:
    with pytest.raises(CheckpointError, match="Build the module as it was"):
        check_state(_state("a", "b"), _state("module.a", "c"))
    with pytest.raises(CheckpointError, match="Build the module as it was"):
        check_state(_state("a", "b"), _state("module.a", "module.b", "module.c"))
