"""Numbers and flags are parsed strictly: an invalid one is never read as 0."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla_xrt.config.variables import Variable, find, parse_integer, read_count, read_flag


@pytest.mark.parametrize(
    ("text", "found"), [("x", "x"), (" x\n", "x"), ("", None), ("  ", None), (None, None)]
)
def test_an_empty_variable_counts_as_unset(text: str | None, found: str | None) -> None:
    variable = find({} if text is None else {"A": text}, "A")
    assert variable == (Variable("A", found) if found else None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("999999999", 999_999_999),
        ("1000000000", None),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        ("1_0", None),
        ("8x", None),
        ("٣", None),
        ("²", None),
    ],
)
def test_parse_integer(text: str, number: int | None) -> None:
    assert parse_integer(text) == number


@pytest.mark.parametrize(
    ("text", "least", "count"), [("1", 1, 1), ("0", 0, 0), ("0", 1, None), ("-1", 0, None), ("abc", 0, None)]
)
def test_read_count_checks_the_minimum(text: str, least: int, count: int | None) -> None:
    variable = Variable("XRT_SHARD_WORLD_SIZE", text)
    if count is not None:
        assert read_count(variable, "the number of hosts", least) == count
        return
    with pytest.raises(UsageError) as wrong:
        read_count(variable, "the number of hosts", least)
    assert str(wrong.value) == (
        f"{text!r} is not an integer of at least {least} (from XRT_SHARD_WORLD_SIZE={text}). "
        "Write the number of hosts, or unset it."
    )


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("0", False), ("true", True), ("False", False)])
def test_read_flag(text: str, flag: bool) -> None:
    assert read_flag(Variable("A", text)) is flag


@pytest.mark.parametrize("text", ["yes", "2", "-1", "on"])
def test_an_invalid_flag_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=rf"'{text}' is neither true nor false \(from A={text}\)"):
        read_flag(Variable("A", text))
