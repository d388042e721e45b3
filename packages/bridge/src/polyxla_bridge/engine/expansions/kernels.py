"""Kernels for TPU cores as the programs that they carry."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla_bridge.programs import hlo, kernels
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module


def choose(instruction: Instruction, _: Mapping[int, Computation]) -> Module | None:
    """Return the program that a kernel carries."""
    program = kernels.program_of(instruction)
    return hlo.parse_module(program) if program else None
