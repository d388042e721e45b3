"""Programs for XLA's CPU compiler, in either engine. Importing this module imports jax."""

from __future__ import annotations

from polyxla_bridge.engine.expansions import batch_norm, inlining, max_pool, narrow_sums, tpu
from polyxla_bridge.programs import hlo, kernels, rewrite


def expanded(module: bytes, *, is_partitioned: bool) -> bytes:
    """Expand what XLA's CPU compiler refuses, or computes slowly, in a serialised HloModuleProto.

    Args:
        module: the program.
        is_partitioned: whether several devices compute it together.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    normalization = batch_norm if is_partitioned else max_pool
    return inlining.replace(module, *tpu.CHOICES, normalization.choose, narrow_sums.choose)


def rewritten(module: bytes, partitions: int, replicas: int) -> bytes:
    """Rewrite a serialised HloModuleProto as for jaxlib's CPU client.

    Args:
        module: the program.
        partitions: number of devices that compute one replica together.
        replicas: number of replicas.

    Raises:
        PjrtError: the program has kernels for TPU cores.
    """
    kernels.check(module)
    simple = expanded(module, is_partitioned=partitions > 1)
    return hlo.with_layouts(rewrite.for_jaxlib(simple, replicas, is_partitioned=partitions > 1))
