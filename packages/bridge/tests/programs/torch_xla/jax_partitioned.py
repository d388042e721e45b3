"""Partitioned programs of JAX on the chips that torch_xla has, each compared with numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

lax: Any = jax.lax
print(torch.ones(2, device="xla").sum().item())
jax.config.update("jax_platforms", "tpu")  # type: ignore[no-untyped-call]
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
rows, columns, both, whole = (
    NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]
    for axes in (("data",), (None, "model"), ("data", "model"), ())
)
x = np.arange(32, dtype=np.float32).reshape(8, 4) / 10
w = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
# Each device gets some columns, which are not dense in the host's memory.
xs, ws = jax.device_put(x, rows), jax.device_put(w, columns)
y = np.sin(x @ w)


@jax.jit
def called(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w)


@jax.jit
def constrained(x: Any) -> Any:
    return lax.with_sharding_constraint(x * 2, columns)


def repeated(w: Any, x: Any) -> Any:
    def step(carry: Any, _: None) -> Any:
        return lax.with_sharding_constraint(jnp.tanh(carry @ w), rows), None

    return lax.scan(step, x, None, length=2)[0]


def loss(w: Any, x: Any) -> Any:
    return called(w, x).sum()


summed = jax.shard_map(
    lambda w, x: lax.psum(x @ w, "data"),
    mesh=mesh,
    in_specs=(whole.spec, rows.spec),
    out_specs=whole.spec,
)
images = np.random.default_rng(0).standard_normal((4, 4, 6, 6), np.float32)
kernel = np.ones((8, 2, 3, 3), np.float32)


def convolution(kernel: Any, images: Any) -> Any:
    return jnp.square(lax.conv_general_dilated(images, kernel, (1, 1), "VALID", feature_group_count=2)).sum()


def of_kernel() -> Any:
    parameter = torch.tensor(kernel, requires_grad=True)
    torch.nn.functional.conv2d(torch.tensor(images), parameter, groups=2).square().sum().backward()
    return parameter.grad


def padded(x: Any) -> Any:
    return [lax.pad(x, np.float32(edge), ((4, 4, 0), (0, 0, 0))) for edge in (0, 1)]


cases = {
    "columns": (ws, w),
    "call": (jax.jit(lambda w, x: called(w, x) + 1)(ws, xs), y + 1),
    "result": (jax.jit(lambda w, x: called(w, x) + 1, out_shardings=both)(ws, xs), y + 1),
    "gradient": (
        jax.jit(jax.grad(loss), out_shardings=whole)(ws, xs),
        x.T @ np.cos(x @ w),
    ),
    "constraint": (jax.jit(lambda w, x: constrained(called(w, x)))(ws, xs), y * 2),
    "scan": (jax.jit(repeated)(ws, xs), np.tanh(np.tanh(x @ w) @ w)),
    # Of what XLA's partitioner alone computes, the first is twice this, and the second has no ones.
    "kernel": (
        jax.jit(jax.grad(convolution), out_shardings=whole)(kernel, jax.device_put(images, rows)),
        of_kernel(),
    ),
    "pads": (
        jnp.stack(jax.jit(padded)(xs)),
        np.stack([np.pad(x, ((4, 4), (0, 0)), constant_values=edge) for edge in (0, 1)]),
    ),
    "shard_map": (jax.jit(summed)(w, xs), (x @ w)[:4] + (x @ w)[4:]),
}
for name, (found, expected) in cases.items():
    print(name, np.allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5))
