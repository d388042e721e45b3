"""Support for torchrun: its processes run the replicas, and only have to find each other."""

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
"""Longest wait for all of torchrun's processes to connect, in seconds."""
_KEY = "polyxla/coordinator"


def process_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun has started; None without torchrun.

    Raises:
        UsageError: the processes run on several hosts.
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
    """Check that torchrun, if it has started this process, has started as many processes as planned.

    Raises:
        UsageError: it has started another number.
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
    """Return the variables of this process, which torchrun has started. Waits for process 0.

    Raises:
        UsageError: torchrun's store cannot be reached, or process 0 did not write to it in time.
    """
    from polyxla_bridge import env as bridge

    rank = int(environ[env.RANK])
    address, port = environ[env.MASTER_ADDR], environ[env.MASTER_PORT]
    addresses = {
        bridge.POLYXLA_BRIDGE_COORDINATOR: _coordinator(
            rank, address, int(port), environ[env.TORCHELASTIC_RUN_ID]
        ),
        env.MASTER_ADDR: address,
        env.MASTER_PORT: port,
    }
    return plan.process_environment(rank, cpu_count, addresses)


def run_here(run: Any, plan: Plan, environ: Mapping[str, str]) -> list[Any]:
    """Run the replicas of this process, which torchrun has started, and return their results.

    Args:
        run: called with the process's number, in the environment that it needs.
        plan: where all replicas run.
        environ: the job's environment.
    """
    whole = {**environ, **environment(plan, environ, os.cpu_count() or 1)}
    with polyxla.env.temporary_environ(whole):
        results: list[Any] = run(int(environ[env.RANK]))
    return results


@functools.cache
def _coordinator(rank: int, address: str, port: int, run_id: str) -> str:
    """Agree on the address of the coordinator of jaxlib's clients, through torchrun's own store."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = dt.timedelta(seconds=MEET_TIMEOUT_S)
    try:
        store = PrefixStore(run_id, TCPStore(address, port, is_master=False, timeout=timeout))
        if rank == 0:
            store.set(_KEY, f"{LOCALHOST}:{free_ports(1)[0]}")
        return str(store.get(_KEY).decode())
    except Exception as error:
        raise UsageError(
            f"torchrun's processes cannot agree on the coordinator's address: {error}",
            where=f"{env.MASTER_ADDR}={address}, {env.MASTER_PORT}={port}",
            fix="Leave TORCHELASTIC_USE_AGENT_STORE as torchrun sets it, so that torchrun hosts the store.",
        ) from error
