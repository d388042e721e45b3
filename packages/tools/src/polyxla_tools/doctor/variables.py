"""Variables that are misspelt, old, or left over from another program."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyxla.plugin import tpu_env as tpu
from polyxla_tools.doctor.findings import Finding, note, ok, problem
from polyxla_tools.doctor.runtimes import RuntimeFacts

PREFIXES = (
    "CLOUD_TPU_",
    "LIBTPU_",
    "MEGASCALE_",
    "PJRT_",
    "POLYXLA_",
    "TPU_",
    "TORCH_TPU_",
    "XLA_",
    "XRT_",
)
"""Prefixes of the variables that runtimes, frameworks and libtpu read."""
BFLOAT16 = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Variables that torch_xla 2.9 still obeys. Source: its own warnings."""
FLOAT16 = ("XLA_USE_F16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")
"""Variables that torch_xla 2.9 only warns about. Source: ``__init__.py``, and the names in its library."""
GIVEN = (
    tpu.TPU_PROCESS_ADDRESSES,
    tpu.TPU_PROCESS_PORT,
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
"""Variables that a launch gives to its processes. No user sets them by hand."""
OF_TORCHRUN = (tpu.WORLD_SIZE, tpu.RANK, tpu.LOCAL_RANK, tpu.LOCAL_WORLD_SIZE)
"""Variables that torchrun gives to its processes, together with ``TORCHELASTIC_RUN_ID``."""
_UNCHECKED = tuple(prefix for prefix in PREFIXES if prefix not in ("POLYXLA_", "XRT_"))
"""Prefixes of variables whose misspelt names neither the core nor a runtime reports."""
_OFF = ("", "0", "false")
_NEAR = 0.88
"""Least similarity of a misspelt name. ``TPU_WORKER_IDS`` has 0.96, two variables that exist at most 0.87."""


def relevant(environ: Mapping[str, str], facts: RuntimeFacts) -> dict[str, str]:
    """Return the variables that are set and can change what a training does, sorted by name."""
    known = {*_known(facts), *OF_TORCHRUN, tpu.MASTER_ADDR, tpu.MASTER_PORT}
    names = (name for name in environ if name in known or name.startswith(PREFIXES))
    return {name: environ[name] for name in sorted(names)}


def check_variables(environ: Mapping[str, str], facts: RuntimeFacts) -> list[Finding]:
    """Check the variables that are set."""
    found = [
        *_misspelt_ours(facts),
        *_misspelt_others(environ, facts),
        *_old(environ),
        *_left_over(environ),
        *_library(environ),
    ]
    count = len(relevant(environ, facts))
    return found or [ok("variables", f"{count} set, none of them misspelt or old")]


def _misspelt_ours(facts: RuntimeFacts) -> Iterator[Finding]:
    for text in facts.misspelt:
        what, _, advice = text.partition(". ")
        yield problem("variables", what.removesuffix("."), advice or "Unset it.")


def _misspelt_others(environ: Mapping[str, str], facts: RuntimeFacts) -> Iterator[Finding]:
    known = [*_known(facts), *GIVEN, *BFLOAT16, *FLOAT16]
    for name in sorted(environ):
        if name not in known and name.startswith(_UNCHECKED):
            # An unknown name alone means nothing: libtpu reads hundreds of variables that no list has.
            near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
            if near:
                yield note("variables", f"no runtime reads {name}", f"Did you mean {near[0]}?")


def _old(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in BFLOAT16:
        if environ.get(name, "").lower() not in _OFF:
            found = f"{name}={environ[name]}: torch_xla stores every float32 tensor of the device as bfloat16"
            yield note("variables", found, "Unset it, and name a policy: --precision bf16-true.")
    for name in FLOAT16:
        if name in environ:
            yield note("variables", f"{name} has no effect: torch_xla 2.9 does not read it", "Unset it.")


def _left_over(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that a shell inherited from a launch: with them, every program joins that launch."""
    # With torchrun, its own variables are set on purpose.
    left = [name for name in GIVEN if name in environ]
    if tpu.TORCHELASTIC_RUN_ID not in environ:
        left += [name for name in OF_TORCHRUN if name in environ]
    if left:
        found = f"{', '.join(left)}: set as in a process of another launch"
        yield note("variables", found, f"If this is not one: unset {' '.join(left)}")


def _library(environ: Mapping[str, str]) -> Iterator[Finding]:
    path = environ.get(tpu.TPU_LIBRARY_PATH)
    if path and not Path(path).is_file():
        fix = f"Unset {tpu.TPU_LIBRARY_PATH}: the installed libtpu is found without it."
        yield problem("variables", f"{tpu.TPU_LIBRARY_PATH}={path} is not a file", fix)


def _known(facts: RuntimeFacts) -> list[str]:
    return sorted(
        {
            name
            for candidate in facts.candidates
            if candidate.discovery
            for name in candidate.discovery.variables
        }
    )
