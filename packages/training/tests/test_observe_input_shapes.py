"""How inputs that changed are described."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyxla_training.observe.compilations import describe_changes, signatures


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        pytest.param(
            [torch.zeros(4, 2)],
            [torch.zeros(3, 2)],
            "batch[0] [4, 2] float32 -> [3, 2] float32",
            id="shape",
        ),
        pytest.param(
            {"x": torch.zeros(4), "y": torch.zeros(4)},
            {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.int64)},
            "batch['y'] [4] float32 -> [4] int64",
            id="dtype",
        ),
        pytest.param((1, [None]), (1, ["a"]), "batch[1][0] NoneType -> str", id="no-tensor"),
        pytest.param(
            [torch.zeros(1)],
            [torch.zeros(1)] * 2,
            "batch of 1 parts -> 2: batch[0], batch[1]",
            id="another-structure",
        ),
        pytest.param([torch.zeros(4)], [torch.ones(4)], None, id="other-values"),
    ],
)
def test_changed_inputs_are_named(before: Any, now: Any, said: str | None) -> None:
    assert describe_changes(now, signatures(before)) == said


def test_many_changes_are_cut_short() -> None:
    said = describe_changes([torch.zeros(2)] * 9, signatures([torch.zeros(3)] * 9))
    assert said is not None
    assert said.count("->") == 4
    assert said.endswith(", and 5 more")


@given(
    st.recursive(
        st.lists(st.integers(0, 5), max_size=3).map(torch.zeros),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=6,
    )
)
def test_the_same_inputs_never_differ(nest: Any) -> None:
    assert describe_changes(nest, signatures(nest)) is None
