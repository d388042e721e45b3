"""The names that the plugin knows, and that loading it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pluggy
import pytest

from polyxla_precision import BF16Mixed, BF16True, Full32, plugin
from polyxla_precision.policies import Policy


@pytest.mark.parametrize(
    ("asked", "kind", "name"),
    [
        ("32-true", Full32, "32-true"),
        ("32", Full32, "32-true"),
        ("bf16-mixed", BF16Mixed, "bf16-mixed"),
        ("bf16", BF16Mixed, "bf16-mixed"),
        ("16", BF16Mixed, "bf16-mixed"),
        ("bf16-true", BF16True, "bf16-true"),
    ],
)
def test_each_name_gives_its_policy(asked: str, kind: type[Policy], name: str) -> None:
    policy = plugin.polyxla_precision(asked)
    assert isinstance(policy, kind)
    assert policy.name == name


@pytest.mark.parametrize("asked", [name for name in plugin._POLICIES if name != "16"])
def test_only_16_describes_what_it_means(asked: str) -> None:
    policy = plugin.polyxla_precision(asked)
    assert policy is not None
    assert "means" not in policy.describe()
    sixteen = plugin.polyxla_precision("16")
    assert sixteen is not None
    assert "16 means bfloat16" in sixteen.describe()


@pytest.mark.parametrize("asked", ["16-mixed", "16-true", "fp16", "float16"])
def test_float16_is_refused_with_the_reason_and_an_alternative(asked: str) -> None:
    with pytest.raises(ValueError) as caught:
        plugin.polyxla_precision(asked)
    assert str(caught.value) == (
        f"{asked!r} is float16, which polyxla does not train in: small gradients become 0 unless the loss is "
        "scaled, and torch_xla has no gradient scaler; write precision='bf16-mixed'"
    )


@pytest.mark.parametrize("name", ["", "64-true", "int8", "32-TRUE", "bf16-true "])
def test_unknown_names_are_left_to_other_plugins(name: str) -> None:
    assert plugin.polyxla_precision(name) is None


def test_each_call_returns_a_new_policy() -> None:
    assert plugin.polyxla_precision("32") is not plugin.polyxla_precision("32")


def test_the_hook_is_marked_for_polyxla() -> None:
    manager = pluggy.PluginManager("polyxla")
    manager.register(plugin)
    assert [caller.name for caller in manager.get_hookcallers(plugin) or []] == ["polyxla_precision"]


def test_loading_it_imports_neither_torch_nor_polyxla() -> None:
    code = "import sys; import polyxla_precision.plugin; print(*{'torch', 'polyxla'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
