"""Which frames of a traceback are printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from polyxla import Replica, launch, tracebacks
from polyxla.plugin import env
from polyxla.pytree import map_tensors
from polyxla_testing import PluginInstaller

PROGRAMS = Path(__file__).parent / "programs"


def _raise(_: Replica) -> None:
    raise KeyError("missing")


def _names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "1")


def _caught() -> BaseException:
    with pytest.raises(KeyError) as caught:
        launch(_raise)
    return caught.value


def test_only_the_users_frames_are_left_of_an_error_in_a_replica(fake: None) -> None:
    error = _caught()
    assert _names(error) == ["_caught", "_raise"]
    (note,) = error.__notes__
    assert "the replica with ordinal 0 on " in note
    assert note.endswith("; POLYXLA_FULL_TRACEBACK=1 shows polyxla's frames too")


def test_the_variable_shows_all_frames(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.POLYXLA_FULL_TRACEBACK, "1")
    error = _caught()
    assert {"launch", "_multicall", "run_replica"} < set(_names(error))
    assert "POLYXLA_FULL_TRACEBACK" not in error.__notes__[0]


def test_the_errors_behind_an_error_are_folded_too() -> None:
    def fail(_: object) -> None:
        raise ValueError("inner")

    def call() -> None:
        import torch

        try:
            map_tensors(fail, [torch.zeros(1)])
        except ValueError as inner:
            raise RuntimeError("outer") from inner

    with pytest.raises(RuntimeError) as caught:
        call()
    cause = caught.value.__cause__
    assert cause is not None
    assert "map_tensors" in _names(cause)
    tracebacks.fold(caught.value)
    assert _names(cause) == ["call", "fail"]


def test_a_defect_of_ours_keeps_all_frames() -> None:
    with pytest.raises(TypeError) as caught:
        env.timeout_s({env.POLYXLA_INPUT_TIMEOUT_S: ["soon"]}, env.POLYXLA_INPUT_TIMEOUT_S)  # type: ignore[dict-item]
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    tracebacks.fold(error)
    assert _names(error) == ["timeout_s"]


def test_python_itself_prints_only_the_programs_line_for_the_launch(
    bare_runtime: None, tmp_path: Path
) -> None:
    shutil.copy(PROGRAMS / "key_error.py", tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert re.findall(r'File ".*?([^/]*)", line (\d+)', done.stderr) == [
        ("train.py", "11"),
        ("train.py", "7"),
        ("train.py", "15"),
    ], done.stderr


def test_a_program_prints_the_replicas_lines_and_nothing_else(bare_runtime: None, tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "key_error.py", tmp_path / "train.py")
    command = [sys.executable, "-m", "polyxla.cli.script", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"Traceback \(most recent call last\):\n"
        r'  File ".*/train.py", line 11, in train\n'
        r"    return look_up\(.*\)\n(?: *\^+\n)?"
        r'  File ".*/train.py", line 7, in look_up\n'
        r"    return table\[key\]\n(?: *[~^]+\n)?"
        r"KeyError: 'missing'\n"
        rf"raised in the replica with ordinal 1 on {os.uname().nodename}; {re.escape(tracebacks.HINT)}\n",
        done.stderr,
    ), done.stderr
