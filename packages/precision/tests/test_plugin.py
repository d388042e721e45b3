"""Which names this package answers to, and that asking costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pluggy
import pytest

from polyxla_precision import Full32, plugin


@pytest.mark.parametrize("name", ["32-true", "32"])
def test_full_precision_has_two_names(name: str) -> None:
    policy = plugin.polyxla_precision(name)
    assert isinstance(policy, Full32)
    assert policy.name == "32-true"


@pytest.mark.parametrize("name", ["", "16-true", "bf16", "32-TRUE"])
def test_other_names_are_left_to_other_plugins(name: str) -> None:
    assert plugin.polyxla_precision(name) is None


def test_each_caller_gets_its_own_policy() -> None:
    assert plugin.polyxla_precision("32") is not plugin.polyxla_precision("32")


def test_the_hook_carries_polyxlas_mark() -> None:
    manager = pluggy.PluginManager("polyxla")
    manager.register(plugin)
    assert [caller.name for caller in manager.get_hookcallers(plugin) or []] == ["polyxla_precision"]


def test_loading_it_imports_neither_torch_nor_polyxla() -> None:
    code = "import sys; import polyxla_precision.plugin; print(*{'torch', 'polyxla'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
