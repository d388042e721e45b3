"""Programs in StableHLO, as JAX and TorchTPU send them."""

from __future__ import annotations

import re
from typing import Any

PORTABLE = re.compile(rb"ML\xefR.{1,2}StableHLO_v", re.DOTALL)
"""How StableHLO that later versions read begins: MLIR's bytecode, its version, and the name of its producer.

Source: https://mlir.llvm.org/docs/BytecodeFormat, and serializePortableArtifact in stablehlo.
"""


def to_hlo(program: bytes) -> bytes:
    """Return a program in StableHLO as a serialised HloModuleProto.

    Args:
        program: MLIR as text or bytecode, or a portable artifact.

    Raises:
        Exception: any error of jaxlib's parser.
    """
    # Imported here, because programs of torch_xla need no MLIR.
    from jax.interpreters import mlir
    from jaxlib import _jax

    module: Any = program
    if PORTABLE.match(program):
        with mlir.make_ir_context() as context:
            module = str(_jax.mlir.deserialize_portable_artifact(program, context))
    computation = _jax.mlir.mlir_module_to_xla_computation(module, use_tuple_args=False, return_tuple=False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto
