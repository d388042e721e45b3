"""Programs for XLA's CPU compiler, in either engine. Importing this module imports jax."""

from __future__ import annotations

from polyxla_bridge.engine.expansions import batch_norm, inlining, linear_algebra, max_pool, resize, scan


def expanded(module: bytes, *, is_partitioned: bool) -> bytes:
    """Expand what XLA's CPU compiler refuses, or computes slowly, in a serialised HloModuleProto.

    Args:
        module: the program.
        is_partitioned: whether several devices compute it together.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    normalization = batch_norm if is_partitioned else max_pool
    choices = (scan, resize, linear_algebra, normalization)
    return inlining.replace(module, *(one.choose for one in choices))
