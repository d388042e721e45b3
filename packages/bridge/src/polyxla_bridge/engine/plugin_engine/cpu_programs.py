"""Programs for XLA's CPU client behind a plugin. Importing this module imports jax."""

from __future__ import annotations

import jax

from polyxla_bridge.engine.expansions import cpu
from polyxla_bridge.programs import hlo, rewrite

# Otherwise jax would write instructions of int64 as int32.
jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]


def rewritten(module: bytes, partitions: int, replicas: int) -> bytes:
    """Rewrite a serialised HloModuleProto as for jaxlib's CPU client.

    Args:
        module: the program.
        partitions: number of devices that compute one replica together.
        replicas: number of replicas.

    Raises:
        PjrtError: the program has kernels for TPU cores.
    """
    hlo.check_kernels(module)
    expanded = cpu.expanded(module, is_partitioned=partitions > 1)
    return hlo.with_layouts(rewrite.for_jaxlib(expanded, replicas, is_partitioned=partitions > 1))
