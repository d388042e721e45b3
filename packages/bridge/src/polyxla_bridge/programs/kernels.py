"""Kernels for TPU cores, such as Pallas makes.

A kernel is a custom call with a program of Mosaic, which runs on a TPU's cores only. Where a TPU is emulated,
the kernel also carries a program of XLA that computes the same, or the reason why there is none.
"""

from __future__ import annotations

import base64
import json
import zlib

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

KERNEL = "tpu_custom_call"
"""The target of the custom call. Source: ``jax._src.tpu_custom_call``."""
_PROGRAM, _REASON = "polyxla_program", "polyxla_reason"
"""What is added to the custom call's configuration, which is a JSON object."""


def with_program(config: str, module: bytes) -> str:
    """Return a kernel's configuration, with a serialised HloModuleProto that computes the same."""
    text = base64.b64encode(zlib.compress(module)).decode("ascii")
    return json.dumps(json.loads(config) | {_PROGRAM: text})


def with_reason(config: str, reason: str) -> str:
    """Return a kernel's configuration, with the reason why nothing else computes the same."""
    return json.dumps(json.loads(config) | {_REASON: reason})


def has_program(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel that carries a program."""
    return is_kernel(instruction) and _PROGRAM.encode() in instruction.backend_config


def program_of(instruction: Instruction) -> bytes:
    """Return the program that a kernel carries."""
    return zlib.decompress(base64.b64decode(json.loads(instruction.backend_config)[_PROGRAM]))


def as_written(module: bytes) -> bytes:
    """Return a serialised HloModuleProto whose kernels carry nothing, as a TPU's compiler takes it."""
    if KERNEL.encode() not in module:
        return module
    parsed = hlo.parse_module(module)
    for computation in parsed.computations:
        for instruction in filter(is_kernel, computation.instructions):
            config = json.loads(instruction.backend_config)
            instruction.backend_config = json.dumps(
                {key: value for key, value in config.items() if key not in (_PROGRAM, _REASON)}
            ).encode()
    return parsed.SerializeToString()


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel."""
    return instruction.custom_call_target == KERNEL


def check(module: bytes) -> None:
    """Check that all kernels of a serialised HloModuleProto carry a program.

    Raises:
        PjrtError: some do not.
    """
    # Most programs have no kernel. Searching the bytes saves parsing them.
    if KERNEL.encode() not in module:
        return
    alone = [
        instruction
        for instruction in hlo.instructions(module)
        if is_kernel(instruction) and not has_program(instruction)
    ]
    if alone:
        names = ", ".join(instruction.name for instruction in alone)
        reasons = sorted({reason for instruction in alone if (reason := _reason_of(instruction))})
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"{hlo.module_name(module)} has the {KERNEL} {names}: a kernel for TPU cores cannot run where a "
            f"TPU is emulated{''.join(f'; {reason}' for reason in reasons)}. Use torch's or XLA's own "
            "operations; for attention, write torch.backends.cuda.enable_flash_sdp(False)",
        )


def _reason_of(instruction: Instruction) -> str:
    # Only a configuration with a reason is known to be JSON.
    if _REASON.encode() not in instruction.backend_config:
        return ""
    return str(json.loads(instruction.backend_config)[_REASON])
