"""The hooks of runtime xrt: it says when it is asked for and how that is wrong; it cannot run yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyxla import Claim, Discovery, Setting, UsageError, hookimpl
from polyxla_xrt import env
from polyxla_xrt.contract import read
from polyxla_xrt.variables import find


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment when it holds a complete XRT configuration, right or wrong."""
    reason = _configuration(environ)
    bare = Discovery(
        claim=Claim.CONFIGURED if reason else Claim.NONE,
        reason=reason or f"{env.XRT_TPU_CONFIG} is not set",
        unavailable="this version cannot drive a TPU node yet",
        fix=f"Unset {env.XRT_TPU_CONFIG}, or set PJRT_DEVICE=CPU to train on this machine's CPU.",
        variables={
            name: Setting(environ[name], "environment") if name in environ else Setting(None, "default")
            for name in env.READ
            if name in env.CHOOSING or name in environ
        },
    )
    try:
        configuration = read(environ)
    except UsageError as error:
        origin = f" (from {error.where})" if error.where not in (None, reason) else ""
        wrong = replace(bare, unavailable=f"{error.what}{origin}", fix=error.fix)
        return replace(wrong, notes=env.remarks(environ))
    return replace(bare, notes=configuration.warnings if configuration else env.remarks(environ))


def _configuration(environ: Mapping[str, str]) -> str | None:
    if config := find(environ, env.XRT_TPU_CONFIG):
        return config.where
    if find(environ, env.XRT_DEVICE_MAP) and find(environ, env.XRT_WORKERS):
        return f"{env.XRT_DEVICE_MAP} with {env.XRT_WORKERS}"
    # All that a pod's launcher gives the hosts after the first.
    mesh, worker = find(environ, env.XRT_MESH_SERVICE_ADDRESS), find(environ, env.XRT_LOCAL_WORKER)
    return f"{mesh.where} with {worker.where}" if mesh and worker else None
