"""Programs that ``polyxla fits --golden`` keeps as text, and what it says of later ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla import UsageError
from polyxla_tools.fits.command import check_golden
from polyxla_tools.fits.golden import LIST, Golden, GoldenProgram, canonical

NUMBERS: dict[str, float | None] = {"total_bytes": 1 << 20, "flops": 2e6}
FIRST, SECOND, THIRD = (GoldenProgram(f"HloModule program\n{text}\n", NUMBERS) for text in ("a", "b", "c"))
GOLDEN = Golden("v5litepod-1", "0.0.21", [FIRST, SECOND])


def module(number: int, operation: str = "add") -> bytes:
    """Return a program whose names have a number, as those of torch_xla do."""
    data: bytes = hlo_module_from_text(
        f"""HloModule SyncTensorsGraph.{number}
        add.{number} {{ a.1 = f32[] parameter(0) b.{number} = f32[] parameter(1)
          ROOT s.{number} = f32[] {operation}(a.1, b.{number}),
            metadata={{op_name="x" source_file="train.py" source_line={number}}} }}
        ENTRY main.{number} {{ x.{number} = f32[4] parameter(0) c = f32[] constant(0)
          ROOT r.5 = f32[] reduce(x.{number}, c), dimensions={{0}}, to_apply=add.{number} }}"""
    ).as_serialized_hlo_module_proto()
    return data


def test_names_and_places_are_not_kept() -> None:
    text = canonical(module(7))
    assert text == canonical(module(15))
    assert "train.py" not in text
    assert text != canonical(module(7, "multiply"))
    assert text.startswith("HloModule program, entry_computation_layout={(f32[4]{0})->f32[]}\n")
    assert "ENTRY main {" in text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "golden" / "v5e"
    assert Golden.read(directory) is None
    GOLDEN.write(directory)
    assert Golden.read(directory) == GOLDEN
    assert list(GOLDEN.changes(GOLDEN)) == []
    # A reviewer would take the file that is left over for a program.
    dataclasses.replace(GOLDEN, programs=[FIRST]).write(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["001.hlo", LIST]


def test_a_program_may_be_new_or_gone() -> None:
    more = dataclasses.replace(GOLDEN, programs=[THIRD, FIRST, SECOND])
    assert list(GOLDEN.changes(more)) == ["program 1 is new: 1MiB of HBM, 2M FLOPs, 2 lines"]
    assert list(more.changes(GOLDEN)) == ["program 1 is gone: 1MiB of HBM, 2M FLOPs, 2 lines"]


def test_a_change_is_shown_with_its_numbers() -> None:
    other = GoldenProgram(THIRD.text, {**NUMBERS, "total_bytes": 3 << 20, "flops": None})
    later = Golden("v5litepod-1", "0.0.52", [FIRST, other])
    assert list(GOLDEN.changes(later)) == [
        "libtpu: 0.0.21 -> 0.0.52",
        "program 2: HBM 1MiB -> 3MiB, FLOPs 2M -> ?",
        "--- before",
        "+++ after",
        "@@ -1,2 +1,2 @@",
        " HloModule program",
        "-b",
        "+c",
    ]


def test_numbers_may_change_alone() -> None:
    cheaper = dataclasses.replace(SECOND, numbers={**NUMBERS, "total_bytes": 1 << 19})
    changes = list(GOLDEN.changes(dataclasses.replace(GOLDEN, programs=[FIRST, cheaper])))
    assert changes == ["program 2: HBM 1MiB -> 512KiB"]


def test_a_long_difference_is_cut() -> None:
    before, after = (GoldenProgram("\n".join(f"{word} {i}" for i in range(99)), {}) for word in ("a", "b"))
    lines = list(Golden("t", "1", [before]).changes(Golden("t", "1", [after])))
    assert lines[0] == "program 1: its instructions changed"
    assert lines[-1] == "... and 141 more lines"


@pytest.mark.parametrize("damage", ["list", "entry", "program"])
def test_what_cannot_be_read_is_named(damage: str, tmp_path: Path) -> None:
    GOLDEN.write(tmp_path)
    if damage == "list":
        (tmp_path / LIST).write_text("{")
    elif damage == "entry":
        (tmp_path / LIST).write_text(json.dumps({"programs": [{"file": "001.hlo"}]}))
    else:
        (tmp_path / "002.hlo").unlink()
    with pytest.raises(UsageError, match="the programs of an earlier run cannot be read") as refused:
        Golden.read(tmp_path)
    assert refused.value.where == f"--golden {tmp_path}"


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    check_golden(tmp_path / "new", True, None)
    for golden, update, find_batch, text in (
        (None, True, None, "--update has nothing to replace"),
        (tmp_path, False, 8, "--golden keeps the programs of one batch size"),
        (Path(__file__), False, None, "is no directory"),
    ):
        with pytest.raises(UsageError, match=text):
            check_golden(golden, update, find_batch)
