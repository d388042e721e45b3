"""Computes with JAX on what torch_xla computes on: on one device, on another, and on all together."""

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec

print(torch.ones(2, device="xla").sum().item())
jax.config.update("jax_platforms", "tpu")  # type: ignore[no-untyped-call]
devices = jax.devices()
print(devices, jax.jit(lambda x: x @ x + 1)(jnp.ones((3, 3))).sum())
other = jax.device_put(jnp.arange(4.0), devices[1]) * 3
print(other, other.devices())
mesh = jax.make_mesh((4,), ("x",))
spec = PartitionSpec("x")  # type: ignore[no-untyped-call]
row = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, spec))
print(jax.jit(lambda x: x.sum())(row), len((row * 2).devices()))
print((torch.ones(2, device="xla") * 2).sum().item())
