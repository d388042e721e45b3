"""A misspelt variable is named, with the nearest variable that exists."""

from __future__ import annotations

import pytest

from polyxla.env import Setting
from polyxla.plugin import env
from polyxla.plugin_manager import PLUGINS, constants, unknown_variables
from polyxla.selection import select
from polyxla_testing import PluginInstaller

DECLARING = """
from polyxla import hookimpl
@hookimpl
def polyxla_variables():
    return {names}
"""
TOY = """
from polyxla import hookimpl
from polyxla.plugin import Claim, Device, Discovery
@hookimpl
def polyxla_discover_devices():
    return Discovery(Claim.FALLBACK, "a test", "TOY", (Device(0, "TOY", "toy"),))
"""


@pytest.fixture(autouse=True)
def _only_toy(install_plugin: PluginInstaller) -> None:
    install_plugin.hide_others()
    install_plugin("toy", TOY + DECLARING.format(names=["POLYXLA_TOY_SPEED"]))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("POLYXLA_DEVICE", "POLYXLA_DEVICES"),
        ("POLYXLA_RUNTIM", "POLYXLA_RUNTIME"),
        ("polyxla_devices", "POLYXLA_DEVICES"),
        ("POLYXLA_TOY_SPED", "POLYXLA_TOY_SPEED"),
        ("POLYXLA_ZZZZZZ", None),
    ],
)
def test_a_misspelt_variable_gets_the_nearest_name(name: str, near: str | None) -> None:
    (warning,) = unknown_variables({name: "4"})
    advice = f" Did you mean {near}?" if near else ""
    assert warning == f"{name} is not a variable of polyxla and has no effect.{advice}"


def test_variables_of_the_core_of_plugins_and_of_others_are_not_called_wrong(
    install_plugin: PluginInstaller,
) -> None:
    install_plugin("listener", DECLARING.format(names=["POLYXLA_LISTENER_FILE"]), group=PLUGINS)
    install_plugin("rival", DECLARING.format(names=["POLYXLA_RIVAL_PORT"]))
    install_plugin("broken", "import no_such_module")
    names = {*constants(env), "POLYXLA_LISTENER_FILE", "POLYXLA_RIVAL_PORT", "POLYXLA_TOY_SPEED"}
    others = {"XLA_FLAGS", "PJRT_DEVICE", "XRT_INI_PATH", "MY_POLYXLA_X"}
    assert "POLYXLA_WAIT_S" in names
    assert unknown_variables(dict.fromkeys(names | others, "1")) == ()


@pytest.mark.parametrize("runtime", [Setting(None, "default"), Setting("toy", "--runtime toy")])
def test_every_choice_of_a_runtime_carries_the_warning(runtime: Setting) -> None:
    (warning,) = select({"POLYXLA_DEVICE": "4"}, runtime).warnings
    assert warning.endswith("Did you mean POLYXLA_DEVICES?")
