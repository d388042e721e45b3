"""A plugin of pytest with which PyTorch 2.6's device-generic tests run on TorchTPU's device, with torch 2.15.

It writes how each test ended to a journal, from which `torch_file.py` makes a report.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.testing._internal import (  # noqa: TID253  (this plugin is for tests of torch)
    common_cuda,
    common_device_type,
    common_methods_invocations,
    common_mkldnn,
    common_nn,
)


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
    parser.addoption("--cuda-too", action="store_true", help="run the tests that are meant for CUDA only")


def pytest_configure(config: pytest.Config) -> None:
    """Write the journal, and let the device run tests that are meant for CUDA if that is asked for."""
    config.pluginmanager.register(Journal(config.option.journal, config.option.leave_out))
    common_device_type.PrivateUse1TestBase.bypass_device_restrictions = config.option.cuda_too


def _skip_operators(_class: str, _test: str, specs: object) -> Any:
    return common_device_type.skipOps(specs)


# Since PyTorch 2.6, these have moved, or have other names or parameters.
vars(common_methods_invocations).update(
    skip=common_device_type.skip,
    xfail=common_device_type.xfail,
    skipOps=_skip_operators,
    binary_ufuncs_and_refs=common_methods_invocations.binary_ufuncs,
)
vars(common_cuda).update(tf32_is_not_fp32=common_mkldnn.tf32_is_not_fp32)
vars(common_mkldnn).update(bf32_on_and_off=common_mkldnn.reduced_f32_on_and_off)
vars(common_nn).update(new_module_tests=common_nn.get_new_module_tests())
