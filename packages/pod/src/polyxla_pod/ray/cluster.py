"""The connection to a Ray cluster, and the chips of a slice, reserved together. Waits have deadlines."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from polyxla import UsageError
from polyxla_pod.ray import env
from polyxla_pod.ray.slices import CHIPS, Slice

CONNECT_S = 15.0
"""Longest wait for the cluster's answer, in seconds. Ray itself waits for minutes."""
REACH_S = 5.0
"""Longest wait for a connection to the address, in seconds."""
RESERVE_S = 15.0
"""Longest wait for the chips, in seconds."""


def connect(address: str | None, environ: Mapping[str, str]) -> None:
    """Connect this process to a cluster, unless the program has done so.

    Args:
        address: as for ``ray.init``; None for that of the environment, or else this machine's cluster.
        environ: this process's environment.

    Raises:
        UsageError: there is no cluster, or it does not answer.
    """
    import ray

    if ray.is_initialized():
        return
    where = f"address={address}" if address else f"{env.RAY_ADDRESS}={environ.get(env.RAY_ADDRESS, '')}"
    chosen = address or environ.get(env.RAY_ADDRESS) or "auto"
    if problem := _unreachable(chosen) or _init(chosen):
        raise UsageError(
            f"there is no Ray cluster: {problem}",
            where=where,
            fix=f"Set {env.RAY_ADDRESS} to the head's address, such as 10.0.0.1:6379 or ray://10.0.0.1:10001.",
        )


def reserve(slice_: Slice) -> Any:
    """Return a placement group of all chips of a slice, a bundle for each host in the order of the hosts.

    Raises:
        UsageError: another job holds chips of it.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [{CHIPS: host.chips} for host in slice_.hosts],
        strategy="STRICT_SPREAD",
        bundle_label_selector=[dict(host.labels) for host in slice_.hosts],
    )
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise UsageError(
            f"Ray did not give all chips of {slice_} within {RESERVE_S:g} s: other jobs hold some",
            where="the Ray cluster",
            fix="End those jobs, or wait for them, or for a node that was just lost: see `ray status`.",
        )
    return group


def _unreachable(address: str) -> str | None:
    """Return why nothing answers at the address, if it has a host and a port."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        if not parts.hostname or not parts.port:
            return None
        socket.create_connection((parts.hostname, parts.port), REACH_S).close()
    except (OSError, ValueError) as error:
        return f"{address} cannot be reached: {error}"
    return None


def _init(address: str) -> str | None:
    """Connect; return why that is not possible. The thread of a cluster that hangs is left behind."""
    import ray

    problems: list[str | None] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            problems.append(None)
        except Exception as error:
            problems.append(str(error).partition("\n")[0])

    thread = threading.Thread(target=init, name="polyxla-ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return problems[0] if problems else f"{address} did not answer within {CONNECT_S:g} s"
