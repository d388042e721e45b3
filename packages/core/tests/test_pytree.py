"""Pytrees keep their structure while their tensors change."""

from __future__ import annotations

import collections
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from polyxla.pytree import is_tensor, map_tensors, tensors_in


class _Pair(NamedTuple):
    inputs: Any
    targets: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(torch.zeros(2), True, id="tensor"),
        pytest.param(torch.nn.Parameter(torch.zeros(2)), True, id="parameter"),
        pytest.param(1.0, False, id="number"),
        pytest.param("requires_grad", False, id="text"),
        pytest.param([torch.zeros(2)], False, id="list"),
        pytest.param(torch.nn.Linear(1, 1), False, id="module"),
        pytest.param(SimpleNamespace(device="cpu"), False, id="half-alike"),
    ],
)
def test_only_tensors_are_recognized_as_tensors(value: Any, expected: bool) -> None:
    assert is_tensor(value) is expected


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x, id="bare"),
        pytest.param(lambda x: [x, x], id="list"),
        pytest.param(lambda x: (x, 1, "two", None), id="tuple"),
        pytest.param(lambda x: {"x": x, "n": 1}, id="dict"),
        pytest.param(lambda x: collections.OrderedDict(b=x, a=[x]), id="ordered"),
        pytest.param(lambda x: _Pair(x, {"deep": (x, [x])}), id="named-tuple"),
        pytest.param(lambda x: MappingProxyType({"x": x}), id="read-only"),
        pytest.param(lambda x: collections.UserDict({"x": x}), id="user-dict"),
        pytest.param(lambda x: [[], x], id="empty"),
    ],
)
def test_every_tensor_is_replaced_and_the_types_stay(make: Any) -> None:
    before = make(3)
    after = map_tensors(_double, make(torch.tensor(1.5)))
    assert type(after) is (torch.Tensor if before == 3 else type(before))
    assert _numbers(after) == _numbers(make(torch.tensor(3.0)))


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if hasattr(value, "items"):
        return [(key, _numbers(item)) for key, item in value.items()]
    return [_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def test_the_original_is_not_changed() -> None:
    original = {"x": [torch.ones(1)]}
    map_tensors(_double, original)
    assert original["x"][0].item() == 1


def test_a_default_dict_keeps_its_factory() -> None:
    batch: dict[str, Any] = collections.defaultdict(list, x=torch.ones(1))
    moved = map_tensors(_double, batch)
    assert (moved["x"].item(), moved["new"], moved.default_factory) == (2, [], list)
    assert batch["x"].item() == 1


class _Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: each item is an attribute, and there is no update()."""

    def __setitem__(self, key: str, item: Any) -> None:
        super().__setitem__(key, item)
        object.__setattr__(self, key, item)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


class _Namespace(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class _Record(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.x, self.only, self.name = items["x"], torch.ones(1), "one"


def _output(**items: Any) -> _Output:
    made = _Output()
    for key, item in items.items():
        made[key] = item
    return made


@pytest.mark.parametrize("make", [_output, _Namespace, _Record])
def test_items_that_are_attributes_change_with_them(make: Any) -> None:
    before = make(x=torch.ones(1), pair=(torch.ones(1), "text"))
    after = map_tensors(_double, before)
    assert type(after) is type(before)
    assert after.x is after["x"]
    assert (after.x.item(), after["pair"][0].item(), before.x.item()) == (2, 2, 1)
    assert len(tensors_in(before)) == (3 if make is _Record else 2), "an item is not moved twice"
    if make is _Record:
        assert (after.only.item(), after.name) == (2, "one")
    if make is _Namespace:
        after.new = 3
        assert after["new"] == 3


def test_other_objects_are_returned_unchanged() -> None:
    thing = SimpleNamespace(x=torch.ones(1))
    assert map_tensors(_double, thing) is thing
    assert map_tensors(_double, "text") == "text"
