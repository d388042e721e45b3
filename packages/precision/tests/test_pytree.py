"""Converting a batch changes its floating-point tensors and nothing else."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyxla_precision.pytree import cast_floats, upcast_half

Pair = namedtuple("Pair", "x y")  # noqa: PYI024  as users write them
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


@dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "cat"


@dataclass
class Computed:
    x: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.x + self.x


class ReadOnly(Mapping[str, Any]):
    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


tensors = st.builds(lambda dtype: torch.ones(2, dtype=dtype), st.sampled_from(FLOATS + OTHERS))
leaves = tensors | st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
pytrees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def _same_but_floats(old: Any, new: Any, dtype: torch.dtype) -> None:
    assert type(new) is type(old)
    if isinstance(old, torch.Tensor):
        if old.is_floating_point():
            assert new.dtype == dtype
            assert torch.equal(new, old.to(dtype))
        else:
            assert new is old
    elif isinstance(old, dict):
        assert list(new) == list(old)
        for key in old:
            _same_but_floats(old[key], new[key], dtype)
    elif isinstance(old, list | tuple):
        for before, other in zip(old, new, strict=True):
            _same_but_floats(before, other, dtype)
    elif isinstance(old, Frozen):
        _same_but_floats(old.x, new.x, dtype)
    else:
        assert new is old


@given(batch=pytrees, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_containers_and_other_objects_are_kept(batch: Any, dtype: torch.dtype) -> None:
    new = cast_floats(batch, dtype)
    _same_but_floats(batch, new, dtype)
    # A second conversion has nothing to do.
    assert cast_floats(new, dtype) is new


@pytest.mark.parametrize(
    "make",
    [
        lambda x: UserDict(x=x, n=1),
        lambda x: OrderedDict(n=1, x=x),
        lambda x: defaultdict(list, {"x": x, "n": 1}),
        lambda x: types.MappingProxyType({"x": x, "n": 1}),
        lambda x: ReadOnly({"x": x, "n": 1}),
    ],
    ids=["UserDict", "OrderedDict", "defaultdict", "proxy", "Mapping"],
)
def test_mappings_keep_their_type_and_are_not_changed_in_place(make: Any) -> None:
    old = make(torch.ones(2))
    new = cast_floats(old, torch.bfloat16)
    assert type(new) is type(old)
    assert (new["x"].dtype, old["x"].dtype, new["n"]) == (torch.bfloat16, torch.float32, 1)
    assert list(new) == list(old)


def test_a_defaultdict_keeps_its_factory() -> None:
    new = cast_floats(defaultdict(list, x=torch.ones(2)), torch.bfloat16)
    assert new["nothing yet"] == []


def test_dataclasses_are_copied_field_by_field() -> None:
    old = Computed(torch.ones(2))
    new = cast_floats(old, torch.bfloat16)
    assert (new.x.dtype, new.double.dtype, old.double.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_a_dataclass_itself_is_returned_unchanged() -> None:
    assert cast_floats(Frozen, torch.bfloat16) is Frozen


def test_a_packed_sequence_stays_a_packed_sequence() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    new = cast_floats(packed, torch.bfloat16)
    assert isinstance(new, torch.nn.utils.rnn.PackedSequence)
    assert new.data.dtype == torch.bfloat16
    assert new.batch_sizes is packed.batch_sizes


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floats([x], torch.bfloat16)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
def test_only_16_bit_floats_are_upcast(dtype: torch.dtype) -> None:
    wide = upcast_half({"loss": torch.ones(1, dtype=dtype), "lr": 0.5})
    narrow = dtype in {torch.float16, torch.bfloat16}
    assert wide["loss"].dtype == (torch.float32 if narrow else dtype)
    assert wide["lr"] == 0.5
