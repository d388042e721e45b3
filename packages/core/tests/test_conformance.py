"""The fake runtime keeps every promise that polyxla_testing asks of a runtime; leaks fail a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polyxla import Replica
from polyxla_testing import PluginInstaller, RuntimeConformance, RuntimeUnderTest

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(params=[1, 4], ids=["1-replica", "4-replicas"])
def runtime(
    request: pytest.FixtureRequest, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> RuntimeUnderTest:
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", str(request.param))
    return RuntimeUnderTest("fake")


class TestFakeRuntime(RuntimeConformance):
    pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--polyxla-runtime", "tyo"], "no runtime is called 'tyo'"),
        ([], "name the runtime to test: pytest --polyxla-runtime NAME"),
    ],
    ids=["missing", "not named"],
)
def test_without_the_runtime_its_tests_fail_and_are_not_skipped(
    tmp_path: Path, options: list[str], says: str
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["polyxla_testing.fixtures"]\n')
    (tmp_path / "test_tyo.py").write_text("def test_it(runtime):\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert says in done.stdout
    assert "skipped" not in done.stdout


def test_fake_replicas_are_threads_of_this_process(runtime: RuntimeUnderTest) -> None:
    def where(replica: Replica) -> tuple[int, int]:
        # All threads are alive here: none reuses the number of another.
        replica.barrier()
        return os.getpid(), threading.get_ident()

    found = runtime.launch(where)
    assert {pid for pid, _ in found} == {os.getpid()}
    assert len({thread for _, thread in found}) == len(found)


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((PROGRAMS / "leaking_conftest.py").read_text())
    (tmp_path / "test_leaks.py").write_text((PROGRAMS / "leaking_tests.py").read_text())
    # Otherwise the settings of this repository count, if the directory for temporary files is in it.
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "4 passed" in done.stdout
    assert "3 errors" in done.stdout
    # pytest's own variable may be named, too.
    for leak in (r"changed \['CHANGED'", r"changed \['POLYXLA_LEFT'", "left threads running"):
        assert re.search(f"AssertionError: the test {leak}", done.stdout)
