"""devices= selects existing devices; an error says which devices exist."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from polyxla import DevicesError
from polyxla.plugin import Device, Setting
from polyxla.selection import pick_devices

EIGHT = tuple(Device(index, "TOY", f"toy device {index}") for index in range(8))
COUNTS = "Write a count from 1 to 8, or devices='auto' for all of them."
NAMES = "Name devices from 0 to 7, each once, such as devices=[7]."
FORMS = "Write devices='auto', a count such as devices=8, or indices such as devices=[5]."


@pytest.mark.parametrize(
    ("asked", "picked"),
    [
        pytest.param("auto", (0, 1, 2, 3, 4, 5, 6, 7), id="auto"),
        pytest.param(1, (0,), id="one"),
        pytest.param("3", (0, 1, 2), id="count-as-text"),
        pytest.param(" 3 ", (0, 1, 2), id="count-with-spaces"),
        pytest.param(8, (0, 1, 2, 3, 4, 5, 6, 7), id="all"),
        pytest.param([5], (5,), id="index"),
        pytest.param("[5]", (5,), id="index-as-text"),
        pytest.param([7, 0], (7, 0), id="in-the-order-asked"),
        pytest.param((1, 2), (1, 2), id="tuple"),
        pytest.param(range(2, 4), (2, 3), id="range"),
    ],
)
def test_counts_and_indices_select_devices(asked: Any, picked: tuple[int, ...]) -> None:
    assert pick_devices(Setting(asked, "test"), "toy", EIGHT) == picked


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        pytest.param(
            9, f"devices=9 asks for 9 devices, but runtime toy has 8 here (from test). {COUNTS}", id="9-of-8"
        ),
        pytest.param(
            "9",
            f"devices=9 asks for 9 devices, but runtime toy has 8 here (from test). {COUNTS}",
            id="9-as-text",
        ),
        pytest.param(0, f"devices=0 asks for no device (from test). {COUNTS}", id="0"),
        pytest.param(-1, f"devices=-1 asks for no device (from test). {COUNTS}", id="negative"),
        pytest.param(
            [8],
            f"devices=[8] names device 8, but runtime toy has devices 0 to 7 (from test). {NAMES}",
            id="index-too-high",
        ),
        pytest.param(
            [0, -1],
            f"devices=[0, -1] names device -1, but runtime toy has devices 0 to 7 (from test). {NAMES}",
            id="index-negative",
        ),
        pytest.param([], f"devices=[] names no device (from test). {NAMES}", id="empty"),
        pytest.param("[]", f"devices=[] names no device (from test). {NAMES}", id="empty-as-text"),
        pytest.param([0, 0], f"devices=[0, 0] names a device twice (from test). {NAMES}", id="twice"),
        pytest.param(
            ["0"],
            f"devices=['0'] names device '0', but runtime toy has devices 0 to 7 (from test). {NAMES}",
            id="text-index",
        ),
        pytest.param(
            [True],
            f"devices=[True] names device True, but runtime toy has devices 0 to 7 (from test). {NAMES}",
            id="bool-index",
        ),
        pytest.param(
            [1.0],
            f"devices=[1.0] names device 1.0, but runtime toy has devices 0 to 7 (from test). {NAMES}",
            id="float-index",
        ),
        *(
            pytest.param(
                asked,
                f"devices={asked!r} is neither a count, a list of indices nor 'auto' (from test). {FORMS}",
                id=name,
            )
            for asked, name in [
                ("x", "word"),
                ("1.5", "float-as-text"),
                (1.5, "float"),
                (True, "bool"),
                ("true", "bool-as-text"),
                ("{}", "dict-as-text"),
                ("9" * 5000, "number-of-5000-digits"),
                ({0}, "set"),
            ]
        ),
    ],
)
def test_an_invalid_request_is_refused(asked: Any, text: str) -> None:
    with pytest.raises(DevicesError) as caught:
        pick_devices(Setting(asked, "test"), "toy", EIGHT)
    assert str(caught.value) == text
    assert caught.value.exit_code == 2


def test_the_advice_for_a_single_device_is_short() -> None:
    with pytest.raises(DevicesError, match=r"has 1 here \(from --devices 2\)\. Write --devices 1\.$"):
        pick_devices(Setting("2", "--devices 2"), "toy", EIGHT[:1])


@pytest.mark.parametrize(
    ("value", "origin", "fix"),
    [
        ("0,1", "--devices 0,1", "Write --devices '[0,1]'."),
        ("0, 1", "POLYXLA_DEVICES=0, 1", "Write POLYXLA_DEVICES='[0, 1]'."),
        ("0,1", "devices='0,1'", "Write devices=[0,1]."),
        (
            "x",
            "--devices x",
            "Write --devices auto, a count such as --devices 8, or indices such as --devices '[5]'.",
        ),
        ("9", "--devices 9", "Write a count from 1 to 8, or --devices auto for all of them."),
        ("9", "POLYXLA_DEVICES=9", "Write a count from 1 to 8, or POLYXLA_DEVICES=auto for all of them."),
        ("[8]", "--devices [8]", "Name devices from 0 to 7, each once, such as --devices '[7]'."),
    ],
)
def test_the_advice_is_written_as_the_request_was(value: str, origin: str, fix: str) -> None:
    with pytest.raises(DevicesError) as caught:
        pick_devices(Setting(value, origin), "toy", EIGHT)
    assert caught.value.fix == fix


def test_indices_need_not_start_at_zero() -> None:
    sparse = (Device(4, "TOY", "four"), Device(6, "TOY", "six"))
    assert pick_devices(Setting("auto", "test"), "toy", sparse) == (4, 6)
    assert pick_devices(Setting(1, "test"), "toy", sparse) == (4,)
    assert pick_devices(Setting([6], "test"), "toy", sparse) == (6,)
    with pytest.raises(DevicesError, match="names device 5"):
        pick_devices(Setting([5], "test"), "toy", sparse)


def test_an_error_travels_between_processes_with_its_notes() -> None:
    error = DevicesError("what", where="devices=9", fix="Fix.")
    error.add_note("raised in the replica with ordinal 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DevicesError
    assert str(again) == "what (from devices=9). Fix."
    assert again.__notes__ == ["raised in the replica with ordinal 3"]


@pytest.mark.parametrize(
    ("asked", "picked"),
    [(4, (0, 1, 2, 3)), ("4", (0, 1, 2, 3)), ([0, 1, 2], (0, 1, 2)), (1, (0,)), ("auto", (0,)), ([0], (0,))],
)
def test_devices_that_can_be_made_are_made(asked: Any, picked: tuple[int, ...]) -> None:
    one = [Device(0, "FAKE", "fake")]
    assert pick_devices(Setting(asked, "here"), "fake", one, growable=True) == picked


@pytest.mark.parametrize("asked", [[1, 2], [5], 0, 5000, 10**9, [0, 2], "[3]"])
def test_only_a_count_or_indices_from_0_make_devices(asked: Any) -> None:
    one = [Device(0, "FAKE", "fake")]
    with pytest.raises(DevicesError):
        pick_devices(Setting(asked, "here"), "fake", one, growable=True)
