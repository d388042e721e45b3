"""Programs for XLA's CPU compiler, in either engine. Importing this module imports jax."""

from __future__ import annotations

from functools import partial

from polyxla_bridge.engine.expansions import (
    arithmetic,
    batch_norm,
    convolution,
    inlining,
    max_pool,
    sums,
    tpu,
)
from polyxla_bridge.programs import fusion, hlo, kernels, rewrite


def expanded(
    module: bytes, *, is_partitioned: bool, calls_library: bool = False, calls_torch: bool = False
) -> bytes:
    """Expand what XLA's CPU compiler refuses, or computes slowly, in a serialised HloModuleProto.

    Args:
        module: the program.
        is_partitioned: whether several devices compute it together.
        calls_library: whether the program may call the C library.
        calls_torch: whether it may call torch's functions through that.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    choices: list[inlining.Choice] = list(tpu.CHOICES)
    choices.append(partial(sums.choose, calls_library=calls_library))
    if is_partitioned:
        # XLA's partitioner divides the instruction for the gradient of max-pooling, and that of a power.
        choices.append(batch_norm.choose)
    else:
        choices += [arithmetic.choose_power, partial(max_pool.choose, calls_library=calls_library)]
        choices += [batch_norm.choose_in_library] if calls_library else []
        choices.append(batch_norm.choose_exact)
    choices += [convolution.choose, arithmetic.choose_product] if calls_torch else []
    simple = inlining.replace(module, *choices)
    return simple if is_partitioned else fusion.bounded(simple)


def rewritten(
    module: bytes,
    partitions: int,
    replicas: int,
    *,
    calls_library: bool = False,
    calls_torch: bool = False,
) -> bytes:
    """Rewrite a serialised HloModuleProto as for jaxlib's CPU client.

    Args:
        module: the program.
        partitions: number of devices that compute one replica together.
        replicas: number of replicas.
        calls_library: whether the program may call the C library.
        calls_torch: whether it may call torch's functions through that.

    Raises:
        PjrtError: the program has kernels for TPU cores.
    """
    kernels.check(module)
    simple = expanded(
        module, is_partitioned=partitions > 1, calls_library=calls_library, calls_torch=calls_torch
    )
    return hlo.with_layouts(rewrite.for_jaxlib(simple, replicas, partitions))
