"""The boxes that chips of a host form. Expected values are those that libtpu accepted, see `Generation`."""

from __future__ import annotations

import pytest

from polyxla.errors import UsageError
from polyxla.tpu.accelerators import GENERATIONS, Bounds, Shape
from polyxla.tpu.parts import box, chips_of

BOARD: Shape = (2, 2, 1)
EIGHT: Shape = (2, 4, 1)
Y_FIRST = ["v2", "v3", "v4", "v5p"]


@pytest.mark.parametrize("generation", Y_FIRST)
@pytest.mark.parametrize(
    ("chips", "shape"),
    [
        ((0, 1), (1, 2, 1)),
        ((2, 3), (1, 2, 1)),
        ((0, 2), (2, 1, 1)),
        ((1, 3), (2, 1, 1)),
        ((3, 1, 0, 2), BOARD),
    ],
)
def test_chips_count_along_y_first_up_to_v5p(generation: str, chips: tuple[int, ...], shape: Shape) -> None:
    assert box(generation, BOARD, chips) == Bounds((1, 1, 1), shape)


@pytest.mark.parametrize(
    ("host", "chips", "shape"),
    [
        (BOARD, (0, 1), (2, 1, 1)),
        (BOARD, (2, 3), (2, 1, 1)),
        (BOARD, (0, 2), (1, 2, 1)),
        (EIGHT, (0, 1, 2, 3), BOARD),
        (EIGHT, (4, 5, 6, 7), BOARD),
        (EIGHT, (0, 2, 4, 6), (1, 4, 1)),
    ],
)
def test_chips_count_along_x_first_on_v5e(host: Shape, chips: tuple[int, ...], shape: Shape) -> None:
    assert box("v5e", host, chips) == Bounds((1, 1, 1), shape)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_one_chip_and_all_chips_are_boxes_of_every_generation(generation: str) -> None:
    assert [box(generation, BOARD, [chip]).chips for chip in range(4)] == [(1, 1, 1)] * 4
    assert box(generation, BOARD, range(4)).chips == BOARD
    assert box(generation, EIGHT, range(8)).chips == EIGHT


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("chips", [(0, 3), (1, 2), (0, 1, 2)])
def test_chips_that_form_no_box_are_refused(generation: str, chips: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="not neighbours that form a box") as caught:
        box(generation, BOARD, chips, where="TPU_VISIBLE_CHIPS=x")
    assert caught.value.where == "TPU_VISIBLE_CHIPS=x"
    assert "choose one" in caught.value.fix


@pytest.mark.parametrize(
    ("host", "chips", "either"),
    [
        (BOARD, (0, 1), "1,2,1 or 2,1,1"),
        (BOARD, (1, 3), "1,2,1 or 2,1,1"),
        (EIGHT, (0, 1, 2, 3), "1,4,1 or 2,2,1"),
        (EIGHT, (0, 1, 4, 5), "2,2,1 or no box"),
    ],
)
def test_what_depends_on_the_order_of_v6e_is_refused_with_a_way_out(
    host: Shape, chips: tuple[int, ...], either: str
) -> None:
    with pytest.raises(UsageError, match=f"not documented how a v6e .* {either} .from devices") as caught:
        box("v6e", host, chips)
    assert caught.value.where == "devices"
    assert "TPU_CHIPS_PER_PROCESS_BOUNDS" in caught.value.fix


@pytest.mark.parametrize(
    ("generation", "host", "shape", "chips"),
    [
        ("v4", BOARD, (1, 2, 1), (0, 1)),
        ("v4", BOARD, (2, 1, 1), (0, 2)),
        ("v5e", BOARD, (2, 1, 1), (0, 1)),
        ("v5e", EIGHT, BOARD, (0, 1, 2, 3)),
        ("v6e", EIGHT, (1, 1, 1), (0,)),
        ("v6e", EIGHT, EIGHT, tuple(range(8))),
    ],
)
def test_a_box_begins_with_the_first_chip(
    generation: str, host: Shape, shape: Shape, chips: tuple[int, ...]
) -> None:
    assert chips_of(generation, host, shape, "here") == chips


def test_the_chips_of_a_box_are_refused_where_they_are_not_known() -> None:
    with pytest.raises(UsageError, match="a box of 2,1,1 has the chips 0,1 or 0,2"):
        chips_of("v6e", BOARD, (2, 1, 1), "here")
    with pytest.raises(UsageError, match=r"a box of 1,4,1 chips does not fit into a host of 2,2,1") as caught:
        chips_of("v4", BOARD, (1, 4, 1), "TPU_HOST_BOUNDS=x")
    assert caught.value.where == "TPU_HOST_BOUNDS=x"
