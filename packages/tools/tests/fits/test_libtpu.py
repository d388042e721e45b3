"""``polyxla fits`` with the real libtpu, which compiles without a TPU: ``nox -s libtpu``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType
from polyxla_tools.fits.collected import CollectedProgram
from polyxla_tools.fits.compiling import CompileFailedError, CompileProcess, CompileResult
from polyxla_tools.fits.target import TORCH_TPU, TORCH_XLA, TargetTpu

FOUND = importlib.util.find_spec("libtpu")
pytestmark = pytest.mark.skipif(FOUND is None, reason="libtpu is not installed; nox -s libtpu installs it")
FRAMEWORK = TORCH_TPU if importlib.util.find_spec("torch_tpu") else TORCH_XLA
TIMEOUT_S = 120
BOTH = ["v4-8", "v5e-1", "v5e-8", "v5e-16", "v5p-8", "v6e-8", "v4-32", "2xv4-8", "2xv5e-256"]
TYPES = {
    TORCH_XLA.module: ["v2-8", "v3-8", *BOTH],
    TORCH_TPU.module: [*BOTH, "tpu7x-2", "tpu7x-128"],
}
HEAD = {
    TORCH_XLA.module: """
import sys, torch, torch_xla
device, size, end_step = "xla", int(sys.argv[1]), torch_xla.sync
""",
    TORCH_TPU.module: """
import sys, torch
device, size, end_step = "tpu", int(sys.argv[1]), lambda: None
""",
}
STEP = """
weights = torch.ones(64, 1024, device=device)
while True:
    images = torch.rand(size, 64, device=device)
    hidden = images @ weights
    weights = weights - hidden.sin().sum()
    end_step()
"""
ARRAYS_BESIDE = """
held = [torch.ones(1 << 28, device=device) for _ in range(15)]
while True:
    held[0] = held[0] + 1
    end_step()
"""
RECORDS_OF_64_MIB = """
while True:
    images = torch.rand(size, 1 << 24, device=device)
    end_step()
"""


def library() -> Path:
    assert FOUND is not None
    assert FOUND.origin is not None
    return Path(FOUND.origin).with_name("libtpu.so")


def module(text: str) -> bytes:
    """Return a serialised HloModuleProto with the 32-bit ids of libtpu's time."""
    data = hlo.parse_module(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    for computation in data.computations:
        for instruction in computation.instructions:
            instruction.id = short(instruction.id)
            instruction.operand_ids[:] = map(short, instruction.operand_ids)
        computation.root_id = short(computation.root_id)
    return data.SerializeToString()


def short(number: int) -> int:
    # The upper half is the computation's number.
    return (number >> 32) * 1000 + number % (1 << 32) + 1


def compiled(
    kind: str, code: bytes, tmp_path: Path, replicas: int = 1, path: Path | None = None
) -> CompileResult:
    options = xla_client.CompileOptions()
    options.num_replicas = replicas
    devices = np.arange(replicas, dtype=np.int32)[:, None]
    options.device_assignment = xla_client.DeviceAssignment.create(devices)
    files = tmp_path / "program.hlo", tmp_path / "program.options"
    files[0].write_bytes(code)
    files[1].write_bytes(options.SerializeAsString())
    program = CollectedProgram("f", "one", None, None, 1, 1, *files)
    with CompileProcess(path or library(), TargetTpu.parse(kind, FRAMEWORK), os.environ) as process:
        return process.compile(program, TIMEOUT_S)


@pytest.mark.parametrize("kind", TYPES[FRAMEWORK.module])
def test_a_program_compiles_for_each_generation(kind: str, tmp_path: Path) -> None:
    replicas = TargetTpu.parse(kind, FRAMEWORK).devices
    result = compiled(
        kind,
        module(f"""HloModule sum, replica_count={replicas}
        add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
        ENTRY main {{ x = f32[1024,1024] parameter(0)
          y = f32[1024,1024] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
          ROOT r = f32[1024,1024] all-reduce(y), replica_groups={{}}, to_apply=add }}"""),
        tmp_path,
        replicas,
    )
    assert result.cost is not None, result.error
    assert result.cost.argument_bytes == result.cost.output_bytes == 1024 * 1024 * 4
    assert result.cost.flops is not None
    assert result.cost.flops >= 2 * 1024**3
    assert result.cost.accessed_bytes is not None


def test_an_array_larger_than_the_memory_is_too_large(tmp_path: Path) -> None:
    text = "HloModule one ENTRY main { x = f32[5000000000] parameter(0) ROOT r = f32[5000000000] negate(x) }"
    result = compiled("v5e-1", module(text), tmp_path)
    assert result.is_too_large, result.error
    assert result.cost is None


@pytest.mark.skipif(FRAMEWORK is TORCH_TPU, reason="its libtpu has compiled every program that was tried")
def test_an_abort_of_libtpu_is_a_sentence_and_the_next_program_compiles(tmp_path: Path) -> None:
    text = """HloModule one
        twice { a = f32[2] parameter(0) ROOT s = f32[2] add(a, a) }
        ENTRY main { x = f32[2] parameter(0) ROOT r = f32[2] call(x), to_apply=twice }"""
    # libtpu ends its process at the 64-bit ids that jaxlib writes.
    aborted = compiled("v5e-1", hlo_module_from_text(text).as_serialized_hlo_module_proto(), tmp_path)
    assert aborted.error.startswith("libtpu's process was ended by SIGABRT: Check failed: unique_id_")
    assert compiled("v5e-1", module(text), tmp_path).cost is not None


def test_a_library_that_is_not_libtpu_is_one_error(tmp_path: Path) -> None:
    text = "HloModule one ENTRY main { ROOT x = f32[2] parameter(0) }"
    with pytest.raises(CompileFailedError, match=r"libtpu cannot compile for v5e:1x1: .*no_libtpu"):
        compiled("v5e-1", module(text), tmp_path, path=tmp_path / "no_libtpu.so")


def fits(script: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "polyxla", "fits", str(script), *arguments, "--on", "v5e-1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_an_array_has_the_size_of_its_tiles(tmp_path: Path) -> None:
    options = tmp_path / "program.options"
    options.write_bytes(xla_client.CompileOptions().SerializeAsString())
    types = [ArrayType("float32", dims) for dims in [(), (64, 10), (1000, 1000), (10, 1000, 1000, 1000)]]
    with CompileProcess(library(), TargetTpu.parse("v5e-1", FRAMEWORK), os.environ) as process:
        sizes = [process.size_of(type_, options, TIMEOUT_S) for type_ in types]
    scalar, narrow, square, larger_than_the_memory = sizes
    assert scalar == 512
    # Rather as 10 rows of 64 numbers, each padded to 128.
    assert narrow == 16 * 128 * 4
    assert square == 1000 * 1024 * 4
    assert larger_than_the_memory == 10**10 * 4


def line_of(script: Path, text: str) -> str:
    """Return ``file:line`` of the only line that contains the text."""
    (number,) = (number for number, line in enumerate(script.read_text().splitlines(), 1) if text in line)
    return f"{script}:{number}"


# What runs the product: on torch_xla the end of the step, on TorchTPU the product itself.
PRODUCT = {TORCH_XLA.module: "  end_step()", TORCH_TPU.module: "images @ weights"}
TOO_LARGE = {
    TORCH_XLA.module: ": the program needs 40.5GiB of HBM, and a device has 16GiB: its arguments need",
    TORCH_TPU.module: " (mm): the program needs 40.53GiB of HBM, and a device has 15.75GiB for programs",
}
# On TorchTPU the images of the step before are held, and random numbers need temporary arrays.
LARGEST = {TORCH_XLA.module: 248, TORCH_TPU.module: 80}


def test_a_batch_too_large_for_the_memory_is_found_and_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD[FRAMEWORK.module] + STEP)
    code, document = fits(script, "10000000")
    assert code == 3
    assert document["fits"] is False
    problems = [program["problem"] for program in document["programs"] if program["is_too_large"]]
    assert problems
    expected = line_of(script, PRODUCT[FRAMEWORK.module]) + TOO_LARGE[FRAMEWORK.module]
    assert any(problem.startswith(expected) for problem in problems), problems


# Five runs, on TorchTPU twice as long as each needs for its programs.
@pytest.mark.timeout(600)
def test_the_largest_batch_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD[FRAMEWORK.module] + RECORDS_OF_64_MIB)
    code, document = fits(script, "{}", "--find-batch", "128")
    # 256 records alone fill the 16 GiB.
    assert (code, document["fits"], document["largest_batch"]) == (0, True, LARGEST[FRAMEWORK.module])


def test_arrays_that_no_program_uses_count(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD[FRAMEWORK.module] + ARRAYS_BESIDE)
    code, document = fits(script, "1")
    assert (code, document["fits"]) == (3, False)
    assert {program["fits"] for program in document["programs"]} == {True}
    (peak,) = document["peaks"]
    # 15 GiB are held, and the sum is one more; the scalar and the program's code are small.
    assert 0 <= peak["hbm_bytes"] - (16 << 30) < 64 << 20
    assert peak["arrays_bytes"] >= 15 << 30
    assert peak["line"].startswith(str(script))


def test_a_batch_that_fits_has_its_numbers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD[FRAMEWORK.module] + STEP)
    code, document = fits(script, "1024")
    assert (code, document["fits"], document["devices"]) == (0, True, 1)
    program = max(document["programs"], key=lambda program: program["flops"])
    assert program["line"] == line_of(script, PRODUCT[FRAMEWORK.module])
    assert program["hbm_bytes"] > 0
    (peak,) = document["peaks"]
    assert peak["hbm_bytes"] == peak["arrays_bytes"] + peak["program_bytes"] <= document["hbm_bytes"]
    # The weights are among them.
    assert peak["arrays_bytes"] >= 4 * 64 * 1024
    assert program["flops"] >= 2 * 1024 * 64 * 1024
    assert program["estimate_s"] > 0


# Four runs.
@pytest.mark.timeout(600)
def test_a_change_of_the_programs_is_found(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "golden"
    script.write_text(HEAD[FRAMEWORK.module] + STEP)
    code, document = fits(script, "8", "--golden", str(kept))
    assert (code, document["changes"]) == (0, [])
    files = sorted(path.name for path in kept.iterdir())
    assert len(files) == len(document["programs"]) + 1
    # The same programs, from other lines.
    script.write_text("\n\n" + script.read_text())
    code, document = fits(script, "8", "--golden", str(kept))
    assert (code, document["changes"]) == (0, [])
    code, document = fits(script, "16", "--golden", str(kept))
    assert code == 4
    assert any("f32[16,1024]" in line for line in document["changes"] if line.startswith("+"))
    code, updated = fits(script, "16", "--golden", str(kept), "--update")
    assert (code, updated["changes"]) == (0, document["changes"])
