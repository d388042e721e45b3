"""Which cores the variables of XRT describe, and why they cannot be used. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyxla import UsageError
from polyxla.plugin import Claim, Discovery, Setting, import_problem
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration, read_configuration
from polyxla_xrt.config.variables import find
from polyxla_xrt.plan import found_devices

_EXAMPLE = (
    f"Set {env.XRT_TPU_CONFIG}='tpu_worker;0;HOST:8470' for a worker at HOST, or "
    "'localservice;0;localhost:51011' for a worker that polyxla starts on this host."
)


def discover(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment if it holds a complete XRT configuration, valid or not."""
    reason = _reason(environ)
    misspelt = {} if reason else env.misspelt(environ)
    bare = Discovery(
        claim=Claim.CONFIGURED if reason or misspelt else Claim.NONE,
        reason=reason
        or ", ".join(f"{name}={environ[name]}" for name in misspelt)
        or f"{env.XRT_TPU_CONFIG} is not set",
        variables={
            name: Setting(environ[name], "environment") if name in environ else Setting(None, "default")
            for name in env.READ
            if name in env.CHOOSING or name in environ
        },
    )
    if misspelt:
        # The job is meant for a TPU node: it must not run on this machine's CPU instead.
        name, near = next(iter(misspelt.items()))
        fix = f"Did you mean {near}? Unset {name} if this job is not for a TPU node."
        return replace(
            bare, unavailable=f"{name} is not an XRT variable", fix=fix, notes=env.warnings(environ)
        )
    try:
        configuration = read_configuration(environ)
    except UsageError as error:
        origin = f" (from {error.where})" if error.where not in (None, reason) else ""
        wrong = replace(bare, unavailable=f"{error.what}{origin}", fix=error.fix)
        return replace(wrong, notes=env.warnings(environ))
    if configuration is None:
        unset = replace(bare, unavailable="no variable describes a TPU node", fix=_EXAMPLE)
        return replace(unset, notes=env.warnings(environ))
    if problem := import_problem():
        return replace(bare, unavailable=problem.what, fix=problem.fix, notes=configuration.warnings)
    return replace(
        bare,
        kind=configuration.kind,
        devices=found_devices(configuration),
        host_count=configuration.hosts,
        notes=configuration.warnings,
    )


def required_configuration(environ: Mapping[str, str]) -> Configuration:
    """Return the configuration of the environment.

    Raises:
        UsageError: there is none, or it is invalid.
    """
    configuration = read_configuration(environ)
    if configuration is None:
        raise UsageError("no variable describes a TPU node", where="--runtime xrt", fix=_EXAMPLE)
    return configuration


def _reason(environ: Mapping[str, str]) -> str | None:
    if config := find(environ, env.XRT_TPU_CONFIG):
        return config.where
    if find(environ, env.XRT_DEVICE_MAP) and find(environ, env.XRT_WORKERS):
        return f"{env.XRT_DEVICE_MAP} with {env.XRT_WORKERS}"
    # A pod's launcher sets only these on the hosts after the first.
    mesh, worker = find(environ, env.XRT_MESH_SERVICE_ADDRESS), find(environ, env.XRT_LOCAL_WORKER)
    return f"{mesh.where} with {worker.where}" if mesh and worker else None
