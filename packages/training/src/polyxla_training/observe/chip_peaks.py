"""The peak performance of each TPU generation, and the share of it that a training reaches."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class ChipPeak:
    """The peak of one generation.

    Attributes:
        peak_flops: bfloat16 operations per second of a whole chip.
        devices: number of devices as which a program sees one chip; they share its peak.
    """

    peak_flops: float
    devices: int

    @property
    def device_flops(self) -> float:
        """Operations per second of one device, hence of one replica."""
        return self.peak_flops / self.devices


CHIP_PEAKS = {
    "TPU v2": ChipPeak(45 * TERA, 2),
    "TPU v3": ChipPeak(123 * TERA, 2),
    "TPU v4": ChipPeak(275 * TERA, 1),
    "TPU v5e": ChipPeak(197 * TERA, 1),
    "TPU v5p": ChipPeak(459 * TERA, 1),
    "TPU v6e": ChipPeak(918 * TERA, 1),
    "TPU v7x": ChipPeak(2307 * TERA, 2),
}
"""Every generation by its name.

Source: "peak compute per chip" in the pages "TPU v2" to "TPU7x" of the Cloud TPU documentation. The page
"TPU v2" says 46 in one place, and 45 in the table of the system architecture; this is the lower one.
"""
_SPELLINGS = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5litepod": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7x",
    "TPU v7": "TPU v7x",
}
"""Source: ``device_kind`` of libtpu's devices, as JAX's ``jax/experimental/mosaic`` tests them; the last is
``torch_tpu._internal.utils.hardware``'s name."""


def chip_peak(kind: str | None) -> ChipPeak | None:
    """Return the peak of a kind of chip, such as ``TPU v4`` or ``TPU v5 lite``; None if it is unknown."""
    return CHIP_PEAKS.get(_SPELLINGS.get(kind or "", kind or ""))


def utilization(flops: float, step_s: float, kind: str | None) -> float | None:
    """Return the share of a device's peak that a replica's step reaches (MFU); None for an unknown chip.

    Args:
        flops: floating-point operations in one replica's step, of the model alone.
        step_s: duration of the step, in seconds.
        kind: the kind of chip, as in `polyxla.plugin.Counters.chip`.
    """
    peak = chip_peak(kind)
    if peak is None or flops <= 0 or step_s <= 0:
        return None
    return flops / step_s / peak.device_flops
