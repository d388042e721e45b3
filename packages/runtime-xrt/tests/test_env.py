"""The list of XRT variables is complete, and warnings distinguish misspelt from ignored ones."""

from __future__ import annotations

import pytest

from polyxla_xrt import env


def test_every_constant_equals_its_name_and_is_known() -> None:
    names = {name for name in vars(env) if name.startswith(("XRT_", "TPU_"))}
    assert names
    assert all(getattr(env, name) == name for name in names)
    # The other TPU variables are only set for replicas: they are not XRT variables.
    assert names - env.KNOWN == {name for name in names if name.startswith("TPU_")} - {env.TPU_NUM_DEVICES}
    assert env.KNOWN - set(env.WITHOUT_EFFECT) <= names


def test_variables_that_users_set_and_that_only_replicas_have_do_not_overlap() -> None:
    assert not set(env.READ) & {*env.ONLY_GIVEN, env.XRT_HOST_ORDINAL, *env.WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("XRT_TPU_CONFG", "XRT_TPU_CONFIG"),
        ("XRT_TPU_CONFIGS", "XRT_TPU_CONFIG"),
        ("xrt_tpu_config", "XRT_TPU_CONFIG"),
        ("XRT_WORKER", "XRT_WORKERS"),
        ("XRT_LOCALWORKER", "XRT_LOCAL_WORKER"),
        ("XRT_MESH_SERVICE_ADDR", "XRT_MESH_SERVICE_ADDRESS"),
        ("XRT_GRPC_MULTI_STREAM", "XRT_GRPC_MULTISTREAM"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(name: str, near: str) -> None:
    assert env.warnings({name: "1"}) == (
        f"{name} is not an XRT variable and has no effect. Did you mean {near}?",
    )


def test_an_unknown_name_without_a_similar_one_gets_no_suggestion() -> None:
    assert env.warnings({"XRT_ZZZZZZZZZZZ": ""}) == (
        "XRT_ZZZZZZZZZZZ is not an XRT variable and has no effect.",
    )


@pytest.mark.parametrize("name", env.WITHOUT_EFFECT)
def test_a_warning_about_an_ignored_variable_gives_the_reason(name: str) -> None:
    assert env.warnings({name: "1"}) == (f"{name} has no effect: {env.WITHOUT_EFFECT[name]}.",)


def test_valid_and_unrelated_variables_get_no_warning() -> None:
    known = dict.fromkeys(env.KNOWN - set(env.WITHOUT_EFFECT), "1")
    assert env.warnings({**known, "PATH": "/bin", "TPU_NAME": "node", "MY_XRT_FLAG": "1"}) == ()


def test_warnings_are_sorted_by_name() -> None:
    found = env.warnings({"XRT_TPU_CONFG": "", "XRT_GRPC_COMPRESSION": "", "XRT_ABCDEFGHIJK": ""})
    assert [warning.split()[0] for warning in found] == [
        "XRT_ABCDEFGHIJK",
        "XRT_GRPC_COMPRESSION",
        "XRT_TPU_CONFG",
    ]
