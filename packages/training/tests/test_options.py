"""The options of a Trainer: one description, and errors for invalid values."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest

from polyxla import UsageError
from polyxla_training import Trainer
from polyxla_training.options import FitOptions, LaunchOptions, TrainerOptions


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param(
            {"strategy": "deepspeed"},
            "strategy='deepspeed' is not one of auto, debug, ddp, fsdp, zero1, tp-plan (from Trainer). "
            "Leave it out: replicas, and how they start, come from devices= and the runtime.",
            id="strategy",
        ),
        *(
            pytest.param(
                {name: value},
                f"{name}={value!r} is not a positive integer (from Trainer). Write {name}=1.",
                id=f"{name}-{value}",
            )
            for name in ("max_epochs", "max_steps", "log_every_n_steps")
            for value in (0, -1, 1.5, True, "2")
        ),
    ],
)
def test_an_invalid_value_is_refused_with_a_fix(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("accumulate", 0, "accumulate=0 is not a positive integer"),
        ("clip_norm", 0.0, "clip_norm=0.0 is not a positive number"),
        ("clip_value", "1", "clip_value='1' is not a positive number"),
        ("keep", 0, "keep=0 is not a positive integer"),
        ("compile_budget", -3, "compile_budget=-3 is not a number of programs, 0 or more"),
        ("prefetch", 4, "prefetch=4 is not a dictionary of options with positive integers"),
        ("prefetch", {"loader_prefetch_size": 0}, "with positive integers (from Trainer). Write prefetch={"),
        ("profile_steps", (3, 2), "profile_steps=(3, 2) is not a first and a last step"),
        ("checkpoint_dir", "moon://run", "'moon://run' is not a URL that fsspec knows"),
        ("log_dir", "moon://run", "Protocol not known: moon (from log_dir=). Write a local path, or a URL"),
        ("resume", "moon://run/step-1.safetensors", "is not a URL that fsspec knows"),
    ],
)
def test_an_invalid_option_is_refused_at_once(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**{option: value})
    assert said in str(caught.value)


OPTIONS = [option for option in fields(TrainerOptions) if option.init]


def test_every_option_is_described_once_and_help_shows_it() -> None:
    text = pydoc.plain(pydoc.render_doc(Trainer))
    for option in OPTIONS:
        assert len(re.findall(rf"^ [ |]+{option.name}: ", text, re.MULTILINE)) >= 1, option.name
    described = (LaunchOptions.__doc__ or "") + (FitOptions.__doc__ or "")
    assert re.findall(r"^        (\w+): ", inspect.cleandoc(described), re.MULTILINE) == []
    assert all(len(re.findall(rf"^ +{option.name}: ", described, re.MULTILINE)) == 1 for option in OPTIONS)


def test_the_first_five_options_may_be_positional_and_the_others_have_names() -> None:
    parameters = inspect.signature(Trainer).parameters
    positional = [
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["accelerator", "devices", "precision", "strategy", "max_epochs"]
    assert set(parameters) == {option.name for option in OPTIONS}
    trainer = Trainer("cpu", 2, "bf16", "debug", 3)
    assert (trainer.accelerator, trainer.devices, trainer.precision) == ("cpu", 2, "bf16")
    assert (trainer.strategy, trainer.max_epochs) == ("debug", 3)


@pytest.mark.parametrize(
    ("given", "steps", "interval"),
    [
        (None, float("inf"), 50),
        (None, 10_000, 50),
        (None, 499, 49),
        (None, 7, 1),
        (20, 7, 20),
        (100, 10_000, 100),
    ],
)
def test_values_are_read_more_often_in_a_short_training(
    given: int | None, steps: float, interval: int
) -> None:
    assert Trainer(log_every_n_steps=given).read_interval(steps) == interval


def test_an_option_cannot_be_changed_later() -> None:
    trainer = Trainer()
    with pytest.raises(FrozenInstanceError):
        trainer.max_epochs = 3  # type: ignore[misc]
    assert (trainer.metrics, trainer.outcome) == ({}, None)


def test_each_option_goes_to_launch_or_to_the_replicas() -> None:
    trainer = Trainer(devices=2, runtime="fake", seed=5, log_dir="auto")
    launch, fit = trainer.launch_options(), asdict(trainer.fit_options("runs/one"))
    assert not set(launch) & set(fit)
    assert set(launch) | set(fit) == {option.name for option in OPTIONS}
    assert (launch["devices"], launch["runtime"], fit["seed"]) == (2, "fake", 5)
    assert fit["log_dir"] == "runs/one"
