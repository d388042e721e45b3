"""Processes that torchrun has started: they are replicas' processes already, and only have to meet."""

from __future__ import annotations

import datetime as dt
import functools
import os
from collections.abc import Mapping
from typing import Any

import polyxla.env
from polyxla import UsageError
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla_pjrt import env
from polyxla_pjrt.layout import Plan

MEET_TIMEOUT_S = 120
"""Longest wait for all of torchrun's processes to be there, in seconds."""
_KEY = "polyxla/coordinator"


def process_count(environ: Mapping[str, str]) -> int | None:
    """Return how many processes torchrun has started; None where it has not.

    Raises:
        UsageError: they are on several hosts.
    """
    if not environ.get(env.TORCHELASTIC_RUN_ID):
        return None
    count = int(environ[env.WORLD_SIZE])
    if environ.get(env.LOCAL_WORLD_SIZE, str(count)) != str(count):
        raise UsageError(
            f"torchrun has started {environ[env.LOCAL_WORLD_SIZE]} of {count} processes on this host, but "
            "replicas on the CPU must all be on one",
            where=f"{env.WORLD_SIZE}={count}",
            fix="Write torchrun --nnodes 1.",
        )
    return count


def check(plan: Plan, environ: Mapping[str, str]) -> None:
    """Check that torchrun, if it is what started this process, has started as many as there are to be.

    Raises:
        UsageError: it has not.
    """
    started = process_count(environ)
    if started is not None and started != plan.layout.process_count:
        raise UsageError(
            f"torchrun has started {started} processes, but {plan.layout.replicas} replicas here are "
            f"{plan.layout}",
            where=f"{env.WORLD_SIZE}={started}",
            fix=f"Write torchrun --nproc-per-node {plan.layout.process_count}.",
        )


def environment(plan: Plan, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
    """Return what is laid over the environment of this one of torchrun's processes; waits for the others.

    Raises:
        UsageError: torchrun's store cannot be reached, or process 0 did not come to it in time.
    """
    from polyxla_bridge import env as bridge

    rank = int(environ[env.RANK])
    address, port = environ[env.MASTER_ADDR], environ[env.MASTER_PORT]
    meeting = {
        bridge.POLYXLA_BRIDGE_COORDINATOR: _coordinator(
            rank, address, int(port), environ[env.TORCHELASTIC_RUN_ID]
        ),
        env.MASTER_ADDR: address,
        env.MASTER_PORT: port,
    }
    return plan.one(rank, cpu_count, meeting)


def run_here(run: Any, plan: Plan, environ: Mapping[str, str]) -> list[Any]:
    """Be one of torchrun's processes; return the results of its own replicas.

    Args:
        run: called with the process's number, in the environment that it needs.
        plan: where all replicas are.
        environ: the job's environment.
    """
    whole = {**environ, **environment(plan, environ, os.cpu_count() or 1)}
    with polyxla.env.lent(whole):
        results: list[Any] = run(int(environ[env.RANK]))
    return results


@functools.cache
def _coordinator(rank: int, address: str, port: int, run_id: str) -> str:
    """Agree on where jaxlib's clients meet, through torchrun's own store."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = dt.timedelta(seconds=MEET_TIMEOUT_S)
    try:
        store = PrefixStore(run_id, TCPStore(address, port, is_master=False, timeout=timeout))
        if rank == 0:
            store.set(_KEY, f"{LOCALHOST}:{free_ports(1)[0]}")
        return str(store.get(_KEY).decode())
    except Exception as error:
        raise UsageError(
            f"torchrun's processes cannot agree where to meet: {error}",
            where=f"{env.MASTER_ADDR}={address}, {env.MASTER_PORT}={port}",
            fix="Let torchrun host the store itself: leave TORCHELASTIC_USE_AGENT_STORE as it sets it.",
        ) from error
