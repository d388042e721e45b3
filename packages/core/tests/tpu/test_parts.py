"""Which part of a host variables select. Slices of metadata and of variables are in test_slices.py."""

from __future__ import annotations

import pytest

from polyxla.errors import UsageError
from polyxla.tpu.accelerators import Bounds, Shape
from polyxla.tpu.parts import Part, read_part, read_visible_chips

BOARD: Shape = (2, 2, 1)
WHOLE = Bounds((1, 1, 1), BOARD)


def read(environ: dict[str, str], generation: str = "v4") -> Part:
    return read_part(environ, generation, WHOLE, BOARD)


def test_without_variables_the_whole_slice_is_used() -> None:
    assert read({}) == Part(WHOLE, None)
    pod = Bounds((1, 1, 2), BOARD)
    assert read_part({"TPU_VISIBLE_CHIPS": "0,1,2,3"}, "v4", pod, BOARD) == Part(pod, (0, 1, 2, 3))


def test_the_names_of_processes_come_before_those_of_hosts() -> None:
    names = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1"}
    found = read({**names, "TPU_VISIBLE_CHIPS": "1,3", "TPU_VISIBLE_DEVICES": "0,1"})
    assert found == Part(Bounds((1, 1, 1), (2, 1, 1)), (1, 3), ("TPU_CHIPS_PER_PROCESS_BOUNDS",))


def test_where_the_order_of_the_chips_is_unknown_both_variables_are_believed() -> None:
    for shape in ("2,1,1", "1,2,1"):
        found = read({"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": shape}, "v6e")
        assert found.bounds.chips == tuple(map(int, shape.split(",")))
    with pytest.raises(UsageError, match="not documented how a v6e host numbers its chips"):
        read({"TPU_VISIBLE_CHIPS": "0,1"}, "v6e")


@pytest.mark.parametrize(
    ("environ", "what", "where"),
    [
        ({"TPU_PROCESS_BOUNDS": "1"}, "three positive integers", "TPU_PROCESS_BOUNDS=1"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "x"}, "three positive integers", "TPU_CHIPS_PER_HOST_BOUNDS=x"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}, "does not fit into", "TPU_CHIPS_PER_HOST_BOUNDS=2,4,1"),
        ({"TPU_VISIBLE_DEVICES": "4"}, "numbers 0 to 3", "TPU_VISIBLE_DEVICES=4"),
        ({"TPU_VISIBLE_CHIPS": "0,3"}, "not neighbours that form a box", "TPU_VISIBLE_CHIPS=0,3"),
        (
            {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"},
            "2 of this host's chips are selected, but the bounds contain 1",
            "TPU_VISIBLE_CHIPS=0,1",
        ),
        (
            {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1"},
            "chips 0,1 of a v4 host form a box of 1,2,1, not 2,1,1",
            "TPU_VISIBLE_CHIPS=0,1 and TPU_CHIPS_PER_HOST_BOUNDS=2,1,1",
        ),
        (
            {"TPU_VISIBLE_CHIPS": "0,3", "TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1"},
            "not neighbours that form a box",
            "TPU_VISIBLE_CHIPS=0,3",
        ),
    ],
)
def test_contradicting_variables_are_refused(environ: dict[str, str], what: str, where: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        read(environ)
    assert caught.value.where == where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "chips"), [(None, None), ("", None), ("0", (0,)), ("3, 1", (3, 1)), ("0,1,2,3", (0, 1, 2, 3))]
)
def test_visible_chips_are_read_as_numbers(text: str | None, chips: tuple[int, ...] | None) -> None:
    assert read_visible_chips({} if text is None else {"TPU_VISIBLE_CHIPS": text}, 4) == chips


@pytest.mark.parametrize("text", ["4", "-1", "a", "0,0", "0,", "0;1", "1.0", "9" * 5000])
def test_visible_chips_that_the_host_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="0 to 3") as caught:
        read_visible_chips({"TPU_VISIBLE_CHIPS": text}, 4)
    assert caught.value.where == f"TPU_VISIBLE_CHIPS={text}"
