"""The TPU to compile for, the speed of its chips, and the framework whose programs are compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyxla import UsageError
from polyxla.plugin import (
    FOR_TORCH_TPU,
    FOR_TORCH_XLA,
    GENERATIONS,
    AcceleratorType,
    LibtpuReleases,
    pip_install,
)
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_tools.fits.compile_process import Cost

_MEGACORE = ("v4",)
"""Generations with two cores that form one device only if an option asks libtpu for it.

Source: tried with libtpu 0.0.21 and 0.0.52, which have 8 devices for v4:2x2x1 without it.
"""
_MEMORY_GIB = {
    "v2": 7.48,
    "v3": 15.48,
    "v4": 30.75,
    "v5e": 15.75,
    "v5p": 95.0,
    "v6e": 31.24,
    "v7x": 94.74,
}
"""HBM of a device that is left to programs, in GiB; libtpu takes the rest.

Source: the limits in the errors of libtpu 0.0.21 and 0.0.52 about programs that are too large. That of v5p is
    95.73 GiB, more than Cloud TPU's documentation says the chip has.
"""
_NAMES = {"v7x": "tpu7x"}
"""What libtpu calls a generation, if not by its short name. Source: tried with libtpu 0.0.52."""


@dataclass(frozen=True)
class Framework:
    """What differs between the frameworks.

    Attributes:
        module: the framework's import name.
        runtime: the runtime on which its scripts run.
        libtpu: the releases of libtpu that compile its programs.
        generations: the TPU generations that the framework and all these releases of libtpu support.
        is_eager: whether it runs each operation as a program of its own, so that a step is many programs.
        variables: for the script's run, so that the lines of programs are known.
    """

    module: str
    runtime: str
    libtpu: LibtpuReleases
    generations: tuple[str, ...]
    is_eager: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


TORCH_XLA = Framework(
    "torch_xla",
    "pjrt",
    FOR_TORCH_XLA,
    ("v2", "v3", "v4", "v5e", "v5p", "v6e"),
    # The lines of operations go into the programs. Source: torch_xla's documentation, "Troubleshoot".
    variables={"XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1"},
)
"""Its generations are those that libtpu 0.0.21 compiles for."""

TORCH_TPU = Framework(
    "torch_tpu",
    "torchtpu",
    FOR_TORCH_TPU,
    ("v4", "v5e", "v5p", "v6e", "v7x"),
    is_eager=True,
    # Each operation waits until its program has run, so that the main thread's line is the program's.
    # Source: tried with torch_tpu 0.2.0, which sends the same programs with and without it.
    variables={"TORCH_TPU_LAUNCH_BLOCKING": "1"},
)
"""TorchTPU begins with v4."""

_ALL = (TORCH_XLA, TORCH_TPU)


def installed_framework() -> Framework:
    """Return the framework that is installed here.

    Raises:
        UsageError: none is, or both are.
    """
    # Not imported: that takes seconds, and this process computes nothing.
    found = [framework for framework in _ALL if importlib.util.find_spec(framework.module)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            "torch_xla and torch_tpu are installed in one environment, and need different releases of torch",
            where="polyxla fits",
            fix="Make an environment for each: pip uninstall torch_xla, or torch_tpu, here.",
        )
    choices = " or ".join(pip_install(f"polyxla-runtime-{framework.runtime}") for framework in _ALL)
    raise UsageError(
        "neither torch_xla nor torch_tpu is installed, and the script's programs are theirs",
        where="polyxla fits",
        fix=f"Install a runtime: {choices}",
    )


@dataclass(frozen=True)
class TargetTpu:
    """The TPU to compile for.

    Attributes:
        accelerator: the type of its slices.
        slices: how many there are.
    """

    accelerator: AcceleratorType
    slices: int = 1

    @classmethod
    def parse(cls, text: str, framework: Framework) -> TargetTpu:
        """Read a type such as ``v5e-8``, or several slices of one, such as ``2xv5e-8``.

        Raises:
            UsageError: there is no such type, or the framework's programs do not compile for it.
        """
        slices, accelerator = AcceleratorType.parse_slices(text, f"--on {text}")
        if accelerator.generation not in framework.generations:
            raise UsageError(
                f"{framework.module}, with its libtpu, does not compile for a {accelerator.name}",
                where=f"--on {text}",
                fix=f"Choose one of {', '.join(framework.generations)}.",
            )
        return cls(accelerator, slices)

    @property
    def name(self) -> str:
        """Its name, as in ``POLYXLA_EMULATE``."""
        return self.accelerator.name_of(self.slices)

    @property
    def devices(self) -> int:
        """Number of devices of all slices."""
        return self.slices * self.accelerator.devices

    @property
    def topology(self) -> str:
        """The name that libtpu has for the arrangement of a slice's chips, such as ``v5e:2x4``."""
        x, y, z = self.accelerator.bounds.chips
        generation = self.accelerator.generation
        # The ICI of these generations has two dimensions, and libtpu takes no third.
        is_flat = generation in ("v5e", "v6e")
        return f"{_NAMES.get(generation, generation)}:{x}x{y}" + ("" if is_flat else f"x{z}")

    @property
    def options(self) -> dict[str, Option]:
        """Libtpu's options for the topology."""
        options: dict[str, Option] = {"chips_per_host_bounds": self.accelerator.bounds.chips_per_host}
        if self.accelerator.generation in _MEGACORE:
            options["chip_config_name"] = "megacore"
        if self.slices > 1:
            options["num_slices"] = self.slices
        return options

    @property
    def memory_bytes(self) -> int:
        """HBM for programs of a device: of a chip, and on v2, v3 and tpu7x of one of its two cores."""
        return int(_MEMORY_GIB[self.accelerator.generation] * 2**30)

    def estimate_s(self, cost: Cost) -> float | None:
        """Return the shortest time that a program can take on a device, in seconds; None if it is not known.

        By the roofline model: as long as its operations take at the peak, or its reads and writes of HBM,
        whichever is more. Communication between chips is not included.
        """
        if cost.flops is None or cost.accessed_bytes is None:
            return None
        chip = GENERATIONS[self.accelerator.generation]
        # Where a device is one of a chip's cores, it has half of the chip's peak.
        share = self.accelerator.threads_per_process
        return max(cost.flops * share / chip.peak_flops, cost.accessed_bytes * share / chip.hbm_bandwidth)
