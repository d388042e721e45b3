"""How fast a chip can be, and how much of that a training uses."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
        peak_flops: bfloat16 operations per second of a whole chip.
        devices: devices that a chip shows to a program, which share that.
    """

    peak_flops: float
    devices: int

    @property
    def device_flops(self) -> float:
        """Operations per second of one device, hence of one replica."""
        return self.peak_flops / self.devices


CHIPS = {
    "TPU v2": Chip(45 * TERA, 2),
    "TPU v3": Chip(123 * TERA, 2),
    "TPU v4": Chip(275 * TERA, 1),
    "TPU v5e": Chip(197 * TERA, 1),
    "TPU v5p": Chip(459 * TERA, 1),
    "TPU v6e": Chip(918 * TERA, 1),
}
"""Every generation by its name.

Source: "peak compute per chip" in the pages "TPU v2" to "TPU v6e" of the Cloud TPU documentation; the page
"TPU v2" says 46 in one place and 45 in the table of system architecture, and the lower one stands here.
"""
_SPELLINGS = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5litepod": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
}
"""Source: ``device_kind`` of libtpu's devices, as JAX's ``jax/experimental/mosaic`` tests them."""


def chip(kind: str | None) -> Chip | None:
    """Return the chip that a device says it is, such as ``TPU v4`` or ``TPU v5 lite``; None if unknown."""
    return CHIPS.get(_SPELLINGS.get(kind or "", kind or ""))


def utilization(flops: float, step_s: float, kind: str | None) -> float | None:
    """Return the share of a device's peak that a replica's step reaches (MFU); None for an unknown chip.

    Args:
        flops: floating-point operations of one replica's step, of the model alone.
        step_s: how long the step takes.
        kind: the chip, as `polyxla.contracts.counters.Counters.chip` has it.
    """
    known = chip(kind)
    if known is None or flops <= 0 or step_s <= 0:
        return None
    return flops / step_s / known.device_flops
