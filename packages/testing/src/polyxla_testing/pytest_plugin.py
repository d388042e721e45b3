"""The pytest plugin: tests that run on several replicas, on any runtime.

A test with ``@pytest.mark.replicas(4)`` runs once on each of four replicas, with its fixtures, of which
`replica` is the `polyxla.Replica`. The fixture `replicas` is for a test that launches functions itself.
pytest loads this plugin wherever polyxla-testing is installed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polyxla import Replica, UsageError, launch
from polyxla.plugin import POLYXLA_WAIT_S, named, snapshot, temporary_environ
from polyxla_testing.replica_tests import REPLICA, SHARED, ReplicaTest, ReplicaTestFailedError, run_test

T = TypeVar("T")
PLAIN = (str, int, float, list, tuple, dict, type(None))

MARK = "replicas"
TURN_S = 300.0
"""Longest wait of a test for cores that tests of pytest-xdist's other processes hold, in seconds."""
# fmt: off
UNSHARED = frozenset([
    "basetemp", "capture", "collectonly", "deselect", "dist", "distload", "failedfirst", "file_or_dir",
    "help", "htmlpath", "json_report", "keyword", "last_failed", "lf", "lfnf", "log_file", "looponfail",
    "markexpr", "maxfail", "newfirst", "numprocesses", "pastebin", "plugins", "pyargs", "report_log",
    "rsyncdir", "setuponly", "setupplan", "setupshow", "stepwise", "stepwise_skip", "trace", "tx", "usepdb",
    "usepdb_cls", "version", "xmlpath",
])
# fmt: on
"""Options that choose tests, or what happens around one: a replica has one test, and no terminal. All options
of pytest-cov, which begin with ``cov``, belong to them: `_coverage` hands on what it measures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--polyxla-runtime`` and its setting in the configuration file."""
    parser.addoption(
        "--polyxla-runtime",
        metavar="NAME",
        help="runtime that tests on replicas run on; default: polyxla's choice",
    )
    parser.addini("polyxla_runtime", "default of --polyxla-runtime")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and leave out warnings about torch_xla's calls of its own old functions."""
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch_xla\.")
    config.addinivalue_line(
        "markers",
        f"{MARK}(count='auto', **options): run the test on so many replicas; options as for polyxla.launch",
    )


@pytest.fixture
def replicas(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """Runs ``function(replica, *args)`` on replicas; returns its results in the order of their ordinals.

    Call it as ``replicas(function, *args, devices=4)``, with the options of `polyxla.launch`.
    """

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return _launch(pytestconfig, function, args, **options)

    return run


@pytest.fixture(scope="session")
def replica(pytestconfig: pytest.Config) -> Replica:
    """The replica that runs the test, which needs ``@pytest.mark.replicas``."""
    return _of_replica(pytestconfig, REPLICA, "replica")


@pytest.fixture(scope="session")
def shared_path(pytestconfig: pytest.Config) -> Path:
    """A temporary directory that all replicas of the test share; each has its own `tmp_path`."""
    return _of_replica(pytestconfig, SHARED, "shared_path")


def _of_replica(config: pytest.Config, key: pytest.StashKey[T], name: str) -> T:
    if key not in config.stash:
        raise UsageError(
            "this test runs on no replica",
            where=f"fixture `{name}`",
            fix="Mark it with @pytest.mark.replicas(2), which runs it on two.",
        )
    return config.stash[key]


def runtime_of(config: pytest.Config) -> str | None:
    """Return the runtime that the command line or the configuration file names."""
    return config.getoption("--polyxla-runtime") or config.getini("polyxla_runtime") or None


# First, because pytest's own hook makes the fixtures.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a marked test and its fixtures to the replicas."""
    if isinstance(item, pytest.Function) and _is_launched(item):
        # The replicas make the fixtures; here, they would be made once more and never used.
        item.fixturenames = []
        # Not in a hook for the call: a method of unittest.TestCase has a way of its own.
        item.runtest = functools.partial(_run_on_replicas, item)  # type: ignore[method-assign]


def _run_on_replicas(item: pytest.Function) -> None:
    """Run a marked test on replicas; its outcome is theirs."""
    with tempfile.TemporaryDirectory(prefix="polyxla-test-") as folder:
        test = _test_of(item, folder)
        error = _try(item, test)
        found = test.reports()
        config = item.config
        reports = {
            ordinal: [
                config.hook.pytest_report_from_serializable(config=config, data=report) for report in data
            ]
            for ordinal, data in found.items()
        }
        _add_coverage(test)
        for text, category, file, line in test.warnings():
            # Issued again here, so that this process's filters apply and its summary lists them.
            warnings.warn_explicit(text, _category(category), file, line)
    _judge(item, reports, error)


def _category(name: str) -> type[Warning]:
    """Return a warning's class; UserWarning if it is not at the top of its module."""
    module, _, own = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), own)
    except (ImportError, AttributeError):
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning


def _coverage() -> dict[str, Any] | None:
    """Return how coverage measures this process, as arguments of ``coverage.Coverage``; None without it."""
    measured = _measuring()
    if measured is None:
        return None
    names = ("branch", "source", "source_pkgs", "omit", "include")
    given = {name: measured.get_option(f"run:{name}") for name in names}
    return {**given, "config_file": measured.config.config_file or False}


def _add_coverage(test: ReplicaTest) -> None:
    """Add what was measured in the replicas to the data of this process."""
    measured = _measuring()
    # A replica that was ended by a signal has saved nothing, and is missing here.
    for path in test.coverage_data() if measured else ():
        other = sys.modules["coverage"].CoverageData(str(path))
        other.read()
        measured.get_data().update(other)


def _measuring() -> Any:
    coverage: Any = sys.modules.get("coverage")
    return coverage and coverage.Coverage.current()


def _is_launched(item: pytest.Item) -> bool:
    """Return whether this process launches replicas for a test, and is not one of them."""
    return item.get_closest_marker(MARK) is not None and REPLICA not in item.config.stash


def _test_of(item: pytest.Function, folder: str) -> ReplicaTest:
    config = item.config
    file, separator, test = item.nodeid.partition("::")
    given = vars(config.option)
    shared = {
        name: value
        for name, value in given.items()
        # Values of other types, such as open files, cannot be sent to a replica.
        if name not in UNSHARED and not name.startswith("cov") and isinstance(value, PLAIN)
    }
    where = {
        "rootdir": str(config.rootpath),
        "inifilename": str(config.inipath) if config.inipath else None,
    }
    return ReplicaTest(
        # Only the file is a path: a parameter, such as a URL, may contain what a path would lose.
        node=f"{config.rootpath / file}{separator}{test}",
        options={**shared, **where},
        plugins=tuple(given.get("plugins", ())),
        markers=tuple(config.getini("markers")),
        coverage=_coverage(),
        folder=folder,
    )


def _launch(config: pytest.Config, function: Callable[..., Any], args: Any, **options: Any) -> list[Any]:
    environ = snapshot()
    if hasattr(config, "workerinput"):
        # Tests that pytest-xdist runs at the same time take turns on the cores of a TPU node.
        environ = {POLYXLA_WAIT_S: f"{TURN_S:g}", **environ}
    with temporary_environ(environ):
        return launch(function, args, **{"runtime": runtime_of(config), **options})


def _try(item: pytest.Function, test: ReplicaTest) -> Exception | None:
    """Run a test on its replicas; return the error of the launch."""
    mark = item.get_closest_marker(MARK)
    assert mark
    try:
        # Even a single replica needs a process of its own, because pytest already runs in this one.
        _launch(item.config, run_test, (test,), **{"start_method": "forkserver", **_options(mark)})
    except Exception as error:
        return error
    return None


def _options(mark: pytest.Mark) -> dict[str, Any]:
    """Return the options of `polyxla.launch` that a mark has.

    Raises:
        UsageError: it has another argument.
    """
    options = dict(mark.kwargs)
    counts = [*mark.args, *(options.pop(name) for name in ("count", "devices") if name in options)]
    known = inspect.signature(launch).parameters.keys() - {"train_fn", "args"}
    if len(counts) > 1 or not options.keys() <= known:
        given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
        raise UsageError(
            "the mark has an argument too many" if len(counts) > 1 else "the mark has an unknown argument",
            where=f"@pytest.mark.{MARK}({', '.join(given)})",
            fix=f"Write @pytest.mark.{MARK}(2); it may also have {', '.join(sorted(known - {'devices'}))}.",
        )
    return {"devices": counts[0] if counts else "auto", **options}


def _judge(
    item: pytest.Function, reports: dict[int, list[pytest.TestReport]], error: Exception | None
) -> None:
    """Give a test the outcome of its replicas.

    Raises:
        Failed: it failed on a replica, or the launch did.
        Skipped: all replicas skipped it.
    """
    for ordinal, own in reports.items():
        for title, text in own[-1].sections:
            what = title.removeprefix("Captured ").removesuffix(" call")
            item.add_report_section("call", f"{what} of replica {ordinal}", text)
    texts = _described(
        [(ordinal, report) for ordinal, own in reports.items() for report in own if report.failed]
    )
    # That error only stands for a failure that a replica's report describes.
    if error and not (texts and isinstance(error, ReplicaTestFailedError)):
        texts.append(f"{type(error).__name__}: {error}")
    if texts:
        pytest.fail("\n\n".join(texts), pytrace=False)
    skips = [report for own in reports.values() for report in own if report.skipped]
    if skips and len(skips) == len(reports):
        # File, line and reason.
        place: Any = skips[0].longrepr
        pytest.skip(place[2].removeprefix("Skipped: "))


def _described(failures: Sequence[tuple[int, pytest.TestReport]]) -> list[str]:
    """Describe failures; replicas that failed in the same way share one text."""
    same: dict[str, list[tuple[int, pytest.TestReport]]] = {}
    for ordinal, report in failures:
        # Objects of two processes have different addresses.
        same.setdefault(re.sub(r"\b0x[0-9a-f]+", "", report.longreprtext), []).append((ordinal, report))
    return [_text([ordinal for ordinal, _ in group], group[0][1]) for group in same.values()]


def _text(ordinals: list[int], report: pytest.TestReport) -> str:
    phase = "" if report.when == "call" else f" ({report.when})"
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = f" {crash.message.partition(chr(10))[0]}" if crash else ""
    return f"{named(ordinals)}{phase}:{reason}\n\n{report.longreprtext}"
