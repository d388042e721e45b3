"""launch checks everything first, passes the runtime one job, and does not change the caller's process."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla import Replica, UsageError, launch
from polyxla.console import say_once
from polyxla.contracts.precision import UnchangedPrecision
from polyxla.plugin import Job
from polyxla_testing import PluginInstaller

PROGRAMS = Path(__file__).parent / "programs"
ECHO = (PROGRAMS / "echo_runtime.py").read_text()
DIARY = (PROGRAMS / "diary_listener.py").read_text()
SUMMARY = (PROGRAMS / "summary_listener.py").read_text()
CLOSING = (PROGRAMS / "closing_runtime.py").read_text()


@pytest.fixture(autouse=True)
def _alone(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_plugin.hide_others()
    for name in ("POLYXLA_RUNTIME", "POLYXLA_DEVICES", "POLYXLA_PRECISION", "PJRT_DEVICE", "XRT_TPU_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    say_once.cache_clear()
    yield
    say_once.cache_clear()


@pytest.fixture
def echo(install_plugin: PluginInstaller) -> Callable[..., Job]:
    """Launch on a runtime that runs nothing and returns the job."""
    install_plugin("echo", ECHO)

    def launched(train_fn: Any = print, args: Any = (), **options: Any) -> Job:
        (job,) = launch(train_fn, args, **options)
        assert isinstance(job, Job)
        return job

    return launched


@pytest.fixture
def fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _ordinal(replica: Replica, *args: Any) -> tuple[Any, ...]:
    return (replica.ordinal, replica.world_size, *args)


def test_results_come_in_ordinal_order(fake: None) -> None:
    assert launch(_ordinal, ("a", 1)) == [(0, 4, "a", 1), (1, 4, "a", 1), (2, 4, "a", 1), (3, 4, "a", 1)]
    assert launch(_ordinal, devices=2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("numbering", "host", "ordinals"),
    [
        pytest.param("2,0,3,1", 0, [0, 1, 2, 3], id="one-host"),
        pytest.param("0,1,4,5;2,3,6,7", 0, [0, 1, 4, 5], id="first-of-two-hosts"),
        pytest.param("6,7,2,3;0,1,4,5", 0, [2, 3, 6, 7], id="a-host-without-ordinal-0"),
        pytest.param("0,1,4,5;7,6,3,2", 1, [2, 3, 6, 7], id="second-of-two-hosts"),
    ],
)
def test_results_come_in_ordinal_order_however_replicas_are_numbered(
    fake: None, monkeypatch: pytest.MonkeyPatch, numbering: str, host: int, ordinals: list[int]
) -> None:
    monkeypatch.setenv("FAKE_DEVICES", str(1 + numbering.count(",") + numbering.count(";")))
    monkeypatch.setenv("FAKE_NUMBERING", numbering)
    monkeypatch.setenv("FAKE_HOST", str(host))
    assert [ordinal for ordinal, _ in launch(_ordinal)] == ordinals


def test_the_launching_process_receives_every_replicas_summary(
    fake: None,
    install_plugin: PluginInstaller,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_plugin.listener("summary-listener", SUMMARY)
    monkeypatch.setenv("FAKE_DEVICES", "3")
    monkeypatch.setenv("FAKE_NUMBERING", "2,0,1")
    assert launch(_ordinal) == [(0, 3), (1, 3), (2, 3)]
    assert capsys.readouterr().out == "summaries {0: [], 1: [{'from': 1}], 2: [{'from': 2}]}\n"


def test_there_are_no_summaries_of_a_launch_that_failed(
    fake: None, install_plugin: PluginInstaller, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin.listener("summary-listener", SUMMARY)

    def fail(replica: Replica) -> None:
        if replica.ordinal == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(fail, devices=2)
    assert "summaries" not in capsys.readouterr().out


def test_the_job_holds_the_function_the_runtime_and_the_devices(echo: Callable[..., Job]) -> None:
    job = echo(print, ["a", "b"], runtime="echo", devices=[5, 2], start_method="spawn")
    assert (job.function, job.args, job.runtime, job.devices) == (print, ("a", "b"), "echo", (5, 2))
    assert (job.start_method, job.precision.value) == ("spawn", None)
    assert job.environ["ECHO_DEVICES"] == "[5, 2] of 8, None"


@pytest.mark.parametrize(
    ("variable", "given", "devices"),
    [
        pytest.param(None, {}, (0, 1, 2, 3, 4, 5, 6, 7), id="default"),
        pytest.param("2", {}, (0, 1), id="environment"),
        pytest.param("[6]", {}, (6,), id="environment-index"),
        pytest.param("2", {"devices": 1}, (0,), id="argument-wins"),
        pytest.param("2", {"devices": "auto"}, (0, 1), id="auto-leaves-it-to-the-environment"),
    ],
)
def test_missing_arguments_are_taken_from_the_environment(
    variable: str | None,
    given: dict[str, Any],
    devices: tuple[int, ...],
    echo: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("POLYXLA_DEVICES", variable)
    assert echo(**given).devices == devices


def test_the_environment_names_the_runtime(
    echo: Callable[..., Job], install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("echo-b", ECHO)
    monkeypatch.setenv("POLYXLA_RUNTIME", "echo-b")
    assert echo().runtime == "echo-b"
    assert echo(runtime="echo").runtime == "echo"


@pytest.mark.parametrize("accelerator", ["auto", "tpu", "TPU"])
def test_runtimes_see_the_accelerator_in_lower_case(
    accelerator: str, echo: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    echo(accelerator=accelerator)
    assert capsys.readouterr().err == f"polyxla: runtime echo: accelerator {accelerator.lower()}\n"


def test_an_implicit_choice_is_printed_once(
    echo: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_NOTE", "TPU_CORES has no effect")
    echo()
    assert capsys.readouterr().err == (
        "polyxla: TPU_CORES has no effect\npolyxla: runtime echo: accelerator auto\n"
    )
    echo()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("ECHO_NOTE")
    echo(runtime="echo", accelerator="cpu")
    assert capsys.readouterr().err == "", "a runtime that the user named is not printed"


def test_the_callers_environment_does_not_change(
    fake: None, echo: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_BEFORE", "kept")
    before = dict(os.environ)
    job = echo(runtime="echo", devices=1)
    assert dict(os.environ) == before
    assert dict(job.environ) == {**before, "ECHO_DEVICES": "[0] of 8, kept"}
    visible = launch(lambda _: os.environ["FAKE_VISIBLE_DEVICES"], runtime="fake", devices=[3, 1])
    assert visible == ["3,1", "3,1"]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("train_fn", "options", "text"),
    [
        pytest.param(
            None,
            {},
            "launch needs a function, not None (from train_fn). "
            "Pass the function itself, and its arguments as args=(...).",
            id="not-a-function",
        ),
        pytest.param(
            print,
            {"start_method": "thread"},
            "start_method='thread' is not one of auto, inline, spawn, forkserver, fork (from start_method). "
            "Leave it out, or write start_method='spawn'.",
            id="start-method",
        ),
        pytest.param(
            print,
            {"runtime": "eccho"},
            "no runtime is called 'eccho' (installed: echo) (from runtime='eccho'). Did you mean 'echo'?",
            id="unknown-runtime",
        ),
        pytest.param(
            print,
            {"runtime": "xrt"},
            "runtime 'xrt' is not installed (installed: echo) (from runtime='xrt'). "
            "Install it: pip install ./packages/bridge ./packages/runtime-xrt",
            id="missing-runtime",
        ),
        pytest.param(
            print,
            {"devices": 9},
            "devices=9 asks for 9 devices, but runtime echo has 8 here (from devices=9). "
            "Write a count from 1 to 8, or devices='auto' for all of them.",
            id="too-many-devices",
        ),
        pytest.param(
            print,
            {"devices": []},
            "devices=[] names no device (from devices=[]). "
            "Name devices from 0 to 7, each once, such as devices=[7].",
            id="no-device",
        ),
        pytest.param(
            print,
            {"devices": True},
            "devices=True is neither a count, a list of indices nor 'auto' (from devices=True). "
            "Write devices='auto', a count such as devices=8, or indices such as devices=[5].",
            id="bool-device",
        ),
    ],
)
def test_an_impossible_launch_is_refused_before_anything_starts(
    train_fn: Any, options: dict[str, Any], text: str, echo: Callable[..., Job]
) -> None:
    with pytest.raises(UsageError) as caught:
        echo(train_fn, **options)
    assert str(caught.value) == text
    assert caught.value.exit_code == 2


def test_an_error_names_the_variable_that_is_wrong(
    echo: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYXLA_DEVICES", "9")
    with pytest.raises(UsageError, match=r"\(from POLYXLA_DEVICES=9\)"):
        echo()


@pytest.mark.parametrize("precision", ["half", 16], ids=["name", "number"])
@pytest.mark.parametrize(
    ("is_installed", "fix"),
    [
        pytest.param(
            False, "Install the usual policies: pip install ./packages/precision", id="not-installed"
        ),
        pytest.param(
            True,
            "Write precision='bf16-mixed' or '32-true', or leave it out to keep the module's own dtypes.",
            id="installed",
        ),
    ],
)
def test_an_unknown_precision_is_an_error(
    precision: str | int,
    is_installed: bool,
    fix: str,
    echo: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if not is_installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError) as caught:
        echo(precision=precision)
    assert str(caught.value) == (
        f"no installed plugin knows the precision {precision!r} (from precision={precision!r}). {fix}"
    )


@pytest.mark.parametrize(
    "precision",
    [torch.nn.Linear(2, 2), UnchangedPrecision, torch.bfloat16],
    ids=["module", "class of a policy", "dtype"],
)
def test_an_object_that_is_not_a_policy_is_refused_as_precision(
    precision: Any, echo: Callable[..., Job]
) -> None:
    with pytest.raises(UsageError) as caught:
        echo(precision=precision)
    assert str(caught.value) == (
        f"precision is neither a policy's name nor a policy (from precision={precision!r}). "
        "Write a name such as precision='bf16-mixed', or pass a policy such as BF16True()."
    )


def test_a_replica_holds_the_policy_of_a_plugin(
    fake: None, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from polyxla import hookimpl
from polyxla.contracts.precision import UnchangedPrecision

@hookimpl
def polyxla_precision(name):
    if name == "32":
        policy = UnchangedPrecision()
        policy.name = "of the plugin"
        return policy
"""
    install_plugin.listener("policies", code)
    assert launch(lambda replica: replica.precision.name, devices=1) == ["as-made"]
    assert launch(lambda replica: replica.precision.name, devices=1, precision=32) == ["of the plugin"]
    monkeypatch.setenv("POLYXLA_PRECISION", "32")
    assert launch(lambda replica: replica.precision.name, devices=1) == ["of the plugin"]


def test_what_a_policy_says_of_itself_is_printed_once(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    class Policy(UnchangedPrecision):
        def describe(self) -> str:
            return "16 means bfloat16"

    for _ in range(2):
        launch(_ordinal, devices=2, precision=Policy())
    said = [line for line in capsys.readouterr().err.splitlines() if "bfloat16" in line]
    assert said == ["polyxla: 16 means bfloat16"]


def test_listeners_receive_a_replicas_start_and_end(fake: None, install_plugin: PluginInstaller) -> None:
    install_plugin.listener("diary", DIARY)
    launch(_ordinal, devices=2)
    import diary  # type: ignore[import-not-found]

    assert sorted(diary.diary) == ["started 0", "started 1", "stopped 0 None", "stopped 1 None"]
    diary.diary.clear()
    with pytest.raises(KeyError):
        launch(_fail, devices=1)
    assert diary.diary == ["started 0", "stopped 0 KeyError('on purpose')"]


def _fail(replica: Replica) -> None:
    replica.barrier()
    if replica.ordinal == replica.world_size - 1:
        raise KeyError("on purpose")
    replica.barrier()


def test_an_error_names_its_replica_and_host(fake: None) -> None:
    with pytest.raises(KeyError) as caught:
        launch(_fail)
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised in the replica with ordinal 3 on {socket.gethostname()}; ")


def test_an_error_before_the_connection_says_that_there_was_none(
    install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("closing", CLOSING)
    monkeypatch.setenv("CLOSING_FAILS", "1")
    with pytest.raises(ConnectionRefusedError) as caught:
        launch(_ordinal, runtime="closing")
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised in a replica that could not connect on {socket.gethostname()}; ")


def test_the_connection_is_closed_also_after_an_error(
    install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("closing", CLOSING)
    monkeypatch.setenv("FAKE_DEVICES", "2")
    launch(_ordinal, runtime="closing")
    import closing  # type: ignore[import-not-found]

    assert sorted(closing.closed) == [0, 1]
    with pytest.raises(KeyError):
        launch(_fail, runtime="closing", devices=1)
    assert len(closing.closed) == 3


@pytest.mark.parametrize(
    "arguments", [5, "text", {"a": 1}, iter([1])], ids=["number", "text", "dict", "iterator"]
)
def test_arguments_that_are_not_a_list_are_refused(arguments: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a list or tuple of arguments .* with the comma"):
        launch(print, arguments)


def _without_replica() -> None:
    """A function for another launcher."""


def _with(replica: Replica, one: Any) -> Any:
    return one


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (_without_replica, (), "_without_replica(replica): too many positional arguments"),
        (_with, (), "_with(replica): missing a required argument: 'one'"),
        (_with, (5, [1]), "_with(replica, 5, list): too many positional arguments"),
        (_ordinal, (5,), None),
        (dict.fromkeys, (), None),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_before_anything_starts(
    echo: Callable[..., Job], function: Any, args: tuple[Any, ...], message: str | None
) -> None:
    if message is None:
        assert echo(function, args).function == function
        return
    with pytest.raises(UsageError) as caught:
        echo(function, args)
    assert f"cannot be called as {message} (from train_fn). Its first argument is the" in str(caught.value)
