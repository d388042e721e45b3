"""What a TPU's chips are for libtpu's compiler, and how fast they can be."""

from __future__ import annotations

from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import AcceleratorType
from polyxla_bridge.libtpu.host import GENERATIONS
from polyxla_bridge.plugin_client.memory import Option
from polyxla_tools.fits.frameworks import Framework
from polyxla_tools.fits.plugin_api import Cost


@dataclass(frozen=True)
class Peak:
    """The peak of a chip.

    Attributes:
        flops: bfloat16 operations per second.
        bandwidth: bytes per second between the chip and its HBM.
    """

    flops: float
    bandwidth: float


PEAKS = {
    "v2": Peak(45e12, 600e9),
    "v3": Peak(123e12, 900e9),
    "v4": Peak(275e12, 1200e9),
    "v5e": Peak(197e12, 800e9),
    "v5p": Peak(459e12, 2765e9),
    "v6e": Peak(918e12, 1600e9),
    "v7x": Peak(2307e12, 7380e9),
}
"""By short name of the generation.

Source: "peak compute per chip" and "HBM bandwidth" in the pages "TPU v2" to "TPU7x" of the Cloud TPU
documentation; of two numbers for a generation the lower one. polyxla-training, which knows no runtime, has
the same operations per second; a test compares them.
"""

_MEGACORE = ("v4",)
"""Generations whose two cores are one device only if libtpu is asked for it.

Source: tried with libtpu 0.0.21 and 0.0.52, which have 8 devices for v4:2x2x1 without it.
"""
_NAMES = {"v7x": "tpu7x"}
"""What libtpu calls a generation, if not by its short name. Source: tried with libtpu 0.0.52."""


@dataclass(frozen=True)
class Target:
    """The TPU to compile for.

    Attributes:
        accelerator: its type.
    """

    accelerator: AcceleratorType

    @classmethod
    def parse(cls, text: str, framework: Framework) -> Target:
        """Read a type such as ``v5e-8``.

        Raises:
            UsageError: there is no such type, or the framework's programs do not compile for it.
        """
        accelerator = AcceleratorType.parse(text, f"--on {text}")
        if accelerator.generation not in framework.generations:
            raise UsageError(
                f"{framework.module}, with its libtpu, does not compile for a {accelerator.name}",
                where=f"--on {text}",
                fix=f"Choose one of {', '.join(framework.generations)}.",
            )
        return cls(accelerator)

    @property
    def topology(self) -> str:
        """The name that libtpu has for the arrangement of the chips, such as ``v5e:2x4``."""
        x, y, z = self.accelerator.bounds.chips
        generation = self.accelerator.generation
        is_flat = generation in ("v5e", "v6e")
        return f"{_NAMES.get(generation, generation)}:{x}x{y}" + ("" if is_flat else f"x{z}")

    @property
    def options(self) -> dict[str, Option]:
        """Libtpu's options for the topology."""
        options: dict[str, Option] = {"chips_per_host_bounds": self.accelerator.bounds.chips_per_host}
        if self.accelerator.generation in _MEGACORE:
            options["chip_config_name"] = "megacore"
        return options

    @property
    def memory_bytes(self) -> int:
        """HBM of a device: of a chip, and on v2, v3 and tpu7x of one of its two cores."""
        return GENERATIONS[self.accelerator.generation].memory_gib << 30

    def estimate_s(self, cost: Cost) -> float | None:
        """Return the shortest time that a program can take on a device, in seconds; None if it is not known.

        By the roofline model: as long as its operations take at the peak, or its reads and writes of HBM,
        whichever is more. Communication between chips is not included.
        """
        if cost.flops is None or cost.accessed_bytes is None:
            return None
        peak = PEAKS[self.accelerator.generation]
        share = self.accelerator.threads_per_process
        return max(cost.flops * share / peak.flops, cost.accessed_bytes * share / peak.bandwidth)
