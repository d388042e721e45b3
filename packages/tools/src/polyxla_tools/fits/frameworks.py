"""The framework whose programs are compiled: torch_xla or TorchTPU. Imports neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyxla import UsageError
from polyxla.plugin import FOR_TORCH_TPU, FOR_TORCH_XLA, LibtpuReleases, pip_install


@dataclass(frozen=True)
class Framework:
    """What differs between the frameworks.

    Attributes:
        module: the framework's import name.
        runtime: the runtime on which its scripts run.
        libtpu: the releases of libtpu that compile its programs.
        generations: the TPU generations that it, and each of these releases, supports.
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
    # Each operation waits until its program has run: then the line of the main thread is the program's.
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
    found = [one for one in _ALL if importlib.util.find_spec(one.module)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            "torch_xla and torch_tpu are installed in one environment, and need different releases of torch",
            where="polyxla fits",
            fix="Make an environment for each: pip uninstall torch_xla, or torch_tpu, here.",
        )
    choices = " or ".join(pip_install(f"polyxla-runtime-{one.runtime}") for one in _ALL)
    raise UsageError(
        "neither torch_xla nor torch_tpu is installed, and the script's programs are theirs",
        where="polyxla fits",
        fix=f"Install a runtime: {choices}",
    )
