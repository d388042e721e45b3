"""How a program takes its arguments, rewritten for jaxlib, and checked with XLA's parser and printer."""

from __future__ import annotations

import re

import pytest
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.programs import arguments, hlo

PACKED = """HloModule packed, input_output_alias={ {1}: (0, {2}, may-alias) }, buffer_donor={ (0, {0}) }
ENTRY main {
  in = (f32[4], f32[], f32[2]) parameter(0), sharding={{devices=[2]<=[2]}, {replicated}, {replicated}}
  c = f32[2] get-tuple-element(in), index=2
  a = f32[4] get-tuple-element(in), index=0
  b = f32[] get-tuple-element(in), index=1
  ROOT t = (f32[4], f32[2], f32[]) tuple(a, c, b) }"""


def module(text: str) -> bytes:
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def written(data: bytes) -> str:
    """Return a module's text; XLA checks it when it reads it."""
    text: str = HloModule.from_serialized_hlo_module_proto(data).to_string()
    return text


def aliases(data: bytes) -> set[tuple[tuple[int, ...], int]]:
    """Return which result takes the memory of which argument."""
    entries = hlo.parse_module(data).input_output_alias.entries
    return {(tuple(entry.output_shape_index), entry.parameter_number) for entry in entries}


def donating(results: str, donors: str) -> bytes:
    return module(f"""HloModule give, buffer_donor={{ {donors} }}
    ENTRY main {{ x = f32[2] parameter(0) y = f32[3] parameter(1) z = f32[2] parameter(2)
      a = f32[2] add(x, z) b = f32[3] negate(y) c = f32[2] multiply(x, z) {results} }}""")


def test_a_tuple_of_all_arguments_becomes_one_parameter_for_each() -> None:
    data = arguments.for_jaxlib(module(PACKED), is_partitioned=True)
    text = written(data)
    found = re.findall(r"= (f32\[\d*\])\S* parameter\((\d)\), sharding=(\{.*\})", text)
    replicated = "{replicated}"
    assert sorted(found, key=lambda pair: pair[1]) == [
        ("f32[4]", "0", "{devices=[2]<=[2]}"),
        ("f32[]", "1", replicated),
        ("f32[2]", "2", replicated),
    ]
    assert "get-tuple-element" not in text
    assert [dims for _, dims in hlo.parameters(data)] == [(4,), (), (2,)]
    assert aliases(data) == {((1,), 2)}


def test_the_elements_of_a_tuple_may_be_donors() -> None:
    data = arguments.for_jaxlib(module(PACKED), is_partitioned=False)
    assert aliases(data) == {((0,), 0), ((1,), 2)}


@pytest.mark.parametrize(
    ("results", "donors", "pairs"),
    [
        ("ROOT t = (f32[3], f32[2]) tuple(b, a)", "(0, {}), (1, {})", {((1,), 0), ((0,), 1)}),
        ("ROOT t = (f32[2], f32[2]) tuple(a, c)", "(0, {}), (2, {})", {((0,), 0), ((1,), 2)}),
        ("ROOT t = (f32[2], f32[3]) tuple(a, b)", "(0, {}), (2, {})", {((0,), 0)}),
        ("ROOT t = (f32[2]) tuple(a)", "(0, {}), (1, {})", {((), 0)}),
        ("ROOT n = f32[2] negate(a)", "(2, {})", {((), 2)}),
    ],
    ids=["by shape", "two", "more donors than results", "a tuple of one", "one array"],
)
def test_a_donor_gives_its_memory_to_a_result_of_its_shape(
    results: str, donors: str, pairs: set[tuple[tuple[int, ...], int]]
) -> None:
    data = donating(results, donors)
    assert aliases(arguments.for_jaxlib(data, is_partitioned=False)) == pairs
    assert arguments.for_jaxlib(data, is_partitioned=True) is data


def test_other_programs_are_not_changed() -> None:
    data = module("HloModule plain\nENTRY main { ROOT x = f32[2] parameter(0) }")
    assert arguments.for_jaxlib(data, is_partitioned=False) is data


SHARDED = """HloModule sharded
ENTRY main {
  x = f32[4] parameter(0), sharding={devices=[2]<=[2]}
  y = f32[4] negate(x)
  whole = f32[4] custom-call(x), custom_call_target="Sharding", sharding={replicated}
  parts = f32[4] custom-call(y), custom_call_target="Sharding", sharding={devices=[2]<=[2]}
  ROOT t = (f32[4], f32[4], f32[4]) tuple(whole, y, parts) }"""


def test_xla_may_choose_the_sharding_of_a_result_only_if_the_user_has_not() -> None:
    data, may_choose = arguments.keep_result_shardings(module(SHARDED))
    assert may_choose == [False, True, False]
    root = next(line for line in written(data).splitlines() if "ROOT" in line)
    assert "sharding={{replicated}, {replicated}, {devices=[2]<=[2]}}" in root


@pytest.mark.parametrize(
    "text",
    [
        SHARDED.replace("tuple(whole, y, parts)", "tuple(x, y, y)"),
        SHARDED.replace("parts)", "parts), sharding={{replicated}, {replicated}, {replicated}}"),
    ],
    ids=["without shardings", "JAX's"],
)
def test_other_programs_keep_their_results(text: str) -> None:
    data = module(text)
    assert arguments.keep_result_shardings(data) == (data, [])
