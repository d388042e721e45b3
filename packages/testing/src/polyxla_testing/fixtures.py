"""Pytest fixtures: the runtime under test, plugins installed for one test, and a check for leaks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from polyxla import launch
from polyxla.plugin import HOOKSPECS, PLUGINS, RUNTIMES, find_runtime, own_packages, say_once
from polyxla_testing.pytest_plugin import runtime_of

RUN_TIMEOUT_S = 300.0
"""Longest run of a script under test, in seconds."""


@dataclass(frozen=True)
class RuntimeUnderTest:
    """The runtime that the tests run on.

    Attributes:
        name: its entry-point name.
        environ: variables that `run` adds to the test's environment.
    """

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run ``function(replica, *args)`` on this runtime; `options` as for `polyxla.launch`."""
        return launch(function, args, runtime=self.name, **options)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``polyxla run --runtime NAME command...`` in a process, and wait for its end."""
        return subprocess.run(
            [sys.executable, "-m", "polyxla", "run", "--runtime", self.name, *command],
            env={**os.environ, **self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )


class PluginInstaller:
    """Installs small distributions for one test, as modules and metadata in a directory on the path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(
        self, distribution: str, code: str = "", *, group: str = RUNTIMES, name: str | None = None
    ) -> None:
        """Install a distribution with one module, which an entry point names.

        Args:
            distribution: the distribution's name.
            code: the module's source; default: an empty module.
            group: the entry-point group.
            name: the entry point's name; default: the distribution's.
        """
        module = distribution.replace("-", "_")
        (self.directory / f"{module}.py").write_text(code)
        self.metadata(distribution, f"[{group}]\n{name or distribution} = {module}\n")

    def metadata(self, distribution: str, entry_points: str = "", version: str = "1.0") -> None:
        """Install a distribution's metadata: its name, its version and its entry points."""
        info = self.directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        # importlib lists a directory again only if its time has changed, which may be too coarse.
        importlib.invalidate_caches()

    def fake_runtime(self) -> None:
        """Install `polyxla_testing.FakeRuntime` under the name ``fake``."""
        self.metadata("fake-runtime", f"[{RUNTIMES}]\nfake = polyxla_testing.fake:runtime\n")

    def hide_others(self, keep: Collection[str] = ()) -> None:
        """Hide every installed plugin, here and in processes that the test starts.

        Args:
            keep: names of distributions that stay visible.
        """
        find, mine = importlib.metadata.entry_points, str(self.directory)
        # What this test has installed itself stays visible: only plugins of other directories are hidden.
        dists = {
            point.dist
            for group in (RUNTIMES, PLUGINS, HOOKSPECS)
            for point in find(group=group)
            if point.dist
        }
        for name in {dist.name for dist in dists if str(dist.locate_file("")) != mine}.difference(keep):
            # The first of two distributions with one name on the path hides the other.
            self.metadata(name, version="0")

    def listener(self, distribution: str, code: str) -> None:
        """Install a plugin that is not a runtime."""
        self(distribution, code, group=PLUGINS)


@pytest.fixture(scope="session")
def runtime(pytestconfig: pytest.Config) -> RuntimeUnderTest:
    """The runtime named by ``--polyxla-runtime``; a missing one is a failure, not a skip."""
    if not (name := runtime_of(pytestconfig)):
        raise pytest.UsageError("name the runtime to test: pytest --polyxla-runtime NAME")
    find_runtime(name, "--polyxla-runtime")
    return RuntimeUnderTest(name)


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginInstaller]:
    """Installs plugins that only this test and the processes it starts can see."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    # Replicas and other processes that the test starts find the plugins by this variable.
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    yield PluginInstaller(directory)
    # The next test may install another module under the same name.
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that changes a variable, or leaves a variable of polyxla's or a running thread behind.

    Other new variables are allowed: torch_xla and scikit-learn set some when they are first imported.
    """
    environ, threads = dict(os.environ), set(threading.enumerate())
    # Otherwise a line that was printed once in another test would not be printed in this one, and the plugins
    # that another test hides or adds would count here.
    say_once.cache_clear()
    own_packages.cache_clear()
    yield
    watched = {*environ, *(name for name in os.environ if name.startswith("POLYXLA_"))}
    changed = {name for name in watched if environ.get(name) != os.environ.get(name)}
    # pytest itself changes this one around each phase of a test.
    assert not changed - {"PYTEST_CURRENT_TEST"}, f"the test changed {sorted(changed)}"
    assert not _still_running(threads), "the test left threads running"


# The bridge's engine lives as long as its process, and starts these when the device is first read.
ENGINES_THREADS = "polyxla-read"


def _still_running(before: set[threading.Thread], timeout_s: float = 5.0) -> list[threading.Thread]:
    deadline = time.monotonic() + timeout_s
    # A thread may be about to end, such as one whose result the test has just read.
    while True:
        # Daemon threads keep no process from ending, and libraries leave some behind.
        new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
        left = [thread for thread in new if not thread.name.startswith(ENGINES_THREADS)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
