"""The argument names of Lightning's Trainer, of any version, are answered with ours; misspelt names too."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import lightning
import pytest
import torch

from polyxla import UsageError
from polyxla_training import Trainer
from polyxla_training.lightning.trainer_arguments import FIXES, METHOD_FIXES
from polyxla_training.options import TrainerOptions

OPTIONS = {option.name for option in fields(TrainerOptions) if option.init}


def test_every_argument_of_the_installed_lightning_is_an_option_or_is_answered() -> None:
    arguments = set(inspect.signature(lightning.Trainer).parameters)
    assert arguments <= OPTIONS | set(FIXES)
    assert not OPTIONS & set(FIXES)


@pytest.mark.parametrize("name", sorted(FIXES))
def test_the_answer_to_lightnings_argument_is_one_line_that_names_our_option(name: str) -> None:
    options: Any = {name: 1}
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    text = str(caught.value)
    assert text.startswith(f"{name} is Lightning's (from Trainer({name}=...)). ")
    assert "\n" not in text
    assert len(text) < 170
    # Each fix names options that exist; `reduce_fx` is an argument of self.log.
    assert set(re.findall(r"(\w+)=", FIXES[name])) <= OPTIONS | {"reduce_fx", "gradient_clip_algorithm"}


@pytest.mark.parametrize(("name", "value"), [("tpu_cores", 1), ("tpu_cores", [5]), ("num_processes", 4)])
def test_the_answer_has_the_devices_that_were_given(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert caught.value.fix == f"Write devices={value}."


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("max_epoch", "Write max_epochs=."),
        ("Max_epochs", "Write max_epochs=."),
        ("clipnorm", "Write clip_norm=."),
        ("accellerator_", "Write accelerator=."),
        ("gradient_clip_value", FIXES["gradient_clip_val"]),
        ("tpu_core", FIXES["tpu_cores"]),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(given: str, fix: str) -> None:
    options: Any = {given: 1}
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert str(caught.value) == f"there is no option {given!r} (from Trainer({given}=...)). {fix}"


def test_an_option_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(UsageError, match=r"Write one of accelerator, devices, precision, .*on_budget\.$"):
        Trainer(qqqq=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_every_argument_of_lightnings_methods_is_ours_or_is_answered(method: str) -> None:
    ours = set(inspect.signature(getattr(Trainer, method)).parameters)
    for name in inspect.signature(getattr(lightning.Trainer, method)).parameters:
        if name in ours:
            continue
        given: Any = {"module": torch.nn.Linear(1, 1), name: 1}
        with pytest.raises(UsageError) as caught:
            getattr(Trainer(), method)(**given)
        assert str(caught.value) == (
            f"{name} is Lightning's (from Trainer.{method}({name}=...)). {METHOD_FIXES[name]}"
        )


@pytest.mark.parametrize("strategy", ["tpu_spawn_debug", "xla_debug"])
def test_lightnings_debug_strategies_mean_debug(strategy: str) -> None:
    assert Trainer(strategy=strategy).strategy == "debug"


@pytest.mark.parametrize("strategy", ["deepspeed", "tpu_spawn", "xla"])
def test_other_strategies_are_refused_with_what_to_do(strategy: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(strategy=strategy)
    assert caught.value.fix == (
        "Leave it out: replicas, and how they start, come from devices= and the runtime."
    )
