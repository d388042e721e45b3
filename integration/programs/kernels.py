"""``kernels.py FILE NAME ...`` runs kernels of Pallas, and saves their results and what they should be."""

# mypy: disable-error-code="no-any-return,no-untyped-call"
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import polyxla
from polyxla import Replica

BLOCK = 128
ROWS = 8


def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """Add up the products of blocks in an accumulator."""

    def kernel(left_ref: Any, right_ref: Any, result_ref: Any, sum_ref: Any) -> None:
        step = pl.program_id(2)

        @pl.when(step == 0)
        def clear() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jnp.dot(left_ref[...], right_ref[...], preferred_element_type=jnp.float32)

        @pl.when(step == pl.num_programs(2) - 1)
        def write() -> None:
            result_ref[...] = sum_ref[...]

    (rows, inner), columns = left.shape, right.shape[1]

    def blocks(*axes: int) -> pl.BlockSpec:
        return pl.BlockSpec((BLOCK, BLOCK), lambda *step: tuple(step[axis] for axis in axes))

    return pl.pallas_call(
        kernel,
        grid=(rows // BLOCK, columns // BLOCK, inner // BLOCK),
        in_specs=[blocks(0, 2), blocks(2, 1)],
        out_specs=blocks(0, 1),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
    )(left, right)


def softmax(rows: jax.Array) -> jax.Array:
    """Compute a few rows at a time."""

    def kernel(rows_ref: Any, result_ref: Any) -> None:
        powers = jnp.exp(rows_ref[...] - jnp.max(rows_ref[...], axis=-1, keepdims=True))
        result_ref[...] = powers / jnp.sum(powers, axis=-1, keepdims=True)

    spec = pl.BlockSpec((ROWS, rows.shape[1]), lambda number: (number, 0))
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return pl.pallas_call(
        kernel, grid=(rows.shape[0] // ROWS,), in_specs=[spec], out_specs=spec, out_shape=shape
    )(rows)


def double(rows: jax.Array, *, waits_first: bool) -> jax.Array:
    """Copy the next rows into one of two buffers while those of the other are doubled."""

    def kernel(rows_ref: Any, result_ref: Any, buffers: Any, semaphores: Any) -> None:
        count = rows_ref.shape[0] // ROWS

        def copy(number: Any) -> Any:
            slot = lax.rem(number, 2)
            source = rows_ref.at[pl.ds(number * ROWS, ROWS)]
            return pltpu.make_async_copy(source, buffers.at[slot], semaphores.at[slot])

        copy(0).start()

        def step(number: Any, _: None) -> None:
            @pl.when(number + 1 < count)
            def start() -> None:
                copy(number + 1).start()

            if waits_first:
                copy(number).wait()
            result_ref[pl.ds(number * ROWS, ROWS)] = buffers[lax.rem(number, 2)] * 2
            if not waits_first:
                copy(number).wait()

        lax.fori_loop(0, count, step, None)

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        scratch_shapes=[
            pltpu.VMEM((2, ROWS, rows.shape[1]), rows.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(rows)


def copied(rows: jax.Array) -> jax.Array:
    """Double, with a wait before each use."""
    return double(rows, waits_first=True)


def racing(rows: jax.Array) -> jax.Array:
    """Double, with each wait too late."""
    return double(rows, waits_first=False)


def misshapen(rows: jax.Array) -> jax.Array:
    """Use a block that a TPU cannot divide."""
    spec = pl.BlockSpec((3, 5), lambda row, column: (row, column))
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = pl.pallas_call(_copy, grid=(2, 2), in_specs=[spec], out_specs=spec, out_shape=shape)
    return call(rows)


def _copy(source_ref: Any, result_ref: Any) -> None:
    result_ref[...] = source_ref[...]


def random(rows: jax.Array) -> jax.Array:
    """Draw bits as only a TPU's core does."""

    def kernel(rows_ref: Any, result_ref: Any) -> None:
        pltpu.prng_seed(1)
        bits = pltpu.prng_random_bits(result_ref.shape)
        result_ref[...] = rows_ref[...] + bits.astype(jnp.float32)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype))(rows)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[tuple[int, int], ...]]] = {
    "matmul": (matmul, torch.matmul, ((256, 384), (384, 128))),
    "softmax": (softmax, partial(torch.softmax, dim=-1), ((32, 256),)),
    "copied": (copied, lambda rows: rows * 2, ((32, 128),)),
    "racing": (racing, lambda rows: rows * 2, ((32, 128),)),
    "misshapen": (misshapen, lambda rows: rows, ((6, 10),)),
    "random": (random, lambda rows: rows, ((8, 128),)),
}


def as_operator(name: str, kernel: Callable[..., Any], reference: Callable[..., Tensor]) -> Any:
    """Return a kernel as an operator of torch."""
    if importlib.util.find_spec("torch_tpu"):
        return torch.tpu.pallas.jax_op(f"polyxla_test::{name}", kernel)  # type: ignore[attr-defined]
    from torch_xla.experimental.custom_kernel import make_kernel_from_pallas

    return make_kernel_from_pallas(
        kernel, lambda *tensors: [(reference(*(tensor.cpu() for tensor in tensors)).shape, torch.float32)]
    )


def compute(replica: Replica) -> dict[str, tuple[Tensor, Tensor]]:
    """Run the kernels that the command line names."""
    torch.manual_seed(0)
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sys.argv[2:]:
        if name == "attention":
            results |= attention(replica)
            continue
        kernel, reference, shapes = KERNELS[name]
        given = [torch.randn(shape) for shape in shapes]
        computed = as_operator(name, kernel, reference)(*map(replica.to_device, given))
        results[name] = (computed.cpu(), reference(*given))
    return results


def attention(replica: Replica) -> dict[str, tuple[Tensor, Tensor]]:
    """Attend with the framework's own kernel, forward and backward."""
    # With more than one block, torch_xla passes its kernel of the gradient an argument of another shape.
    given = [torch.randn(1, 2, 2 * BLOCK, BLOCK) for _ in range(3)]
    expected: Any = [tensor.clone().requires_grad_() for tensor in given]
    found: Any = [replica.to_device(tensor).requires_grad_() for tensor in given]
    attend: Any = scaled_dot_product_attention
    reference = attend(*expected, is_causal=True)
    if importlib.util.find_spec("torch_tpu"):
        from torch_tpu._internal.ops.splash_attention import splash_sdpa

        blocks = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
        result = splash_sdpa(*found, **{f"block_{name}": BLOCK for name in blocks})
    else:
        from torch_xla.experimental.custom_kernel import flash_attention

        kernel: Any = flash_attention
        result = kernel(*found, causal=True, sm_scale=BLOCK**-0.5)
    gradient = torch.randn(reference.shape)
    reference.backward(gradient)
    result.backward(replica.to_device(gradient))
    gradients = {
        name: (tensor.grad.cpu(), other.grad)
        for name, tensor, other in zip("qkv", found, expected, strict=True)
    }
    return {"attention": (result.detach().cpu(), reference.detach()), **gradients}


if __name__ == "__main__":
    (computed,) = polyxla.launch(compute, devices=1)
    torch.save(computed, sys.argv[1])
