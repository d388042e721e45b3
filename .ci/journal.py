"""A plugin of pytest that writes what becomes of each test, for `torch_file.py`."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Journal:
    """Writes what becomes of each test.

    Attributes:
        path: of the journal, which may have tests already: these do not run again.
        left_out: patterns of tests that do not run.
    """

    def __init__(self, path: Path, left_out: list[str]) -> None:
        self.path, self.left_out = path, left_out
        self.reports: list[Any] = []

    def write(self, **what: object) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the slice that are to run."""
        first, count = map(int, config.option.slice.split("/"))
        done = {json.loads(line)["test"] for line in self.path.read_text().splitlines()}
        items[:] = [item for item in items[first - 1 :: count] if not self._is_done(item, done)]

    def _is_done(self, item: pytest.Item, done: set[str]) -> bool:
        name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        return item.nodeid in done or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write that a test begins, and how it ends."""
        self.reports = []
        self.write(test=item.nodeid)
        result = yield
        failures = [report for report in self.reports if report.failed]
        skips = [report for report in self.reports if report.skipped]
        outcome = "failed" if failures else "skipped" if skips else "passed"
        text = failures[0].longreprtext if failures else ""
        self.write(test=item.nodeid, outcome=outcome, error=text[-1000:])
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how a part of a test ended."""
        self.reports.append(report)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--journal", type=Path, required=True, help="the file of the journal")
    parser.addoption("--leave-out", action="append", default=[], help="a pattern of tests that do not run")
    parser.addoption("--slice", default="1/1", help="K/N: every N-th test, beginning with the K-th")


def pytest_configure(config: pytest.Config) -> None:
    """Write the journal."""
    config.pluginmanager.register(Journal(config.option.journal, config.option.leave_out))
