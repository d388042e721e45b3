"""Support for torchrun: its processes run the replicas, and only have to find each other.

They meet through torchrun's store, to which any process that reaches its port can write. What they read there
is therefore sealed with the job's secret, which the processes of one host derive from the user's key. On
several hosts, the user sets one. Otherwise the secret is in the store as well, and no safer than torchrun
itself, which unpickles what it finds there. Source: torch.distributed.elastic.rendezvous.dynamic_rendezvous.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import polyxla.env
from polyxla.contracts.job import Job
from polyxla.env import POLYXLA_SECRET
from polyxla.errors import UsageError
from polyxla.tpu import env
from polyxla.tpu.layout import Place, Plan, PlanT
from polyxla.tpu.monitor.server import monitored
from polyxla.tpu.secret import sealed, shared_secret, unsealed

MEET_TIMEOUT_S = 120
"""Longest wait for all of torchrun's processes to connect, in seconds."""
POLL_S = 0.2
"""Interval at which the first process of a host asks whether the others have finished, in seconds."""
_KEY = "polyxla/meeting"
_SECRET_KEY = "polyxla/secret"  # noqa: S105  (a key in the store, not a secret)
_meetings: dict[str, dict[str, str]] = {}
"""Where the processes of each run of torchrun meet, and their secret. A second launch in this process uses
the same devices."""
_launches = itertools.count()
"""Numbers this process's launches: the same number in all processes, which launch together."""


def process_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun has started on all hosts; None without torchrun."""
    return int(environ[env.WORLD_SIZE]) if environ.get(env.TORCHELASTIC_RUN_ID) else None


def check(plan: Plan, environ: Mapping[str, str]) -> None:
    """Check that torchrun, if it has started this process, has started as many processes as planned.

    Raises:
        UsageError: it has started another number.
    """
    started = process_count(environ)
    if started is None:
        return
    here = int(environ.get(env.LOCAL_WORLD_SIZE, started))
    if plan.kind == "CPU" and here != started:
        raise UsageError(
            f"torchrun has started {here} of {started} processes on this host, but replicas on the CPU must "
            "all be on one",
            where=f"{env.WORLD_SIZE}={started}",
            fix="Write torchrun --nnodes 1.",
        )
    if (started, here) != (plan.layout.process_count, len(plan.processes_here)):
        raise UsageError(
            f"torchrun has started {started} processes, but {plan.layout.replicas} replicas here are "
            f"{plan.layout}",
            where=f"{env.WORLD_SIZE}={started}",
            fix=f"Write torchrun --nproc-per-node {len(plan.processes_here)}.",
        )


def environment(plan: Plan, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
    """Return the variables of this process, which torchrun has started. Waits for process 0.

    Raises:
        UsageError: torchrun's store cannot be reached, or process 0 did not write to it in time.
    """
    run_id = environ[env.TORCHELASTIC_RUN_ID]
    # Kept, because a second launch in this process drives the same devices, whose addresses are fixed.
    if run_id not in _meetings:
        _meetings[run_id] = _agree(plan, environ)
    # torchrun hosts torch.distributed's store, so its address comes before the one that the plan chose.
    store = {name: environ[name] for name in (env.MASTER_ADDR, env.MASTER_PORT)}
    return plan.process_environment(_process(plan, environ), cpu_count, {**_meetings[run_id], **store})


def _process(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return this process's number in the plan; torchrun may number the hosts of a TPU in another order."""
    return plan.processes_here[int(environ.get(env.LOCAL_RANK, environ[env.RANK]))]


def run_here(job: Job, plan: PlanT, run: Callable[[Job, Place[PlanT]], list[Any]]) -> list[Any]:
    """Run the replicas of this process, which torchrun has started, and return their results.

    Args:
        job: the job.
        plan: where all replicas run.
        run: called in the environment that this process needs, with the place of its first replica.
    """
    environ = job.environ
    own = environment(plan, environ, os.cpu_count() or 1)
    whole, secret = {**environ, **own}, {POLYXLA_SECRET: own[POLYXLA_SECRET]}
    with _watched(plan, {**environ, **secret}) as variables, polyxla.env.temporary_environ(whole | variables):
        return run(job, Place(plan, _process(plan, environ)))


@contextlib.contextmanager
def _watched(plan: Plan, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Watch what runs in the context: the replicas of one process; yield the variables of the watch.

    torchrun notices only processes that end. The first process of each host monitors all of that host, as a
    launch without torchrun would.
    """
    if not plan.launching_hosts:
        yield {}
        return
    key = f"polyxla/monitor/{next(_launches)}/{plan.own_host}"
    store, number = _store(environ), int(environ.get(env.LOCAL_RANK, environ[env.RANK]))
    if number:
        yield {env.POLYXLA_MONITOR: _read(store, key, environ[POLYXLA_SECRET])}
        # An exception skips this. torchrun then ends the first process too, which would wait for the key
        # forever.
        store.set(f"{key}/{number}", "finished")
        return
    with monitored(plan.launching_hosts, plan.own_host, environ, plan.slices) as variables:
        _write(store, key, environ[POLYXLA_SECRET], variables[env.POLYXLA_MONITOR])
        yield variables
        others = [f"{key}/{other}" for other in range(1, len(plan.processes_here))]
        # The others may work for any time. If one of them fails, torchrun ends this process.
        while others and not store.check(others):
            time.sleep(POLL_S)


def _agree(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Agree on where the processes meet, through torchrun's own store."""
    address, port = environ[env.MASTER_ADDR], environ[env.MASTER_PORT]
    try:
        store = _store(environ)
        secret = _secret(store, environ)
        if environ[env.RANK] == "0":
            # One process chooses for all: ports are chosen at random.
            _write(store, _KEY, secret, json.dumps(plan.meeting(environ)))
        meeting: dict[str, str] = json.loads(_read(store, _KEY, secret))
    except Exception as error:
        raise UsageError(
            f"torchrun's processes cannot agree on where they meet: {error}",
            where=f"{env.MASTER_ADDR}={address}, {env.MASTER_PORT}={port}",
            fix="Leave TORCHELASTIC_USE_AGENT_STORE as torchrun sets it, so that torchrun hosts the store.",
        ) from error
    return {**meeting, POLYXLA_SECRET: secret}


def _secret(store: Any, environ: Mapping[str, str]) -> str:
    """Return the job's secret."""
    if given := environ.get(POLYXLA_SECRET):
        return given
    if environ.get(env.LOCAL_WORLD_SIZE, environ[env.WORLD_SIZE]) == environ[env.WORLD_SIZE]:
        run = (env.TORCHELASTIC_RUN_ID, env.MASTER_ADDR, env.MASTER_PORT)
        return shared_secret(environ, f"torchrun {[environ[name] for name in run]}")
    if environ[env.RANK] == "0":
        store.set(_SECRET_KEY, secrets.token_hex(32))
    # It waits until process 0 has written the secret.
    made: str = store.get(_SECRET_KEY).decode()
    return made


def _write(store: Any, key: str, secret: str, text: str) -> None:
    store.set(key, sealed(secret, key, text.encode()))


def _read(store: Any, key: str, secret: str) -> str:
    """Wait for what `_write` has written.

    Raises:
        ValueError: it is not from a process of this job.
    """
    return unsealed(secret, key, store.get(key)).decode()


def _store(environ: Mapping[str, str]) -> Any:
    """Connect to torchrun's own store, for the keys of this run."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address, port = environ[env.MASTER_ADDR], int(environ[env.MASTER_PORT])
    # torchrun's agent hosts the store; PrefixStore keeps the keys of this run apart from earlier ones.
    agents = TCPStore(address, port, is_master=False, timeout=dt.timedelta(seconds=MEET_TIMEOUT_S))
    return PrefixStore(environ[env.TORCHELASTIC_RUN_ID], agents)
