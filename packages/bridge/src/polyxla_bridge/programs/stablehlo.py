"""Programs in StableHLO, as JAX and TorchTPU send them."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError

PORTABLE = re.compile(rb"ML\xefR.{1,2}StableHLO_v(\d+\.\d+\.\d+)", re.DOTALL)
"""How StableHLO that later versions read begins: MLIR's bytecode, its version, producer's name and version.

Source: https://mlir.llvm.org/docs/BytecodeFormat, and serializePortableArtifact in stablehlo.
"""


def to_hlo(program: bytes) -> bytes:
    """Return a program in StableHLO as a serialised HloModuleProto.

    Args:
        program: MLIR as text or bytecode, or a portable artifact.

    Raises:
        PjrtError: the program cannot be read, and its StableHLO is newer than jaxlib's.
        Exception: any other error of jaxlib's parser.
    """
    # Imported here, because programs of torch_xla need no MLIR.
    from jax.interpreters import mlir
    from jaxlib import _jax

    module: Any = program
    if found := PORTABLE.match(program):
        try:
            with mlir.make_ir_context() as context:
                module = str(_jax.mlir.deserialize_portable_artifact(program, context))
        except Exception as error:
            _explain_newer(found[1].decode(), error)
            raise
    computation = _jax.mlir.mlir_module_to_xla_computation(module, use_tuple_args=False, return_tuple=False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto


def _explain_newer(theirs: str, error: Exception) -> None:
    """Raise an error that names both versions, if the program's is newer than the one that jaxlib has.

    Only after an error: a newer version often adds operations that a program does not have.
    """
    from jaxlib.mlir.dialects import stablehlo

    ours: str = stablehlo.get_current_version()
    if _numbers(theirs) > _numbers(ours):
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"the program is StableHLO {theirs}, and jaxlib {version('jaxlib')} reads up to {ours}: "
            "install a newer jaxlib, or an older release of the framework that made the program",
        ) from error


def _numbers(dotted: str) -> tuple[int, ...]:
    return tuple(map(int, dotted.split(".")))
