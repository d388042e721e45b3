"""One test on one replica: a pytest session of its own, in the replica's process.

The session runs a single test with its fixtures, and writes its reports to files. The launching process reads
them, also if the launch fails, as it does when a replica fails that others wait for.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from polyxla import Replica, UsageError

SETTLE_S = 2.0
"""How long a replica that failed waits for the others to end the test as well, in seconds. Most failures are
those of all replicas; after that time, the others wait for this one."""
POLL_S = 0.02
"""How often it looks for the others, in seconds."""
REPLICA = pytest.StashKey[Replica]()
SHARED = pytest.StashKey[Path]()
"""Where a replica's pytest has these two in its configuration."""


class ReplicaTestFailedError(Exception):
    """A test failed on this replica, which ends the others. The replica's reports say why."""


@dataclass(frozen=True)
class ReplicaTest:
    """What a replica needs to run a test.

    Attributes:
        node: the test, as an argument for pytest.
        options: values of the command line's options, by destination.
        plugins: its options ``-p``.
        markers: the descriptions of all registered marks.
        coverage: how the launching process measures coverage: arguments of ``coverage.Coverage``; None if it
            does not.
        folder: where the replicas write their reports and temporary files.
    """

    node: str
    options: Mapping[str, Any] = field(repr=False)
    plugins: tuple[str, ...]
    markers: tuple[str, ...] = field(repr=False)
    coverage: Mapping[str, Any] | None
    folder: str

    def config(self, ordinal: int) -> pytest.Config:
        """Return the configuration of a replica's pytest: options as values, which nothing parses again.

        Args:
            ordinal: the replica's.
        """
        own = Path(self.folder) / f"replica{ordinal}"
        options = {
            **self.options,
            "basetemp": str(own),
            "override_ini": [*(self.options.get("override_ini") or []), f"cache_dir={own}-cache"],
            # What is expected to fail is for the launching process to judge.
            "runxfail": True,
            # Its options are known, but a replica has no terminal.
            "plugins": ["no:terminal"],
        }
        arguments = [argument for name in self.plugins for argument in ("-p", name)]
        return pytest.Config.fromdictargs(options, [*arguments, self.node])

    def ended(self) -> int:
        """Return how many replicas have ended the test."""
        return len(list(Path(self.folder).glob("*.ended")))

    def reports(self) -> dict[int, list[dict[str, Any]]]:
        """Return each replica's reports, as pytest serialises them, in the order in which they were made."""
        found: dict[int, list[dict[str, Any]]] = {}
        # Not by name, in which the tenth report would come before the second.
        for path in sorted(Path(self.folder).glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
            found.setdefault(int(path.name.partition("-")[0]), []).append(json.loads(path.read_text()))
        return dict(sorted(found.items()))

    def warnings(self) -> list[tuple[str, str, str, int]]:
        """Return the replicas' warnings, each once: text, category, file and line."""
        lines = [line for path in self._files("warnings") for line in path.read_text().splitlines()]
        # Most warnings are those of all replicas.
        return [tuple(json.loads(line)) for line in dict.fromkeys(lines)]

    def coverage_data(self) -> list[Path]:
        """Return the files with what the replicas' coverage measured."""
        return self._files("coverage")

    def _files(self, kind: str) -> list[Path]:
        return sorted(Path(self.folder).glob(f"*.{kind}*"))


def run_test(replica: Replica, test: ReplicaTest) -> None:
    """Run a test on this replica.

    Raises:
        ReplicaTestFailedError: the test failed here, and other replicas have not ended.
        UsageError: pytest does not find the test, or the runtime puts several replicas into a process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "the runtime puts several replicas into a process, where pytest runs one test at a time",
            where="@pytest.mark.replicas",
            fix="Write the test with the fixture `replicas`, and give it a function to run.",
        )
    session = _Session(replica, test)
    with _measured(replica.ordinal, test):
        code = session.run()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise UsageError(
            f"pytest did not find the test again on replica {replica.ordinal} ({code!r}): {session.problems}",
            where=test.node,
            fix="Let its name and its parameters not depend on when and where it is collected.",
        )
    # Touched after the reports are written, because the others stop waiting for this replica then.
    (Path(test.folder) / f"{replica.ordinal}.ended").touch()
    deadline = time.monotonic() + SETTLE_S
    while session.has_failed and test.ended() < replica.world_size:
        if time.monotonic() > deadline:
            raise ReplicaTestFailedError(f"the test failed on replica {replica.ordinal}")
        time.sleep(POLL_S)


class _Session:
    """The plugin of a replica's pytest session."""

    def __init__(self, replica: Replica, test: ReplicaTest) -> None:
        self._replica = replica
        self._test = test
        self._config: pytest.Config | None = None
        self._reports = 0
        self.has_failed = False
        self.problems = ""

    def run(self) -> int | pytest.ExitCode:
        """Run the test; return the session's exit code."""
        self._config = config = self._test.config(self._replica.ordinal)
        config.stash[REPLICA] = self._replica
        config.stash[SHARED] = Path(self._test.folder) / "shared"
        config.stash[SHARED].mkdir(exist_ok=True)
        config.pluginmanager.register(self)
        try:
            code: int | pytest.ExitCode = config.hook.pytest_cmdline_main(config=config)
        finally:
            # pytest.main does this too; the hook alone leaves captured streams and temporary files open.
            config._ensure_unconfigure()
        return code

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the marks of plugins that are active in the launching process only."""
        known = set(config.getini("markers"))
        for line in self._test.markers:
            if line not in known:
                config.addinivalue_line("markers", line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why the test cannot be collected."""
        if report.failed:
            self.problems += str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report to its file."""
        assert self._config
        self.has_failed = self.has_failed or report.failed
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports += 1
        part = Path(self._test.folder) / f"{self._replica.ordinal}-{self._reports}.part"
        part.write_text(json.dumps(data))
        # Renaming is atomic: a replica that is killed while it writes leaves no half report behind.
        part.rename(part.with_suffix(".json"))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Write a warning of the test to a file."""
        if when != "runtest":
            return
        category = warning_message.category
        name = f"{category.__module__}.{category.__qualname__}"
        row = [str(warning_message.message), name, warning_message.filename, warning_message.lineno]
        with (Path(self._test.folder) / f"{self._replica.ordinal}.warnings").open("a") as file:
            file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def _measured(ordinal: int, test: ReplicaTest) -> Iterator[None]:
    """Measure coverage, if the launching process does and nothing else measures this one."""
    if test.coverage is None:
        yield
        return
    import coverage

    # coverage starts by itself in subprocesses if it is configured to, and measures this one already.
    if coverage.Coverage.current() is not None:
        yield
        return
    data_file = str(Path(test.folder) / f"{ordinal}.coverage")
    measured = coverage.Coverage(data_file=data_file, messages=False, **test.coverage)
    measured.start()
    try:
        yield
    finally:
        measured.stop()
        measured.save()
