"""The owner of what a job keeps on its worker, from the job's name and the user's own key."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla.plugin import shared_secret
from polyxla_xrt import env
from polyxla_xrt.config.variables import find


def owner_of(environ: Mapping[str, str]) -> str:
    """Return the secret by which a worker knows the owner of what a job keeps; empty if the job has no name.

    Only this user can derive it, on this machine.

    Raises:
        UsageError: the user has no private directory.
    """
    name = find(environ, env.POLYXLA_XRT_JOB)
    return shared_secret(environ, f"kept by {name.text}") if name else ""
