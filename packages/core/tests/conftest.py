"""Shared fixtures: a runtime without torch, and its replica processes, made in every way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from polyxla.contracts.job import ProcessMethod
from polyxla.launcher.launch import run_replica
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Job, Setting

if TYPE_CHECKING:
    # pytest must be the first to import it, to rewrite its assertions.
    from polyxla_testing import PluginInstaller

pytest_plugins = ["polyxla_testing.fixtures"]

BARE_RUNTIME = Path(__file__).parent / "programs" / "bare_runtime.py"


@pytest.fixture
def bare_runtime(install_plugin: PluginInstaller, request: pytest.FixtureRequest) -> Iterator[None]:
    """Install the bare runtime as the only plugin."""
    install_plugin.hide_others()
    install_plugin("bare", BARE_RUNTIME.read_text())
    # Replica processes cannot import a test module.
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(params=["spawn", "forkserver", "fork"])
def method(request: pytest.FixtureRequest) -> ProcessMethod:
    """Each way to make a process."""
    way: ProcessMethod = request.param
    return way


@pytest.fixture
def run_bare(bare_runtime: None) -> Callable[..., list[Any]]:
    """Run a function in replica processes of the bare runtime and return the results."""

    def run(
        function: Callable[..., Any],
        *args: Any,
        size: int = 1,
        method: ProcessMethod = "spawn",
        **environ: str,
    ) -> list[Any]:
        whole = {**os.environ, **environ}
        devices = tuple(range(size))
        job = Job(function, args, "bare", devices, whole, Setting(None, "default"), main=run_replica)
        environs = [{**whole, "MINE": str(ordinal)} for ordinal in range(size)]
        results = run_processes(job, range(size), environs, method=method, preload=["json.tool"])
        return [result.value for result in results]

    return run
