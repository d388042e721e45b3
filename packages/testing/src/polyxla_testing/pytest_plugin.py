"""The pytest plugin: tests that run on several replicas, on any runtime.

A test with ``@pytest.mark.replicas(4)`` runs once on each of four replicas, with its fixtures, of which
`replica` is the `polyxla.Replica`. The fixture `replicas` is for a test that launches functions itself.
pytest loads this plugin wherever polyxla-testing is installed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polyxla import Replica, UsageError, launch
from polyxla.presence import named
from polyxla_testing.replica_tests import REPLICA, SHARED, ReplicaFailedError, ReplicaTest, run_test

T = TypeVar("T")
PLAIN = (str, int, float, list, tuple, dict, type(None))

MARK = "replicas"
# fmt: off
UNSHARED = frozenset([
    "basetemp", "capture", "collectonly", "deselect", "dist", "failedfirst", "file_or_dir", "help",
    "keyword", "last_failed", "lf", "lfnf", "log_file", "looponfail", "markexpr", "maxfail", "newfirst",
    "numprocesses", "pastebin", "plugins", "pyargs", "rootdir", "rsyncdir", "setuponly", "setupplan",
    "setupshow", "stepwise", "stepwise_skip", "trace", "tx", "usepdb", "usepdb_cls", "version",
    "xmlpath",
])
# fmt: on
"""Options that choose tests, or what happens around one: a replica has one test, and no terminal."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--polyxla-runtime`` and its setting in the configuration file."""
    parser.addoption(
        "--polyxla-runtime",
        metavar="NAME",
        help="runtime that tests on replicas run on; default: polyxla's choice",
    )
    parser.addini("polyxla_runtime", "default of --polyxla-runtime")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
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
        return launch(function, args, **{"runtime": runtime_of(pytestconfig), **options})

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a marked test's fixtures to the replicas."""
    if isinstance(item, pytest.Function) and _is_launched(item):
        item.fixturenames = []


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on replicas; its outcome is theirs."""
    if not _is_launched(pyfuncitem):
        return None
    with tempfile.TemporaryDirectory(prefix="polyxla-test-") as folder:
        test = _test_of(pyfuncitem, folder)
        error = _launch(pyfuncitem, test)
        found = test.reports()
        config = pyfuncitem.config
        reports = {
            ordinal: [config.hook.pytest_report_from_serializable(config=config, data=one) for one in data]
            for ordinal, data in found.items()
        }
    _judge(pyfuncitem, reports, error)
    return True


def _is_launched(item: pytest.Item) -> bool:
    """Return whether this process launches replicas for a test, and is not one of them."""
    return item.get_closest_marker(MARK) is not None and REPLICA not in item.config.stash


def _test_of(item: pytest.Function, folder: str) -> ReplicaTest:
    config = item.config
    given = vars(config.option).items()
    options = {name: one for name, one in given if name not in UNSHARED and isinstance(one, PLAIN)}
    return ReplicaTest(
        node=str(config.rootpath / item.nodeid),
        root=str(config.rootpath),
        configuration=str(config.inipath) if config.inipath else None,
        options=options,
        folder=folder,
    )


def _launch(item: pytest.Function, test: ReplicaTest) -> Exception | None:
    """Run a test on its replicas; return the error of the launch."""
    mark = item.get_closest_marker(MARK)
    assert mark
    options = {"runtime": runtime_of(item.config), "start_method": "forkserver", **mark.kwargs}
    try:
        launch(run_test, (test,), devices=mark.args[0] if mark.args else "auto", **options)
    except Exception as error:
        return error
    return None


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
    texts = _described([(ordinal, one) for ordinal, own in reports.items() for one in own if one.failed])
    if error and not (texts and isinstance(error, ReplicaFailedError)):
        texts.append(f"{type(error).__name__}: {error}")
    if texts:
        pytest.fail("\n\n".join(texts), pytrace=False)
    skips = [one for own in reports.values() for one in own if one.skipped]
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
