"""Settings know their origin; a temporary environment is restored."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from polyxla import UsageError
from polyxla.env import Setting, from_environ
from polyxla.plugin import env

EVERYTHING = {
    "POLYXLA_RUNTIME": "xrt",
    "POLYXLA_DEVICES": "8",
    "POLYXLA_PRECISION": "32-true",
    "POLYXLA_WAIT_S": "60",
}


@pytest.mark.parametrize(
    ("field", "name", "default"),
    [
        pytest.param("runtime", env.POLYXLA_RUNTIME, None, id="runtime"),
        pytest.param("devices", env.POLYXLA_DEVICES, "auto", id="devices"),
        pytest.param("precision", env.POLYXLA_PRECISION, None, id="precision"),
        pytest.param("wait_s", env.POLYXLA_WAIT_S, "0", id="wait"),
    ],
)
def test_arguments_win_over_the_environment_and_the_environment_over_defaults(
    field: str, name: str, default: str | None
) -> None:
    passed = Setting("mine", f"--{field} mine")
    assert getattr(from_environ(EVERYTHING, **{field: passed}), field) == passed
    assert getattr(from_environ(EVERYTHING), field) == Setting(EVERYTHING[name], f"{name}={EVERYTHING[name]}")
    assert getattr(from_environ({}), field) == Setting(default, "default")
    assert getattr(from_environ({name: ""}), field) == Setting(default, "default"), (
        "empty is as good as unset"
    )


def test_settings_are_independent_of_each_other() -> None:
    settings = from_environ({}, devices=Setting(2, "devices=2"))
    assert (settings.runtime.value, settings.devices.value, settings.precision.value) == (None, 2, None)


def test_a_snapshot_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYXLA_TEST", "before")
    copied = env.snapshot()
    copied["POLYXLA_TEST"] = "changed"
    assert os.environ["POLYXLA_TEST"] == "before"


@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["returns", "raises"])
def test_a_temporary_environment_is_restored(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYXLA_TEST_KEPT", "before")
    monkeypatch.setenv("POLYXLA_TEST_GONE", "before")
    before = dict(os.environ)
    without = {name: value for name, value in before.items() if name != "POLYXLA_TEST_GONE"}
    with (
        contextlib.nullcontext() if error is None else pytest.raises(error),
        env.temporary_environ({**without, "POLYXLA_TEST_KEPT": "temporary", "POLYXLA_TEST_NEW": "temporary"}),
    ):
        assert os.environ["POLYXLA_TEST_KEPT"] == os.environ["POLYXLA_TEST_NEW"] == "temporary"
        assert "POLYXLA_TEST_GONE" not in os.environ
        os.environ["POLYXLA_TEST_NEW"] = os.environ["POLYXLA_TEST_GONE"] = "changed by the replica"
        if error is not None:
            raise error
    assert dict(os.environ) == before


def test_a_snapshot_survives_a_variable_that_a_thread_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(dict[str, str]):
        """Lists a variable that is gone when it is read, as another thread may remove it in between."""

        def __iter__(self) -> Iterator[str]:
            names = list(super().__iter__())
            self.pop("REMOVED", None)
            return iter(names)

        def keys(self) -> Any:
            return list(self)

    monkeypatch.setattr(os, "environ", Changing(KEPT="yes", REMOVED="soon"))
    assert env.snapshot() == {"KEPT": "yes"}


@pytest.mark.parametrize("text", ["yes", "[1]", '{"POLYXLA_DEVICES=4": 4}'], ids=["text", "list", "number"])
def test_origins_that_polyxla_run_has_not_written_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="POLYXLA_RUN is not a JSON object of texts") as caught:
        from_environ({"POLYXLA_DEVICES": "4", "POLYXLA_RUN": text})
    assert f"POLYXLA_RUN={text}" in str(caught.value)
    assert from_environ({"POLYXLA_RUN": text}).devices.value == "auto", "nothing asks for an origin"


def test_an_empty_list_of_origins_names_the_variables() -> None:
    for text in ("", "{}"):
        assert (
            from_environ({"POLYXLA_DEVICES": "4", "POLYXLA_RUN": text}).devices.origin == "POLYXLA_DEVICES=4"
        )
