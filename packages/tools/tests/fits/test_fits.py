"""The pure parts of ``polyxla fits``, and its errors where libtpu is missing."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from polyxla import UsageError
from polyxla.plugin import GENERATIONS, AcceleratorType
from polyxla_bridge.libtpu.topology import EMULATED_GENERATIONS
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto
from polyxla_tools.fits import report
from polyxla_tools.fits.collected import Alive, CollectedProgram, Logs, innermost_user_line, programs
from polyxla_tools.fits.command import (
    TOO_LARGE,
    ScriptChecker,
    StatusLine,
    finish,
    largest_fitting,
    with_batch_size,
)
from polyxla_tools.fits.compile_process import Cost
from polyxla_tools.fits.compiling import CompileProcess, CompileResult, MemoryPeak, fatal_line, memory_peaks
from polyxla_tools.fits.emulated_run import EmulatedRun, ScriptFailedError
from polyxla_tools.fits.report import CheckedProgram, CheckedScript
from polyxla_tools.fits.target import TORCH_TPU, TORCH_XLA, Framework, TargetTpu, installed_framework

COST = Cost(1 << 30, 3 << 30, 1 << 30, 2 << 30, 1 << 20, flops=197e12, accessed_bytes=400e9)
V5E = TargetTpu.parse("v5e-8", TORCH_XLA)
OUT_OF_MEMORY = """XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 17.34G of 15.75G hbm. Exceeded hbm capacity by 1.60G.

  Largest program allocations in hbm:

  1. Size: 11.44G
     Operator: op_type="aten__addmm" op_name="aten__addmm" source_file="linear.py" source_line=134
     Shape: f32[3000000,1024]{1,0:T(8,128)}
     Unpadded size: 11.44G
"""
TOO_LARGE_AN_ARRAY = """Allocation (size=40960000000) would exceed memory (size=17179869184) :: \
#allocation48 [shape = 'f32[10000000,1024]{1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff]"""
"""Two messages of libtpu 0.0.21."""
NEWER_OUT_OF_MEMORY = """E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required \
for HLO temporaries (40.53G) exceeds available HBM (15.75G). HLO module: tt_jit_mm."""
"""A message of libtpu 0.0.52."""
ONE_GIB, ONE_BYTE = ArrayType("uint8", (1 << 30,)), ArrayType("uint8", (1,))


def checked(result: CompileResult, tmp_path: Path) -> CheckedProgram:
    files = tmp_path / "program.hlo", tmp_path / "program.options"
    for file in files:
        file.touch()
    return CheckedProgram(
        CollectedProgram("f", "SyncTensorsGraph.1", "train.py:7", None, 10, 1, *files), result
    )


def alive(checked: CheckedProgram, **devices: Alive) -> CheckedProgram:
    """Return the program with what was alive on the devices, ``d0`` and so on."""
    found = {int(name.removeprefix("d")): arrays for name, arrays in devices.items()}
    return dataclasses.replace(checked, program=dataclasses.replace(checked.program, alive=found))


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("v3-8", "v3:2x2x1"),
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v5e-1", "v5e:1x1"),
        ("v5e-8", "v5e:2x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v6e-8", "v6e:2x4"),
    ],
)
def test_a_type_has_a_topology(kind: str, topology: str) -> None:
    assert TargetTpu.parse(kind, TORCH_XLA).topology == topology


def test_several_slices_have_the_topology_of_each() -> None:
    target = TargetTpu.parse("2xv5e-256", TORCH_XLA)
    assert (target.name, target.devices, target.topology) == ("2xv5litepod-256", 512, "v5e:16x16")
    assert target.options == {"chips_per_host_bounds": (2, 2, 1), "num_slices": 2}


def test_torch_tpu_compiles_for_tpu7x() -> None:
    target = TargetTpu.parse("tpu7x-8", TORCH_TPU)
    assert (target.topology, target.accelerator.devices) == ("tpu7x:2x2x1", 8)
    assert report.binary(target.memory_bytes) == "94.7GiB"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_libtpu_keeps_some_of_the_memory_to_itself(generation: str) -> None:
    nominal = EMULATED_GENERATIONS[generation].memory_gib << 30
    assert 0.9 * nominal < TargetTpu(AcceleratorType.parse(f"{generation}-8", "test")).memory_bytes <= nominal


def test_arrays_that_fill_what_libtpu_keeps_do_not_fit(tmp_path: Path) -> None:
    program = checked(CompileResult(1.0, COST), tmp_path)
    script = CheckedScript([program], [MemoryPeak(0, program.program, int(15.6 * 2**30), int(0.3 * 2**30))])
    assert not script.fits(V5E)
    lines = "\n".join(report.as_text(V5E, "0.0.52", script))
    assert "does not fit: 15.9GiB are needed, and a device has 15.8GiB, while train.py:7 runs:" in lines


def test_the_cores_of_a_v4_chip_are_one_device() -> None:
    assert TargetTpu.parse("v4-16", TORCH_XLA).options == {
        "chips_per_host_bounds": (2, 2, 1),
        "chip_config_name": "megacore",
    }
    assert TargetTpu.parse("v5p-8", TORCH_XLA).options == {"chips_per_host_bounds": (2, 2, 1)}


@pytest.mark.parametrize(("framework", "kind"), [(TORCH_XLA, "tpu7x-8"), (TORCH_TPU, "v3-8")])
def test_a_type_that_the_framework_does_not_know_is_refused(framework: Framework, kind: str) -> None:
    expected = rf"{framework.module}, .* does not compile for a {kind} \(from --on {kind}\)"
    with pytest.raises(UsageError, match=expected):
        TargetTpu.parse(kind, framework)


def test_each_type_is_one_of_a_framework() -> None:
    assert {*TORCH_XLA.generations, *TORCH_TPU.generations} == set(GENERATIONS) == set(EMULATED_GENERATIONS)


def _show(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these frameworks be found, and no others."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in modules or None)


def test_the_framework_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch, "torch_xla")
    assert installed_framework() is TORCH_XLA
    _show(monkeypatch, "torch_tpu")
    assert installed_framework() is TORCH_TPU


def test_without_a_framework_the_error_has_the_pip_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch)
    with pytest.raises(UsageError, match=r"pip install .*/runtime-pjrt or pip install .*/runtime-torchtpu"):
        installed_framework()


def test_two_frameworks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch, "torch_xla", "torch_tpu")
    with pytest.raises(UsageError, match=r"pip uninstall torch_xla, or torch_tpu, here"):
        installed_framework()


@pytest.mark.parametrize("framework", [TORCH_XLA, TORCH_TPU])
def test_the_scripts_run_is_not_changed_by_variables_that_choose_devices(
    framework: Framework, tmp_path: Path
) -> None:
    chosen = {
        "POLYXLA_RUNTIME": "xrt",
        "POLYXLA_DEVICES": "2",
        "POLYXLA_DEVICE_MEMORY": "1MiB",
        "PJRT_DEVICE": "CPU",
        "XRT_TPU_CONFIG": "tpu_worker;0;localhost:8470",
    }
    run = EmulatedRun(["train.py"], V5E, framework, 10, 60)
    assert run.environ({**chosen, "PATH": "/bin"}, tmp_path) == {
        "PATH": "/bin",
        "POLYXLA_RUNTIME": framework.runtime,
        "POLYXLA_EMULATE": "v5litepod-8",
        "POLYXLA_LIBTPU_PROGRAMS": str(tmp_path),
        **framework.variables,
    }


def test_the_shortest_time_is_that_of_the_operations_or_of_the_memory() -> None:
    assert V5E.estimate_s(COST) == pytest.approx(1.0)
    assert V5E.estimate_s(Cost(0, 0, 0, 0, 0, 1e12, 1600e9)) == pytest.approx(2.0)
    assert V5E.estimate_s(Cost(0, 0, 0, 0, 0, None, 1e9)) is None
    # The two cores of a v3 chip share its peak.
    assert TargetTpu.parse("v3-8", TORCH_XLA).estimate_s(Cost(0, 0, 0, 0, 0, 123e12, 0)) == pytest.approx(2.0)


def test_donated_memory_counts_once() -> None:
    assert COST.total_bytes == (1 + 3 - 1 + 2) * 2**30 + 2**20


def test_the_text_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    lines = list(report.as_text(V5E, "0.0.21", one_program(tmp_path)))
    assert lines == [
        "v5litepod-8: 8 devices with 15.8GiB of HBM each (compiled by libtpu 0.0.21)",
        "     HBM     args  outputs    temps     code    FLOPs    bytes at least  compile",
        "train.py:7, executed 10 times",
        "    5GiB     1GiB     2GiB     2GiB     1MiB     197T     400G       1s    12.3s",
        "fits: at most 6GiB of 15.8GiB are needed on each device, while train.py:7 runs:",
        "2GiB of arrays, and 4GiB for the program's results, temporary arrays and code",
    ]
    assert max(map(len, lines)) <= 80


def test_the_json_has_the_numbers_of_each_program(tmp_path: Path) -> None:
    document = report.as_json(V5E, "0.0.21", one_program(tmp_path))
    assert json.loads(json.dumps(document)) == document
    assert (document["fits"], document["hbm_bytes"], document["devices"]) == (True, V5E.memory_bytes, 8)
    (program,) = document["programs"]
    assert (program["line"], program["hbm_bytes"], program["flops"]) == (
        "train.py:7",
        COST.total_bytes,
        197e12,
    )
    assert document["peaks"] == [
        {
            "device": device,
            "hbm_bytes": (6 << 30) + (1 << 20),
            "arrays_bytes": 2 << 30,
            "program_bytes": (4 << 30) + (1 << 20),
            "line": "train.py:7",
            "name": "SyncTensorsGraph.1",
        }
        for device in (0, 1)
    ]


def one_program(tmp_path: Path) -> CheckedScript:
    """Return a script of one program, with which each of two devices holds 2 GiB of arrays."""
    held = Alive(2 << 30, {ONE_GIB: 2})
    program = alive(checked(CompileResult(12.3, COST), tmp_path), d0=held, d1=held)
    return CheckedScript([program], memory_peaks([(program.program, COST)], lambda _: 1 << 30))


def test_the_peak_is_of_arrays_and_program_together(tmp_path: Path) -> None:
    small = dataclasses.replace(COST, temporary_bytes=0)
    large = dataclasses.replace(COST, temporary_bytes=1 << 30)
    few, many = Alive(1 << 30, {ONE_GIB: 1}), Alive(4 << 30, {ONE_GIB: 3, ONE_BYTE: 1 << 20})
    first = alive(checked(CompileResult(1.0, small), tmp_path), d0=many, d1=few)
    second = alive(checked(CompileResult(1.0, large), tmp_path), d0=few, d1=few)
    # A tile is the least that an array takes on a TPU.
    sizes = {ONE_GIB: 1 << 30, ONE_BYTE: 512}
    found = memory_peaks([(first.program, small), (second.program, large)], lambda type_: sizes[type_])
    assert [(peak.device, peak.program, peak.arrays_bytes) for peak in found] == [
        (0, first.program, (3 << 30) + (512 << 20)),
        (1, second.program, 1 << 30),
    ]
    assert found[1].program_bytes == large.total_bytes - large.argument_bytes


def test_arrays_and_program_may_be_too_large_together(tmp_path: Path) -> None:
    held = Alive(15 << 30, {ONE_GIB: 15})
    program = alive(checked(CompileResult(1.0, COST), tmp_path), d0=held)
    assert program.problem(V5E) is None
    script = CheckedScript([program], memory_peaks([(program.program, COST)], lambda _: 1 << 30))
    assert script.is_too_large(V5E)
    assert list(report.as_text(V5E, "0.0.21", script))[-2:] == [
        "does not fit: 19GiB are needed, and a device has 15.8GiB, while train.py:7 runs:",
        "15GiB of arrays, and 4GiB for the program's results, temporary arrays and code",
    ]
    document = report.as_json(V5E, "0.0.21", script)
    assert (document["fits"], document["programs"][0]["fits"]) == (False, True)
    checker = ScriptChecker(TORCH_XLA, V5E, Path(), "0.0.21", 10, 0.0, {}, StatusLine())
    assert finish(checker, script, None, as_json=True) == TOO_LARGE


def test_the_device_that_needs_most_is_named(tmp_path: Path) -> None:
    more, less = Alive(2 << 30, {ONE_GIB: 2}), Alive(1 << 30, {ONE_GIB: 1})
    program = alive(checked(CompileResult(1.0, COST), tmp_path), d0=less, d1=more)
    script = CheckedScript([program], memory_peaks([(program.program, COST)], lambda _: 1 << 30))
    *_, line, _ = report.as_text(V5E, "0.0.21", script)
    assert line == "fits: at most 6GiB of 15.8GiB are needed on device 1, while train.py:7 runs:"


def test_a_program_of_one_operation_is_named_after_it(tmp_path: Path) -> None:
    program = dataclasses.replace(checked(CompileResult(1.0, COST), tmp_path).program, operation="linear")
    assert report.origin(program) == "train.py:7 (linear)"
    assert report.origin(dataclasses.replace(program, line=None)) == "linear (no line of the script)"


def test_only_the_largest_programs_are_listed(tmp_path: Path) -> None:
    costs = [dataclasses.replace(COST, temporary_bytes=number << 20) for number in range(40)]
    programs = [checked(CompileResult(0.5, cost), tmp_path) for cost in costs]
    lines = list(report.as_text(V5E, "0.0.52", CheckedScript(programs)))
    assert len([line for line in lines if line.startswith("train.py:7")]) == report.LISTED
    assert lines[-1] == f"{40 - report.LISTED} smaller programs, compiled in {(40 - report.LISTED) / 2:.1f} s"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OUT_OF_MEMORY,
            (
                "the program needs 17.34GiB of HBM, and a device has 15.75GiB for programs; its largest "
                "array, f32[3000000,1024], needs 11.44GiB"
            ),
        ),
        (
            TOO_LARGE_AN_ARRAY,
            "an array of the program, f32[10000000,1024], needs 38.1GiB of HBM, and a device has 15.8GiB",
        ),
        (
            NEWER_OUT_OF_MEMORY,
            "the program needs 40.53GiB of HBM, and a device has 15.75GiB for programs",
        ),
        ("another text", "the program needs more HBM than a device has (15.8GiB)"),
    ],
)
def test_a_program_that_is_too_large_is_one_sentence(error: str, expected: str, tmp_path: Path) -> None:
    assert (
        checked(CompileResult(1.0, error=error, is_too_large=True), tmp_path).problem(V5E)
        == f"train.py:7: {expected}"
    )


def test_a_program_that_compiles_may_be_too_large(tmp_path: Path) -> None:
    large = dataclasses.replace(COST, output_bytes=COST.alias_bytes + (20 << 30))
    found = CheckedScript([checked(CompileResult(1.0, large, is_too_large=True), tmp_path)])
    *_, last = report.as_text(V5E, "0.0.21", found)
    needs = f"the program needs {report.binary(large.total_bytes)} of HBM, and a device has 15.8GiB"
    arguments = report.binary(COST.argument_bytes)
    assert last == f"train.py:7: {needs}: its arguments need {arguments}, its results 20GiB more"
    assert report.as_json(V5E, "0.0.21", found)["fits"] is False


def test_an_operation_that_does_not_compile_is_named(tmp_path: Path) -> None:
    error = (
        "RET_CHECK failure (hlo_verifier.cc:623) shard_count == 8, %reduce-scatter.33 = f32[1]{0} reduce-s"
    )
    program, result = checked(CompileResult(1.0), tmp_path).program, CompileResult(1.0, error=error)
    found = CheckedProgram.of(program, result, "")
    # The files of programs are gone when the report is written.
    program.hlo.unlink()
    assert found.problem(V5E) == (
        f"train.py:7: libtpu does not compile the program (reduce-scatter.33): {error}"
    )


def test_the_second_abort_has_its_own_reason(tmp_path: Path) -> None:
    code = """
import os, sys
print('{"devices": 1}', flush=True)
name = sys.stdin.readline().split('"')[1]
sys.stderr.write(f"F1123 05:22:07.685228 10092 file.cc:89] Check failed: {name}\\n" + "at a line\\n" * 3)
sys.stderr.flush()
os.abort()
"""
    with CompileProcess(tmp_path / "libtpu.so", V5E, {}) as process:
        # A stand-in for libtpu's process, which no program ends twice.
        process._command = [sys.executable, "-c", code]
        for name in ("first", "second"):
            program = CollectedProgram("f", "one", None, None, 1, 1, tmp_path / name, tmp_path / "options")
            error = process.compile(program, 60.0).error
            assert error == f"libtpu's process was ended by SIGABRT: Check failed: {tmp_path / name}"


def test_the_reason_of_an_abort_is_found_in_the_log() -> None:
    log = (
        "E1123 05:22:07.693441 10092 coredump_hook.cc:301] RAW: Remote crash data gathering hook invoked.\n"
        "F1123 05:22:07.685228 10092 statusor.cc:89] Attempting to fetch value\n    @ 0x7f12 (unknown)\n"
    )
    assert fatal_line(log) == "Attempting to fetch value"
    assert fatal_line("one\nlast") == "last"
    assert fatal_line("") == "it printed nothing"


def test_a_terminal_shows_the_scripts_arguments_as_they_are() -> None:
    status = Console(file=io.StringIO(), force_terminal=True).status("")
    line = StatusLine(status)
    line.phase("running train.py --layers [relu] [/tmp]")
    line.detail("train.py:100: sum")
    assert str(status.status) == "running train.py --layers [relu] [/tmp]: train.py:100: sum"


@pytest.mark.parametrize("largest", [0, 1, 3, 8, 16, 24, 1000, 1024])
@pytest.mark.parametrize("first", [1, 8, 100, 4096])
def test_the_search_finds_the_largest_batch(largest: int, first: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert largest_fitting(fits, first) == largest
    assert len(tried) == len(set(tried)) <= 24
    assert tried[0] == first - first % 8 or first == 1


def test_the_search_names_what_fitted_before_the_script_failed() -> None:
    class SmallData(ScriptChecker):
        def check(self, command: Sequence[str], *, stops_when_too_large: bool = False) -> CheckedScript:
            if int(command[-1]) > 20:
                raise ScriptFailedError("the script failed: 20 records")
            return CheckedScript([])

    target = TargetTpu.parse("v5e-1", TORCH_XLA)
    checker = SmallData(TORCH_XLA, target, Path(), "0.0.21", 10, 0.0, {}, StatusLine())
    with pytest.raises(
        ScriptFailedError, match=r"^batch size 16 fits; batch size 32: the script failed: 20 records$"
    ):
        checker.find_batch(["train.py", "{}"], 8)
    with pytest.raises(ScriptFailedError, match=r"^batch size 24: the script failed: 20 records$"):
        checker.find_batch(["train.py", "{}"], 24)


def test_the_batch_size_replaces_its_place() -> None:
    assert with_batch_size(["train.py", "--batch-size={}", "{}"], 8) == ["train.py", "--batch-size=8", "8"]


def test_a_line_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    compiled = json.dumps({"compiled": "one", "stack": [["train.py", 7]]}) + "\n"
    executed = json.dumps({"executed": "one", "device": 0, "in_use": 0}) + "\n"
    log.write_text(compiled + executed + executed[:9])
    logs = Logs(tmp_path)
    assert logs.read()
    assert logs.repeats == 1
    log.write_text(compiled + executed + executed)
    assert not logs.read()
    assert logs.repeats == 2
    log.write_text(compiled + executed + executed + compiled.replace("one", "two"))
    assert logs.read()
    assert logs.repeats == 0
    assert list(logs.stacks) == ["one", "two"]


def test_the_slowest_process_decides_when_there_are_no_new_programs(tmp_path: Path) -> None:
    executed = json.dumps({"executed": "one", "device": 0, "in_use": 0}) + "\n"
    for process, times in enumerate((5, 3)):
        (tmp_path / f"{process}.log").write_text(executed * times)
    logs = Logs(tmp_path)
    logs.read()
    assert logs.repeats == 3


def test_the_most_arrays_of_each_device_are_read(tmp_path: Path) -> None:
    lines = [
        {"compiled": "one", "stack": [], "main": [["train.py", 7]]},
        {"executed": "one", "device": 2, "in_use": 16, "arrays": [["float32", [4], 1]]},
        {"executed": "one", "device": 2, "in_use": 16},
        {
            "executed": "one",
            "device": 2,
            "in_use": 40,
            "arrays": [["float32", [4], 1], ["float32", [2, 3], 1]],
        },
    ]
    (tmp_path / "0.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    logs = Logs(tmp_path)
    logs.read()
    types = ArrayType("float32", (4,)), ArrayType("float32", (2, 3))
    assert logs.alive == {("one", 2): Alive(40, dict.fromkeys(types, 1))}
    (tmp_path / "one.hlo").write_bytes(HloModuleProto(name="tt_jit_linear").SerializeToString())
    (program,) = programs(tmp_path, logs)
    assert (program.line, program.operation, program.executions) == ("train.py:7", "linear", 3)
    assert program.alive == {2: logs.alive["one", 2]}


@pytest.mark.parametrize(
    ("framework", "repeats", "last_new_s", "now_s", "expected"),
    [
        (TORCH_XLA, 9, 20, 1000, False),
        (TORCH_XLA, 10, 20, 21, True),
        # The equal layers of a first step.
        (TORCH_TPU, 12, 20, 21, False),
        (TORCH_TPU, 1000, 20, 39, False),
        (TORCH_TPU, 1000, 20, 40, True),
        # A step that takes long.
        (TORCH_TPU, 9, 20, 1000, False),
    ],
)
def test_an_eager_script_is_stopped_after_a_second_half_without_new_programs(
    framework: Framework, repeats: int, last_new_s: float, now_s: float, expected: bool
) -> None:
    run = EmulatedRun(["train.py"], V5E, framework, 10, 3600)
    assert run.has_settled(repeats, last_new_s, now_s) == expected
    endless = dataclasses.replace(run, steps=0)
    assert not endless.has_settled(repeats, last_new_s, now_s)


def test_the_line_of_the_script_is_the_first_outside_of_libraries() -> None:
    stack = [(np.__file__, 1), (subprocess.__file__, 2), ("<string>", 3), ("/elsewhere/train.py", 4)]
    assert innermost_user_line(stack) == "/elsewhere/train.py:4"
    assert innermost_user_line(stack[:3]) is None


@pytest.mark.parametrize(
    ("framework", "fix"),
    [
        ("torch_xla", "pip install './packages/runtime-pjrt[tpu]'"),
        ("torch_tpu", "pip install 'libtpu>=0.0.50'"),
    ],
)
def test_without_libtpu_the_error_has_the_pip_line(framework: str, fix: str) -> None:
    # Nothing else can be found there, so this works where libtpu and either framework are installed, too.
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec;"
        f"answers = {{'libtpu': None, 'torch_xla': None, 'torch_tpu': None, {framework!r}: found('sys')}};"
        "importlib.util.find_spec = lambda name, *rest: answers[name] if name in answers "
        "else found(name, *rest);"
        "from polyxla.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "fits", "train.py", "--on", "v5e-8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert fix in json.loads(done.stdout)["error"]


def test_without_the_bridge_the_error_has_the_pip_line() -> None:
    code = "import sys; sys.modules['polyxla_bridge'] = None; "
    code += "from polyxla.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "fits", "train.py", "--on", "v5e-8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert "the script runs on an emulated TPU, which needs polyxla-bridge, and it is not installed" in error
    assert "pip install ./packages/bridge" in error
