"""Functions of the C library that programs call, of jaxlib's CPU clients or of XLA's as a plugin."""

from __future__ import annotations

from functools import cache

import jax
from jaxlib import _jax, xla_client

from polyxla_bridge import native
from polyxla_bridge.engine.expansions import batch_norm, max_pool, sums, torch_library
from polyxla_bridge.plugin_client.plugin import Plugin

_TYPED, _DEFAULT = 1, xla_client.CustomCallTargetTraits.DEFAULT
"""The typed interface, and calls without special traits.
Source: ``register_custom_call_target`` in jaxlib's xla_client.py, as is the platform's name below."""


TARGETS = (
    *(max_pool.TARGET, sums.TARGET, sums.FEATURES_TARGET, batch_norm.TARGET, batch_norm.GRADIENT_TARGET),
    *torch_library.TARGETS,
)
"""The functions that programs of any number of replicas call."""


@cache
def register(target: str) -> None:
    """Let programs of jaxlib's clients call a function by its name, which may have hyphens in a program."""
    function = jax.ffi.pycapsule(getattr(native.UNLOCKED, target.replace("-", "_")))  # type: ignore[no-untyped-call]
    # `jax.ffi.register_ffi_target` would wait until jax opens a client of its own.
    _jax.register_custom_call_target(target, function, "Host", _TYPED, _DEFAULT)


def register_all(plugin: Plugin) -> bool:
    """Let programs of a plugin's CPU client call all of `TARGETS`; return whether they can."""
    addresses = {target: native.address(target) for target in TARGETS}
    return all(address and plugin.register(target, address) for target, address in addresses.items())
