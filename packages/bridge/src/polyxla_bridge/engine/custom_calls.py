"""Functions of the C library that programs of jaxlib's CPU clients call."""

from __future__ import annotations

from functools import cache

import jax
from jaxlib import _jax, xla_client

from polyxla_bridge import native

_TYPED, _DEFAULT = 1, xla_client.CustomCallTargetTraits.DEFAULT
"""The typed interface, and calls without special traits.
Source: ``register_custom_call_target`` in jaxlib's xla_client.py, as is the platform's name below."""


@cache
def register(target: str) -> None:
    """Let programs call a function of the C library by its name, which may have hyphens in a program."""
    function = jax.ffi.pycapsule(getattr(native.UNLOCKED, target.replace("-", "_")))  # type: ignore[no-untyped-call]
    # `jax.ffi.register_ffi_target` would wait until jax opens a client of its own.
    _jax.register_custom_call_target(target, function, "Host", _TYPED, _DEFAULT)
