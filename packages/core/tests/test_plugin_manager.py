"""Plugins are found by name and loaded separately; a broken one is reported and the others work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pluggy
import pytest

from polyxla import (
    BrokenPluginError,
    RuntimeNotInstalledError,
    UnknownRuntimeError,
    UsageError,
    hookimpl,
    plugin_manager,
)
from polyxla.console import say_once
from polyxla.entry_points import entry_points
from polyxla.plugin_manager import (
    HOOKSPECS,
    PLUGINS,
    RUNTIMES,
    find_runtime,
    load_everything,
    load_plugins,
    load_runtime,
    plugin_problems,
    runtime_entries,
)
from polyxla_testing import PluginInstaller

PROGRAMS = Path(__file__).parent / "programs"
TOY = (PROGRAMS / "unclaimed_runtime.py").read_text()
MISSPELT = (PROGRAMS / "misspelt_plugin.py").read_text()
WRONG_ARGUMENT = (PROGRAMS / "wrong_argument_plugin.py").read_text()


COMMAND = (PROGRAMS / "command_plugin.py").read_text()
MOON_HOOKSPECS = (PROGRAMS / "moon_hookspecs.py").read_text()
MOON_LISTENER = (PROGRAMS / "moon_listener.py").read_text()


def _names(manager: pluggy.PluginManager) -> list[str]:
    return sorted(name for name, _ in manager.list_name_plugin())


@pytest.fixture(autouse=True)
def _alone(install_plugin: PluginInstaller) -> None:
    install_plugin.hide_others()
    say_once.cache_clear()


def test_runtimes_are_listed_by_name_and_not_imported(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-b", "raise ImportError('must not be imported for a listing')")
    install_plugin("toy-a", TOY)
    entries = runtime_entries()
    assert list(entries) == ["toy-a", "toy-b"]
    assert (entries["toy-a"].distribution, entries["toy-a"].version) == ("toy-a", "1.0")


def test_a_runtime_is_found_by_its_name(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-distribution", TOY, name="toy")
    assert find_runtime("toy", "test").distribution == "toy-distribution"


def test_loading_a_runtime_imports_no_other_runtime(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", TOY)
    install_plugin("broken", "raise RuntimeError('imported')")
    manager = load_runtime(find_runtime("toy", "test"))
    assert len(manager.get_plugins()) == 1
    assert manager.hook.polyxla_discover_devices(environ={}, accelerator="auto")[0].reason == "never"


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        pytest.param(
            "xrt",
            RuntimeNotInstalledError,
            "runtime 'xrt' is not installed (installed: toy) (from --runtime). "
            "Install it: pip install ./packages/bridge ./packages/runtime-xrt",
            id="known-but-missing",
        ),
        pytest.param(
            "pjrt",
            RuntimeNotInstalledError,
            "runtime 'pjrt' is not installed (installed: toy) (from --runtime). "
            "Install it: pip install ./packages/runtime-pjrt",
            id="the-other-known-one",
        ),
        pytest.param(
            "xtr",
            UnknownRuntimeError,
            "no runtime is called 'xtr' (installed: toy) (from --runtime). Did you mean 'xrt'?",
            id="near-a-known-one",
        ),
        pytest.param(
            "PJRT",
            UnknownRuntimeError,
            "no runtime is called 'PJRT' (installed: toy) (from --runtime). Did you mean 'pjrt'?",
            id="capitals",
        ),
        pytest.param(
            "toi",
            UnknownRuntimeError,
            "no runtime is called 'toi' (installed: toy) (from --runtime). Did you mean 'toy'?",
            id="near-an-installed-one",
        ),
        pytest.param(
            "horovod",
            UnknownRuntimeError,
            "no runtime is called 'horovod' (installed: toy) (from --runtime). "
            "`polyxla runtimes` lists the installed runtimes.",
            id="near-none",
        ),
    ],
)
def test_a_missing_runtime_is_an_error_that_says_what_to_do(
    name: str, kind: type[UsageError], text: str, install_plugin: PluginInstaller
) -> None:
    install_plugin("toy", TOY)
    with pytest.raises(kind) as caught:
        find_runtime(name, "--runtime")
    assert str(caught.value) == text
    assert type(caught.value) is kind
    assert caught.value.exit_code == 2


def test_the_error_says_that_no_runtime_is_installed() -> None:
    with pytest.raises(RuntimeNotInstalledError, match=r"'xrt' is not installed \(installed: none\)"):
        find_runtime("xrt", "--runtime")


@pytest.mark.parametrize("exception", ["ImportError", "SyntaxError", "RuntimeError", "AttributeError"])
def test_a_runtime_that_fails_on_import_is_named_with_its_distribution(
    exception: str, install_plugin: PluginInstaller
) -> None:
    install_plugin("toy", f"raise {exception}('the reason')")
    with pytest.raises(BrokenPluginError) as caught:
        find_runtime("toy", "test").load()
    assert str(caught.value) == (
        f"runtime 'toy' cannot be imported: {exception}: the reason (from toy of toy). "
        "Repair or remove it: pip install --force-reinstall toy"
    )


def test_two_runtimes_with_one_name_are_refused(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-b", TOY, name="toy")
    install_plugin("toy-a", TOY, name="toy")
    assert list(runtime_entries()) == ["toy"]
    with pytest.raises(BrokenPluginError) as caught:
        find_runtime("toy", "test").load()
    assert str(caught.value) == (
        "runtime 'toy' is provided by more than one distribution: toy-a, toy-b "
        "(from entry-point group polyxla.runtimes). Uninstall all but one of them."
    )


def test_two_plugins_with_one_name_are_refused(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", TOY)
    install_plugin("extra-a", "", group=PLUGINS, name="extra")
    install_plugin("extra-b", "", group=PLUGINS, name="extra")
    text = (
        "plugin 'extra' is registered already (from extra-b). "
        "If two plugins have this name, uninstall one; add each listener only once."
    )
    with pytest.raises(BrokenPluginError) as caught:
        load_plugins("toy")
    assert str(caught.value) == text
    assert plugin_problems() == [text]


def test_a_runtime_and_a_plugin_may_have_one_name(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-runtime", TOY, name="toy")
    install_plugin("toy-extra", "", group=PLUGINS, name="toy")
    assert _names(load_plugins("toy")) == ["plugin 'toy'", "runtime 'toy'"]
    assert plugin_problems() == []


def test_a_distribution_that_is_on_the_path_twice_counts_once(
    install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("toy", TOY)
    once = entry_points(RUNTIMES)
    monkeypatch.setattr(plugin_manager, "entry_points", lambda _: [*once, *once])
    assert len(runtime_entries()["toy"].points) == 1


@pytest.mark.parametrize(
    ("code", "complaint", "fix"),
    [
        pytest.param(
            MISSPELT,
            "unknown hook 'polyxla_step_finishd'",
            "Did you mean 'polyxla_step_finished'?",
            id="misspelt",
        ),
        pytest.param(
            MISSPELT.replace("polyxla_step_finishd", "zzz"),
            "zzz",
            "The hooks are: polyxla_add_commands, polyxla_discover_devices, ",
            id="not-near-any",
        ),
        pytest.param(
            WRONG_ARGUMENT,
            "{'stepp'} are declared in the hookimpl but can not be found in the hookspec",
            "Take only arguments that the hook spec has.",
            id="argument",
        ),
    ],
)
@pytest.mark.parametrize("group", [RUNTIMES, PLUGINS])
def test_a_plugin_that_does_not_match_the_hook_specs_is_refused(
    group: str, code: str, complaint: str, fix: str, install_plugin: PluginInstaller
) -> None:
    what = {RUNTIMES: "runtime 'odd'", PLUGINS: "plugin 'odd'"}[group]
    install_plugin("toy", TOY)
    install_plugin("odd", code, group=group)
    with pytest.raises(BrokenPluginError) as caught:
        load_plugins("odd" if group == RUNTIMES else "toy")
    assert str(caught.value).startswith(f"{what} does not match polyxla's hooks: ")
    assert complaint in caught.value.what
    assert caught.value.where == "odd"
    assert caught.value.fix.startswith(fix)


def test_a_plugin_that_fails_on_import_is_left_out_and_reported_once(
    install_plugin: PluginInstaller, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin("toy", TOY)
    install_plugin.listener("broken", "raise ImportError('no such thing')")
    install_plugin.listener("works", "")
    assert _names(load_plugins("toy")) == ["plugin 'works'", "runtime 'toy'"]
    said = "plugin 'broken' cannot be imported: ImportError: no such thing (from broken of broken)."
    assert capsys.readouterr().err.startswith(f"polyxla: left out: {said}")
    load_plugins("toy")
    assert capsys.readouterr().err == "", "reported once, however many replicas load the plugins"
    assert [problem.startswith(said) for problem in plugin_problems()] == [True]


def test_the_command_line_silently_leaves_out_plugins_that_do_not_load(
    install_plugin: PluginInstaller, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin("a-toy", COMMAND)
    install_plugin("b-broken", "raise RuntimeError")
    install_plugin.listener("c-odd", MISSPELT + COMMAND)
    install_plugin.listener("d-works", COMMAND)
    commands: list[str] = []
    load_everything().hook.polyxla_add_commands(app=commands)
    assert sorted(commands) == ["a_toy", "d_works"]
    assert capsys.readouterr() == ("", "")


def test_each_problem_is_blamed_on_its_own_plugin(install_plugin: PluginInstaller) -> None:
    install_plugin.listener("a-odd", MISSPELT)
    install_plugin.listener("b-works", "")
    install_plugin.listener("c-broken", "raise OSError('disk')")
    first, second = plugin_problems()
    assert first.startswith(
        "plugin 'a-odd' does not match polyxla's hooks: unknown hook 'polyxla_step_finishd'"
    )
    assert second.startswith("plugin 'c-broken' cannot be imported: OSError: disk")


class _Listener:
    @hookimpl
    def polyxla_step_finished(self, step: int) -> None:
        pass


class _Misspelt:
    @hookimpl
    def polyxla_stepfinished(self, step: int) -> None:
        pass


class _WrongArgument:
    @hookimpl
    def polyxla_step_finished(self, stepp: int) -> None:
        pass


def test_each_listener_is_registered_only_once(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", TOY)
    manager = load_plugins("toy")
    listener = _Listener()
    before = len(manager.get_plugins())
    manager.register(listener)
    manager.register(_Listener())
    assert len(manager.get_plugins()) == before + 2
    with pytest.raises(BrokenPluginError, match="listener '_Listener' is registered already"):
        manager.register(listener)


def test_a_misspelt_listener_is_refused(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", TOY)
    manager: Any = load_plugins("toy")
    with pytest.raises(BrokenPluginError) as caught:
        manager.register(_Misspelt())
    assert "unknown hook 'polyxla_stepfinished'" in str(caught.value)
    assert str(caught.value).endswith("Did you mean 'polyxla_step_finished'?")


def test_a_refused_plugin_is_not_registered(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", TOY)
    manager = load_plugins("toy")
    before = _names(manager)
    for refused in (_Misspelt(), _WrongArgument()):
        with pytest.raises(BrokenPluginError, match=f"listener '{type(refused).__name__}' does not match"):
            manager.register(refused)
    assert _names(manager) == before
    assert manager.register(_Listener()) is not None, "the next plugin is not blamed for the refused one"


class TestThirdPartyHookspecs:
    def test_another_distributions_listener_receives_the_events(
        self, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("toy", TOY)
        install_plugin("moon", MOON_HOOKSPECS, group=HOOKSPECS)
        install_plugin.listener("moon-watcher", MOON_LISTENER)
        assert load_plugins("toy").hook.moon_rises(phase="full") == ["received full"]
        assert plugin_problems() == []

    def test_a_misspelt_hook_gets_its_nearest_name(self, install_plugin: PluginInstaller) -> None:
        install_plugin("moon", MOON_HOOKSPECS, group=HOOKSPECS)
        install_plugin.listener("moon-watcher", MOON_LISTENER.replace("moon_rises", "moon_rise"))
        [problem] = plugin_problems()
        assert problem.startswith(
            "plugin 'moon-watcher' does not match polyxla's hooks: unknown hook 'moon_rise'"
        )
        assert problem.endswith("(from moon-watcher). Did you mean 'moon_rises'?")

    def test_without_its_hookspecs_a_listener_is_refused(self, install_plugin: PluginInstaller) -> None:
        install_plugin.listener("moon-watcher", MOON_LISTENER)
        [problem] = plugin_problems()
        assert "unknown hook 'moon_rises'" in problem

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            pytest.param(
                "raise ImportError('no cheese')",
                "the module of hook specs 'moon' cannot be imported: ImportError: no cheese (from moon_specs "
                "of moon-specs). Repair or remove it: pip install --force-reinstall moon-specs",
                id="import-error",
            ),
            pytest.param(
                "",
                "the module of hook specs 'moon' cannot be used: did not find any 'polyxla' hooks in ",
                id="no-hook",
            ),
            pytest.param(
                MOON_HOOKSPECS.replace("moon_rises", "polyxla_launch"),
                "the module of hook specs 'moon' cannot be used: Hook 'polyxla_launch' is already registered",
                id="polyxlas-hook",
            ),
        ],
    )
    def test_a_broken_module_is_an_error_that_names_its_distribution(
        self, code: str, text: str, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("toy", TOY)
        install_plugin("moon-specs", code, group=HOOKSPECS, name="moon")
        with pytest.raises(BrokenPluginError) as caught:
            load_plugins("toy")
        assert str(caught.value).startswith(text)
        assert caught.value.where == "moon_specs of moon-specs"
        with pytest.raises(BrokenPluginError, match="moon_specs of moon-specs"):
            load_everything()
        assert plugin_problems() == [str(caught.value)]
