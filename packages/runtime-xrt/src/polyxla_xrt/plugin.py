"""The hooks of runtime xrt: it says when it is asked for, and that it cannot run yet."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla import Claim, Discovery, Setting, hookimpl
from polyxla_xrt import env


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment when it holds a complete XRT configuration."""
    reason = _configuration(environ)
    return Discovery(
        claim=Claim.CONFIGURED if reason else Claim.NONE,
        reason=reason or f"{env.XRT_TPU_CONFIG} is not set",
        unavailable="this version cannot drive a TPU node yet",
        fix=f"Unset {env.XRT_TPU_CONFIG}, or set PJRT_DEVICE=CPU to train on this machine's CPU.",
        variables={
            name: Setting(environ[name], "environment") if name in environ else Setting(None, "default")
            for name in env.ALL
        },
    )


def _configuration(environ: Mapping[str, str]) -> str | None:
    if config := environ.get(env.XRT_TPU_CONFIG):
        return f"{env.XRT_TPU_CONFIG}={config}"
    if environ.get(env.XRT_DEVICE_MAP) and environ.get(env.XRT_WORKERS):
        return f"{env.XRT_DEVICE_MAP} with {env.XRT_WORKERS}"
    return None
