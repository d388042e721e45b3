"""The line that a message names is the user's, whoever stands between the user and polyxla."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from polyxla.callsite import BACKWARD, caller, location, user_line
from polyxla.plugin import callsite
from polyxla.plugin_manager import HOOKSPECS, PLUGINS, RUNTIMES, load_plugins
from polyxla_testing import PluginInstaller

TIMEOUT_S = 30.0
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _only_these_plugins(install_plugin: PluginInstaller) -> Iterator[None]:
    install_plugin.hide_others()
    install_plugin("polyxla-extra", group=PLUGINS)
    install_plugin("third-party", group=PLUGINS)
    callsite.own_packages.cache_clear()
    before = set(callsite._runtimes)
    yield
    callsite.own_packages.cache_clear()
    callsite._runtimes.clear()
    callsite._runtimes.update(before)


def within(module: str, inner: Any) -> Any:
    """Return a function of `module` that calls `inner` and returns its result."""
    names = {"__name__": module, "inner": inner}
    exec(compile("def call():\n    return inner()", f"{module}.py", "exec"), names)
    return names["call"]


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        pytest.param([], HERE, id="the-user's"),
        pytest.param(["torch._tensor"], HERE, id="the-user's-by-torch"),
        pytest.param(["torch_xla", "typing_extensions"], HERE, id="the-user's-by-a-deprecated-function"),
        pytest.param(["polyxla.replica.loader"], None, id="polyxla's"),
        pytest.param(["torch._tensor", "polyxla.replica.collectives"], None, id="polyxla's-by-torch"),
        pytest.param(["torch._tensor", "polyxla_extra.metrics"], None, id="a-plugin's-of-ours-by-torch"),
        pytest.param(["polyxla_extra.metrics", "torch"], None, id="a-plugin's-of-ours"),
        pytest.param(["polyxla.tpu.torchrun"], None, id="runtimes'-library"),
        pytest.param(["torch._tensor", "third_party.metrics"], "third_party", id="another-plugin's-by-torch"),
        pytest.param(
            ["torch.optim.adam", "polyxla.replica.replica"], "torch.optim.adam.py:2", id="optimizer"
        ),
        pytest.param(["torch.optim.optimizer", "polyxla.replica.replica"], None, id="optimizers-base-class"),
        pytest.param(["torch.autograd", "polyxla.replica.replica"], BACKWARD, id="backward"),
    ],
)
def test_a_read_belongs_to_the_code_that_makes_it(modules: list[str], line: str | None) -> None:
    call = caller
    for module in modules:
        call = within(module, call)
    found = call()
    assert (line or "") in (found or "")
    assert (found is None) == (line is None)


def test_an_observers_frames_do_not_count_as_polyxlas() -> None:
    call = within("torch._tensor", within("polyxla_extra.observer", caller))
    assert call() is None
    call = within("torch._tensor", within("polyxla_extra.observer", lambda: caller("polyxla_extra.observer")))
    assert HERE in call()


def test_a_package_of_the_users_that_registers_a_plugin_is_the_users_program() -> None:
    call = within("third_party.train", within("polyxla.replica.loader", user_line))
    assert call() == "third_party.train.py:2"


@pytest.mark.parametrize(
    ("module", "is_runtimes"),
    [("toy", True), ("company.tpu.plugin", True), ("company.tpu.devices", True), ("company.train", False)],
)
def test_only_the_package_of_the_runtime_in_use_is_machinery(module: str, is_runtimes: bool) -> None:
    callsite.add_runtime("toy")
    callsite.add_runtime("company.tpu.plugin")
    found = within("polyxla.replica.loader", within(module, user_line))()
    assert (HERE in found) == is_runtimes
    assert (found == f"{module}.py:2") != is_runtimes


def test_loading_a_runtime_for_a_job_makes_it_machinery(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-runtime", name="toy")
    load_plugins("toy")
    assert HERE in within("polyxla.replica.loader", within("toy_runtime", user_line))()


def test_a_package_that_is_no_plugin_is_the_users_program() -> None:
    call = within("polyxla.replica.loader", within("datasets", user_line))
    assert call() == "datasets.py:2"


def test_own_packages_covers_every_group_of_plugins() -> None:
    assert {PLUGINS, RUNTIMES, HOOKSPECS} < set(callsite.PLUGIN_GROUPS)


def test_a_step_belongs_to_the_loop_that_makes_it() -> None:
    assert HERE in within("polyxla.replica.replica", user_line)()


def test_a_threads_line_is_the_users_innermost() -> None:
    begun, done = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        done.wait(TIMEOUT_S)

    thread = threading.Thread(target=within("polyxla.replica.loader", wait))
    thread.start()
    try:
        assert begun.wait(TIMEOUT_S)
        found = user_line(thread.ident or 0)
    finally:
        done.set()
        thread.join(TIMEOUT_S)
    assert found is not None
    assert found.partition(":")[0].endswith(HERE)
    assert user_line(thread.ident or 0) is None, "the thread has ended"


def test_a_thread_without_the_users_frames_has_no_line() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(TIMEOUT_S,))
    thread.start()
    try:
        assert user_line(thread.ident or 0) is None
    finally:
        done.set()
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize(
    ("file", "line", "shown"),
    [
        pytest.param("{cwd}/train.py", 7, "train.py:7", id="below-the-working-directory"),
        pytest.param("{cwd}/models/net.py", 7, "models/net.py:7", id="deeper"),
        pytest.param("/elsewhere/train.py", 7, "/elsewhere/train.py:7", id="elsewhere"),
        pytest.param("{cwd}/train.py", None, "train.py:3", id="first-line-of-the-function"),
    ],
)
def test_files_are_shown_from_the_working_directory(
    file: str, line: int | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile("\n\ndef function():\n    pass\n", file.format(cwd=tmp_path), "exec"), names)
    code: CodeType = names["function"].__code__
    assert location(code, line) == shown
