"""HLO: reading and rewriting programs, checked with XLA's parser and printer."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from jaxlib import _jax, xla_client
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]
from jaxlib.mlir.dialects import stablehlo as current

from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import compile_request, hlo, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto, HloModuleProto, OpMetadata

ADD = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }"


def module(text: str) -> bytes:
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def scatter_of_three(channels: bool = True) -> bytes:
    shape = "(f32[2], f32[3], f32[1])"
    channel = "channel_id=3, use_global_device_ids=true, " if channels else ""
    return module(f"""HloModule lists, replica_count=2
    {ADD}
    ENTRY main {{
      x = f32[4] parameter(0) y = f32[6] parameter(1) z = f32[2] parameter(2)
      before = f32[4] all-reduce(x), {channel.replace("3", "9")}replica_groups={{{{0,1}}}}, to_apply=add
      r = {shape} reduce-scatter(before, y, z), {channel}replica_groups={{{{0,1}}}}, dimensions={{0}},
        to_apply=add
      second = f32[3] get-tuple-element(r), index=1
      ROOT t = (f32[3], {shape}) tuple(second, r)
    }}""")


def written(data: bytes) -> str:
    """Return a module's text; XLA checks it when it reads it."""
    text: str = HloModule.from_serialized_hlo_module_proto(data).to_string()
    return text


def test_a_reduce_scatter_of_several_operands_becomes_one_for_each() -> None:
    text = written(rewrite.for_jaxlib(scatter_of_three(), 2))
    found = re.findall(r"= (f32\[\d\]).*? reduce-scatter\(.*?channel_id=(\d+)", text)
    assert [shape for shape, _ in found] == ["f32[2]", "f32[3]", "f32[1]"]
    assert len({channel for _, channel in found} | {"9"}) == 4, "channels are distinct"
    assert text.count("use_global_device_ids=true") == 4, "fields that are not declared survive"
    assert re.search(r"ROOT .*tuple\(", text), "the root is still the root"


def test_no_channel_is_added_to_a_program_without_channels() -> None:
    text = written(rewrite.for_jaxlib(scatter_of_three(channels=False), 2))
    assert "channel_id" not in text


def test_an_all_to_all_of_one_part_becomes_that_part() -> None:
    data = module("""HloModule alone
    ENTRY main { x = f32[2] parameter(0) e = (f32[2]) all-to-all(x), replica_groups={{0}}
      ROOT r = f32[2] get-tuple-element(e), index=0 }""")
    text = written(rewrite.for_jaxlib(data, 2))
    assert "all-to-all" not in text.replace("%", "").split("get-tuple-element")[0]
    assert re.search(r"= \(f32\[2\]\S*\) tuple\(", text)


def test_other_programs_are_not_changed() -> None:
    data = module(f"HloModule plain\n{ADD}\nENTRY main {{ ROOT x = f32[2] parameter(0) }}")
    assert rewrite.for_jaxlib(data, 2) is data


def test_each_kind_of_collective_is_listed_once() -> None:
    assert hlo.collectives(scatter_of_three()) == ("all-reduce", "reduce-scatter")
    assert hlo.collectives(module("HloModule none\nENTRY main { ROOT x = f32[2] parameter(0) }")) == ()


@pytest.mark.parametrize(
    ("listed", "groups"),
    [
        pytest.param("{}", {()}, id="all"),
        pytest.param("{{0,2},{1,3}}", {(0, 2), (1, 3)}, id="listed"),
        pytest.param("[2,2]<=[4]", {(0, 1), (2, 3)}, id="formula"),
        pytest.param("[2,2]<=[2,2]T(1,0)", {(0, 2), (1, 3)}, id="formula, transposed"),
    ],
)
def test_the_groups_that_meet_in_a_program(listed: str, groups: set[tuple[int, ...]]) -> None:
    data = module(f"""HloModule groups, replica_count=4
    {ADD}
    ENTRY main {{ x = f32[] parameter(0)
      s = f32[] collective-permute(x), source_target_pairs={{{{0,1}}}}
      ROOT r = f32[] all-reduce(s), replica_groups={listed}, to_apply=add }}""")
    assert hlo.groups(data) == {frozenset(group) for group in groups}


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ("['a'=4,'b'=2] {'b'}", "01 23 45 67"),
        ("['a'=4,'b'=2] {'a'}", "0246 1357"),
        ("['a'=4,'b'=2] {'b','a'}", "02461357"),
        ("['a'=8,'b'=1] {'a','b'}", "01234567"),
        # Parts of an axis: after and up to a product of its sizes.
        ("['a'=8] {'a':(2)2}", "02 13 46 57"),
        ("['a'=8] {'a':(1)2,'a':(4)2}", "0145 2367"),
        ("['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "04 15 26 37"),
        ("['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'a'}", "7531 6420"),
    ],
)
def test_the_groups_along_the_axes_of_a_mesh(mesh: str, groups: str) -> None:
    members = len(groups.split(maxsplit=1)[0])
    data = module(f"""HloModule gathering, num_partitions=8
    ENTRY main {{ part = u32[] partition-id() mine = u32[1] reshape(part)
      ROOT every = u32[{members}] all-gather(mine), channel_id=1, replica_groups=mesh{mesh},
        dimensions={{0}}, use_global_device_ids=true }}""")
    (gather,) = (instruction for instruction in hlo.instructions(data) if instruction.opcode == "all-gather")
    listed = hlo.listed_groups(gather)
    assert ["".join(map(str, group)) for group in listed] == groups.split()
    # XLA loses the list of devices in StableHLO.
    if "device_ids" not in mesh:
        assert gathered_by_xla(data) == {tuple(group) for group in listed}


def gathered_by_xla(data: bytes) -> set[tuple[int, ...]]:
    """Run a program on eight devices of jaxlib, and return what they gather."""
    parsed = hlo.parse_module(data)
    for instruction in parsed.computations[0].instructions:
        # It is the program of one device, not to be divided.
        instruction.sharding.type = 4
    client = _jax.get_tfrt_cpu_client(asynchronous=False, num_devices=8)
    options = xla_client.CompileOptions()
    options.num_partitions = 8
    options.executable_build_options.use_spmd_partitioning = True
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(8, dtype=np.int32).reshape(1, 8))
    stablehlo = _jax.mlir.hlo_to_stablehlo(parsed.SerializeToString())
    loaded = client.compile_and_load(stablehlo, _jax.DeviceList(tuple(client.devices())), options)
    (parts,) = loaded.execute_sharded([]).disassemble_into_single_device_arrays()
    return {tuple(np.asarray(part).tolist()) for part in parts}


def test_donated_parameters_are_found() -> None:
    text = """HloModule give, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, must-alias) }
    ENTRY main { x = f32[2] parameter(0) y = f32[2] parameter(1) z = f32[2] parameter(2)
      a = f32[2] add(x, y) b = f32[2] add(x, z) ROOT t = (f32[2], f32[2]) tuple(a, b) }"""
    assert hlo.donated(module(text)) == {1, 2}
    assert hlo.donated(scatter_of_three()) == frozenset()


def test_results_of_one_array_of_a_tuple_and_of_none() -> None:
    one = module("HloModule one\nENTRY main { ROOT x = bf16[2,3] parameter(0) }")
    assert hlo.results(one) == [("bfloat16", (2, 3))]
    none = module("HloModule none\nENTRY main { ROOT t = () tuple() }")
    assert hlo.results(none) == []
    assert [dims for _, dims in hlo.results(module(NESTED))] == [(3,), (2,)]


NESTED = """HloModule two
ENTRY main { x = s32[3] parameter(0) y = u8[2] parameter(1) ROOT t = (s32[3], u8[2]) tuple(x, y) }"""


DOUBLING = b"""module @doubling { func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %y = stablehlo.add %x, %x : tensor<2xf32> return %y : tensor<2xf32> } }"""


def artifact(number: str, addition: bytes = b"add_v1") -> bytes:
    """Return the program as an artifact of a version, whose number is as long as 1.10.0."""
    made: bytes = _jax.mlir.serialize_portable_artifact(DOUBLING, "1.10.0")
    assert made.count(b"add_v1") == made.count(b"_v1.10.0") == 1
    return made.replace(b"_v1.10.0", f"_v{number}".encode()).replace(b"add_v1", addition)


@pytest.mark.parametrize("program", [DOUBLING, artifact("1.10.0"), artifact("1.99.0")])
def test_stablehlo_is_read_as_text_and_as_a_portable_artifact(program: bytes) -> None:
    data = compile_request.to_hlo(program)
    assert (hlo.module_name(data), hlo.results(data)) == ("doubling", [("float32", (2,))])


def test_an_operation_of_a_newer_stablehlo_is_refused_with_both_versions() -> None:
    ours = re.escape(current.get_current_version())
    with pytest.raises(PjrtError, match=rf"the program is StableHLO 1\.99\.0, .* up to {ours}: install"):
        compile_request.to_hlo(artifact("1.99.0", b"add_v7"))
    with pytest.raises(Exception, match=r"^INVALID_ARGUMENT: Failed to deserialize StableHLO"):
        compile_request.to_hlo(artifact("1.10.0", b"add_v7"))


def test_dynamic_shapes_are_refused() -> None:
    text = "HloModule grows\nENTRY main { ROOT x = f32[<=4] parameter(0) }"
    with pytest.raises(PjrtError, match=r"grows has an array whose size \(4,\) is only an upper bound"):
        hlo.results(module(text))


def all_reduce_of(*shapes: str) -> bytes:
    parameters = " ".join(f"p{i} = {shape} parameter({i})" for i, shape in enumerate(shapes))
    names, whole = ", ".join(f"p{i}" for i in range(len(shapes))), ", ".join(shapes)
    return module(f"""HloModule several, replica_count=2
    {ADD}
    ENTRY main {{ {parameters}
      r = ({whole}) all-reduce({names}), replica_groups={{{{0,1}}}}, to_apply=add
      last = {shapes[-1]} get-tuple-element(r), index={len(shapes) - 1}
      first = {shapes[0]} get-tuple-element(r), index=0
      ROOT t = ({shapes[-1]}, {shapes[0]}) tuple(last, first) }}""")


def reduced(text: str) -> str:
    """Return what a module's only all-reduce returns, without layouts."""
    (found,) = re.findall(r"= (.*?) all-reduce\(", text)
    return re.sub(r"\{[\d,]*\}", "", found)


@pytest.mark.parametrize(
    ("shapes", "becomes"),
    [
        (("f32[2,3]", "f32[]", "f32[0]", "f32[5]"), "f32[12]"),
        (("f32[2]", "bf16[4]", "f32[3]", "bf16[1]"), "(f32[5], bf16[5])"),
        (("f32[2]", "f32[600000]", "f32[3]"), "(f32[5], f32[600000])"),
        (("f32[2]", "bf16[4]"), "(f32[2], bf16[4])"),
        (("f32[600000]", "f32[600000]"), "(f32[600000], f32[600000])"),
    ],
)
def test_small_operands_of_an_all_reduce_are_packed(shapes: tuple[str, ...], becomes: str) -> None:
    data = all_reduce_of(*shapes)
    text = written(rewrite.for_jaxlib(data, 2))
    assert reduced(text) == becomes
    assert hlo.results(rewrite.for_jaxlib(data, 2)) == hlo.results(data)


def test_programs_that_differ_in_numbers_only_have_the_same_structure() -> None:
    def of(constant: int, operation: str, padding: str) -> bytes:
        return hlo.structure(
            module(f"""HloModule one
            ENTRY main {{ x = f32[2] parameter(0) k = f32[2] constant({{{constant}, 0}})
              s = f32[2] {operation}(x, k) z = f32[] constant(0)
              ROOT r = f32[4] pad(s, z), padding={padding} }}""")
        )

    assert of(1, "add", "2_0") == of(2, "add", "1_1")
    assert of(1, "add", "2_0") != of(1, "multiply", "2_0")


def test_the_stack_of_an_instruction_begins_with_its_innermost_frame() -> None:
    data = hlo.parse_module(module("HloModule one ENTRY main { ROOT x = f32[2] parameter(0) }"))
    index = data.stack_frame_index
    index.file_names.extend(["train.py", "linear.py"])
    index.file_locations.add(file_name_id=1, line=33)
    index.file_locations.add(file_name_id=2, line=7)
    index.stack_frames.add(file_location_id=1)
    index.stack_frames.add(file_location_id=2, parent_frame_id=1)
    (instruction,) = data.computations[0].instructions
    assert hlo.stacks(data.SerializeToString()) == {}
    instruction.metadata = OpMetadata(stack_frame_id=2).SerializeToString()
    assert hlo.stacks(data.SerializeToString()) == {instruction.name: [("linear.py", 7), ("train.py", 33)]}


def test_unused_ids_differ_from_all_in_the_half_that_xla_reads() -> None:
    whole = HloModuleProto()
    for number, ids in enumerate(([1, 2, 9], [1, 5])):
        instructions = [HloInstructionProto(id=(number << 32) + id_) for id_ in ids]
        whole.computations.add(id=number, instructions=instructions)
    assert list(itertools.islice(hlo.unused_ids(whole), 2)) == [10, 11]
    assert next(hlo.unused_ids(HloModuleProto())) == 1


def test_the_total_size_is_that_of_all_results() -> None:
    data = module("HloModule one ENTRY main { x = f32[2] parameter(0) ROOT r = f32[2] add(x, x) }")
    assert hlo.total_bytes(data) == 16
