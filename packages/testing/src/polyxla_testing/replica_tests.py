"""One test on one replica: a pytest session of its own, in the replica's process.

The session runs a single test with its fixtures, and writes its reports to files. The launching process reads
them, also if the launch fails, as it does when a replica fails that others wait for.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
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
OFF = ("terminal", "cacheprovider", "junitxml", "xdist", "cov")
"""pytest's plugins that a replica does without: the launching process has them."""


class ReplicaFailedError(Exception):
    """A test failed on this replica, which ends the others. The replica's reports say why."""


@dataclass(frozen=True)
class ReplicaTest:
    """What a replica needs to run a test.

    Attributes:
        node: the test, as an argument for pytest.
        root: pytest's root directory.
        configuration: its configuration file; None if there is none.
        options: values of its command line's options, by destination.
        folder: where the replicas write their reports and temporary files.
    """

    node: str
    root: str
    configuration: str | None
    options: Mapping[str, Any] = field(repr=False)
    folder: str

    @property
    def arguments(self) -> list[str]:
        """The arguments of a replica's pytest."""
        where = [f"--rootdir={self.root}", *(["-c", self.configuration] if self.configuration else [])]
        return [*(f"-pno:{name}" for name in OFF), *where, self.node]

    def ended(self) -> int:
        """Return how many replicas have ended the test."""
        return len(list(Path(self.folder).glob("*.ended")))

    def reports(self) -> dict[int, list[dict[str, Any]]]:
        """Return each replica's reports, as pytest serialises them, in the order in which they were made."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(Path(self.folder).glob("*.json"), key=lambda one: one.stat().st_mtime_ns):
            found.setdefault(int(path.name.partition("-")[0]), []).append(json.loads(path.read_text()))
        return dict(sorted(found.items()))


def run_test(replica: Replica, test: ReplicaTest) -> None:
    """Run a test on this replica.

    Raises:
        ReplicaFailedError: the test failed here, and other replicas have not ended.
        UsageError: pytest does not find the test, or the runtime puts several replicas into a process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "the runtime puts several replicas into a process, where pytest runs one test at a time",
            where="@pytest.mark.replicas",
            fix="Write the test with the fixture `replicas`, and give it a function to run.",
        )
    session = _Session(replica, test)
    code = pytest.main(test.arguments, plugins=[session])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise UsageError(
            f"pytest did not find the test again on replica {replica.ordinal} ({code!r}): {session.problems}",
            where=test.node,
            fix="Let its name and its parameters not depend on when and where it is collected.",
        )
    (Path(test.folder) / f"{replica.ordinal}.ended").touch()
    deadline = time.monotonic() + SETTLE_S
    while session.has_failed and test.ended() < replica.world_size:
        if time.monotonic() > deadline:
            raise ReplicaFailedError(f"the test failed on replica {replica.ordinal}")
        time.sleep(POLL_S)


class _Session:
    """The plugin of a replica's pytest session."""

    def __init__(self, replica: Replica, test: ReplicaTest) -> None:
        self._replica = replica
        self._test = test
        self._config: pytest.Config | None = None
        self.has_failed = False
        self.problems = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the launching process's options, before other plugins read them."""
        self._config = config
        config.stash[REPLICA] = self._replica
        config.stash[SHARED] = Path(self._test.folder) / "shared"
        config.stash[SHARED].mkdir(exist_ok=True)
        for name, value in self._test.options.items():
            setattr(config.option, name, value)
        config.option.basetemp = str(Path(self._test.folder) / f"replica{self._replica.ordinal}")
        # What is expected to fail is for the launching process to judge.
        config.option.runxfail = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why the test cannot be collected."""
        if report.failed:
            self.problems += str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report to its file."""
        assert self._config
        self.has_failed = self.has_failed or report.failed
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        part = Path(self._test.folder) / f"{self._replica.ordinal}-{report.when}.part"
        part.write_text(json.dumps(data))
        part.rename(part.with_suffix(".json"))
