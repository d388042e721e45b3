"""Programs for a TPU, on devices whose compiler lacks its instructions. Importing this imports jax."""

from __future__ import annotations

from polyxla_bridge.engine.expansions import inlining, kernels, linear_algebra, resize, scan

CHOICES: tuple[inlining.Choice, ...] = (
    scan.choose,
    resize.choose,
    linear_algebra.choose,
    kernels.choose,
)
"""Expand the instructions and the custom calls that only libtpu compiles."""


def expanded(module: bytes) -> bytes:
    """Expand what only libtpu compiles, in a serialised HloModuleProto.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    return inlining.replace(module, *CHOICES)
