"""What each device computes in a partitioned program. Importing this module imports jax.

XLA's compiler first divides a program among its devices, and can write down what it then has. As the program
of a replica, this is compiled like any other: its collectives go through shared memory, its convolutions are
torch's. A program without shardings, such as TorchTPU's, is that of one device already.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import _jax, xla_client

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.expansions import cpu
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import arguments, hlo, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import HloModuleProtoWithConfig, OpSharding

_DIVIDING = "spmd-partitioning"
"""The compiler's pass. Source: SpmdPartitioner in xla/service/spmd/spmd_partitioner.h."""
_NOBODYS = "polyxla_end"
"""A function that no library has. The compiler ends where it looks for it: before it makes machine code."""
_OF_REPLICAS = ("all-gather", "all-reduce", "reduce-scatter")
"""Collectives whose groups are of replicas, all partitions of each, unless they name devices."""
_GROUPS = (
    "collective_device_list",
    "iota_collective_device_list",
    "mesh_axes_replica_group_list",
    "replica_groups",
)
_MANUAL = xla_client.HloSharding.manual().to_proto().SerializeToString()


def divided(module: bytes, options: Any, compile_: Callable[[Any, Any], Any]) -> tuple[bytes, bytes]:
    """Return what one device computes in a partitioned program, as the program of a replica.

    Args:
        module: a serialised HloModuleProto.
        options: jaxlib's options for it; they become those for the result.
        compile_: compiles StableHLO with options.

    Returns:
        A serialised HloModuleProto, of as many replicas as `module` has partitions; and another that has only
        the shardings of arguments and results, for which the framework asks.

    Raises:
        PjrtError: the program has several replicas, too.
        Exception: XLA cannot divide the program.
    """
    name, replicas, partitions = hlo.module_name(module), options.num_replicas, options.num_partitions
    if replicas > 1:
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"{name} has {replicas} replicas of {partitions} partitions; only one of the two may be above 1",
        )
    code = arguments.for_jaxlib(module, is_partitioned=True)
    result = hlo.parse_module(code)
    if rewrite.has_shardings(code, result):
        donors = result.buffer_donor
        code, may_choose = arguments.keep_result_shardings(cpu.rewritten(code, partitions, replicas))
        if may_choose:
            options.executable_build_options.allow_spmd_sharding_propagation_to_output = may_choose
        result = _written_by_compiler(code, options, compile_)
        result.name = name
        # XLA took the program as StableHLO, which has no donors.
        result.buffer_donor.CopyFrom(donors)
    else:
        _say_whole(result)
    _give_to_replicas(options)
    _make_replicas(result, partitions)
    shardings = Module(
        spmd_output_sharding=result.spmd_output_sharding,
        spmd_parameters_shardings=result.spmd_parameters_shardings,
    )
    for field in ("spmd_output_sharding", "spmd_parameters_shardings"):
        result.ClearField(field)
    return result.SerializeToString(), shardings.SerializeToString()


def _say_whole(parsed: Module) -> None:
    """Add the shardings of arrays that are not divided; torch_xla reads them even if there are none."""
    whole, shapes = OpSharding(), parsed.host_program_shape
    parsed.spmd_parameters_shardings.extend(whole for _ in shapes.parameters)
    parsed.spmd_output_sharding.CopyFrom(whole)
    if shapes.result.element_type == hlo.TUPLE:
        parsed.spmd_output_sharding.type = arguments.TUPLE_SHARDING
        parsed.spmd_output_sharding.tuple_shardings.extend(whole for _ in shapes.result.tuple_shapes)


def _written_by_compiler(code: bytes, options: Any, compile_: Callable[[Any, Any], Any]) -> Module:
    """Return the program as it is once the compiler has divided it."""
    own_options = list(options.env_option_overrides)
    with tempfile.TemporaryDirectory(prefix="polyxla-partitioning-") as folder:
        options.env_option_overrides = [
            *own_options,
            ("xla_dump_to", folder),
            ("xla_dump_hlo_module_re", ".*"),
            ("xla_dump_hlo_pass_re", _DIVIDING),
            ("xla_dump_hlo_as_proto", True),
            ("xla_dump_compress_protos", False),
            # The machine code is not used.
            ("xla_backend_optimization_level", 0),
        ]
        try:
            # For Shardy, the call would need a mesh.
            ending = code if options.executable_build_options.use_shardy_partitioner else _ending(code)
            compile_(_jax.mlir.hlo_to_stablehlo(ending), options)
        except Exception:
            if not _written(folder):
                raise
        finally:
            options.env_option_overrides = own_options
        (path,) = _written(folder)
        return HloModuleProtoWithConfig.FromString(path.read_bytes()).hlo_module


def _give_to_replicas(options: Any) -> None:
    """Let options for partitions be those for as many replicas, on the same devices."""
    partitions, build = options.num_partitions, options.executable_build_options
    ids = np.array(hlo.assigned_devices(options.device_assignment.serialize()), np.int32)
    options.device_assignment = xla_client.DeviceAssignment.create(ids.reshape(partitions, 1))
    options.num_replicas = build.num_replicas = partitions
    options.num_partitions = build.num_partitions = 1
    build.use_spmd_partitioning = build.use_shardy_partitioner = False
    build.allow_spmd_sharding_propagation_to_parameters = [False]
    build.allow_spmd_sharding_propagation_to_output = [False]


def _written(folder: str) -> list[Path]:
    return list(Path(folder).glob(f"*.after_{_DIVIDING}.*.pb"))


def _ending(module: bytes) -> bytes:
    """Return a program that calls a function that nobody has."""
    parsed = hlo.parse_module(module)
    entry = hlo.entry_of(parsed)
    call = entry.instructions.add(name="end", opcode="custom-call", custom_call_target=_NOBODYS)
    call.id = next(hlo.unused_ids(parsed))
    call.shape.element_type = hlo.F32
    call.custom_call_has_side_effect = True
    call.custom_call_api_version = 1
    call.sharding.ParseFromString(_MANUAL)
    return parsed.SerializeToString()


def _make_replicas(parsed: Module, count: int) -> None:
    """Let each instruction that names partitions name replicas, of which each computes a partition."""
    for computation in parsed.computations:
        kept = [each for each in computation.instructions if each.custom_call_target != _NOBODYS]
        for instruction in kept:
            instruction.ClearField("sharding")
            if instruction.opcode == "partition-id":
                instruction.opcode = "replica-id"
            elif instruction.opcode == "replica-id":
                # The program had one.
                instruction.opcode = "constant"
                instruction.literal.shape.CopyFrom(instruction.shape)
                instruction.literal.u32s.append(0)
            elif hlo.is_collective(instruction):
                _meet_replicas(instruction, count)
        del computation.instructions[:]
        computation.instructions.extend(kept)


def _meet_replicas(collective: Instruction, count: int) -> None:
    """Rewrite a collective of partitions.

    Source: CollectiveOpGroupMode in xla/service/collective_ops_utils.h.
    """
    of_partitions = collective.opcode not in _OF_REPLICAS or collective.use_global_device_ids
    if not collective.channel_id:
        # Replicas meet, for each partition. There was one.
        groups = [[index] for index in range(count)]
        if collective.source_target_pairs:
            del collective.source_target_pairs[:]
            for index in range(count):
                collective.source_target_pairs.add(source=index, target=index)
    else:
        groups = hlo.listed_groups(collective) if of_partitions else []
    for name in (*_GROUPS, "channel_id", "use_global_device_ids"):
        collective.ClearField(name)
    # Present and empty stands for all.
    collective.collective_device_list.SetInParent()
    for group in groups:
        collective.collective_device_list.replica_groups.add(replica_ids=group)
