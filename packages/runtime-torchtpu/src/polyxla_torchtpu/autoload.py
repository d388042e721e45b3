"""The entry point by which torch loads TorchTPU on an emulated TPU, in programs that do not know polyxla.

torch calls it at the end of its import, in every process. Without `POLYXLA_EMULATE` it replaces
`polyxla_torchtpu.operators`, no more.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping

from polyxla.plugin import (
    POLYXLA_DEVICES,
    POLYXLA_LIBTPU_HOST,
    POLYXLA_RUNTIME,
    POLYXLA_SECRET,
    EmulatedTpu,
    ended_by_errors,
    shared_secret,
    snapshot,
    torchrun,
    update_environ,
)
from polyxla.plugin import tpu_env as tpu
from polyxla_torchtpu import env


def load() -> None:
    """Prepare this process for an emulated TPU, if the environment asks for one, and load TorchTPU."""
    environ = snapshot()
    if environ.get(POLYXLA_RUNTIME) not in (None, "", "torchtpu"):
        return
    with ended_by_errors():
        update_environ(prepare(environ))
    from polyxla_torchtpu import operators

    operators.replace()
    environ = snapshot()
    if POLYXLA_LIBTPU_HOST in environ:
        from polyxla_torchtpu import host_answers

        host_answers.load(environ)


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put a plain TorchTPU program on an emulated TPU; none unless asked for.

    Raises:
        UsageError: the environment asks for a TPU that cannot be emulated.
    """
    emulated = EmulatedTpu.read(environ)
    if emulated is None:
        return {}
    from polyxla_torchtpu.discovery import requested_plan

    started = torchrun.process_count(environ)
    # torchrun may use some of a host's chips.
    plan = requested_plan(environ if started is None else {POLYXLA_DEVICES: str(started), **environ})
    is_torchruns = started is not None
    variables = {} if POLYXLA_LIBTPU_HOST in environ else plan.program_environment(environ)
    addresses = environ.get(env.TORCH_TPU_SLICEBUILDER_ADDRESSES)
    if addresses and not environ.get(POLYXLA_SECRET):
        # TorchTPU's own launch, or the user's, has chosen where the processes meet, and knows no secret.
        variables[POLYXLA_SECRET] = shared_secret(environ, f"processes that meet at {addresses}")
    elif is_torchruns and not addresses:
        variables |= torchrun.environment(plan, {**environ, **variables}, os.cpu_count() or 1)
    is_first = environ.get(tpu.RANK, "0") == "0" and multiprocessing.parent_process() is None
    if is_first and POLYXLA_LIBTPU_HOST not in environ:
        count = emulated.accelerator.devices
        devices = "1 device" if count == 1 else f"{count} devices"
        emulated.say(f"{devices}, one for each process of the program")
    return variables
