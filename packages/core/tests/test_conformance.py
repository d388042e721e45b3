"""The fake runtime keeps every promise that polyxla_testing asks of a runtime; a missing one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyxla_testing import PluginInstaller, RuntimeConformance, RuntimeUnderTest

TIMEOUT_S = 60.0


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
