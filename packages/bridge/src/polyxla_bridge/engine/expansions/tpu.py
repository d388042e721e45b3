"""Programs for a TPU, on devices whose compiler lacks its instructions. Importing this imports jax."""

from __future__ import annotations

from polyxla_bridge.engine.expansions import inlining, linear_algebra, resize, scan
from polyxla_bridge.programs import hlo, kernels
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module


def _program_of_kernel(instruction: Instruction, _: inlining.Program) -> Module | None:
    return hlo.parse_module(kernels.program_of(instruction)) if kernels.has_program(instruction) else None


CHOICES: tuple[inlining.Choice, ...] = (
    scan.choose,
    resize.choose,
    linear_algebra.choose,
    _program_of_kernel,
)
"""Expand the instructions and the custom calls that only libtpu compiles."""


def expanded(module: bytes) -> bytes:
    """Expand what only libtpu compiles, in a serialised HloModuleProto.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    return inlining.replace(module, *CHOICES)
