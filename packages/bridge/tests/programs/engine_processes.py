"""Programs of test_engine_processes.py; each process of a job runs one of the functions."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import threading
import time
from typing import Any

from engine_helpers import OPTIONS, SETTINGS, main, module, run, say, set_flag, summing, value, wait_for
from jax._src import xla_bridge
from jaxlib import _jax

from polyxla_bridge.engine import clients, coordination_service
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.programs import compile_once

OWN = "HloModule own\nENTRY main { x = f32[] parameter(0) ROOT y = f32[] add(x, x) }"
# jaxlib numbers the modules that a process parses: parsed in this order, each has the same number everywhere.
PROGRAMS = {name: summing(name) for name in ("of_0", "of_1", "of_2")}


def one_program() -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(summing(), OPTIONS)
    results = [run(engine, executable, index, index + 1) for index in SETTINGS.local]
    total = SETTINGS.replicas * (SETTINGS.replicas + 1) / 2
    say(engine.compiles, all(value(result) == total for result in results), executable.name)
    engine.close()
    say(
        [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("polyxla") and thread.is_alive()
        ]
    )


def different_programs() -> None:
    engine = JaxEngine(SETTINGS)
    process, processes = SETTINGS.process, SETTINGS.processes
    engine.compile(PROGRAMS[f"of_{process}"], OPTIONS)
    own = engine.compiles
    # Otherwise a process that is early would compile the others' programs too.
    set_flag(f"compiled-{process}")
    for other in range(processes):
        wait_for(f"compiled-{other}")
    # In a different order in each process, so that no process waits for one that waits for it.
    order = [(process + i) % processes for i in range(processes)]
    every = {i: engine.compile(PROGRAMS[f"of_{i}"], OPTIONS) for i in order}
    results = [value(run(engine, every[i], process, 1)) for i in range(processes)]
    say(own, engine.compiles, set(results) == {float(SETTINGS.replicas)})
    engine.close()


def compiler_error() -> None:
    engine = JaxEngine(SETTINGS)
    try:
        engine.compile(module("HloModule grows\nENTRY main { ROOT x = f32[<=4] parameter(0) }"), OPTIONS)
    except Exception as error:
        is_known = "dynamic shapes are not supported" in str(error)
        say(engine.compiles, type(error).__name__, is_known)
    say(value(run(engine, engine.compile(summing(), OPTIONS), SETTINGS.process, 1)))
    engine.close()


def stopped_compiler() -> None:
    compile_once.HEARTBEAT_TIMEOUT_S = 1.0
    engine = JaxEngine(SETTINGS)
    if SETTINGS.process == 0:
        # Claims the program, and does not compile it.
        coordinator = engine._compiler._coordinator
        assert coordinator is not None
        coordinator.claim(hashlib.sha256(PROGRAMS["of_0"] + OPTIONS).hexdigest())
        set_flag("claimed")
    else:
        wait_for("claimed")
        started = time.monotonic()
        engine.compile(PROGRAMS["of_0"], OPTIONS)
        say(engine.compiles, time.monotonic() - started < 20)
    engine.close()


def strangers_values() -> None:
    """What a stranger can write to the store: a program in the place of ours, and news of the replicas."""
    engine = JaxEngine(SETTINGS)
    fingerprint = hashlib.sha256(PROGRAMS["of_0"] + OPTIONS).hexdigest()
    if SETTINGS.process == 0:
        text = f"HloModule own, replica_count={SETTINGS.replicas}\nENTRY main {{ x = f32[] parameter(0) "
        other = engine.compile(module(f"{text} ROOT r = f32[] constant(-1) }}"), OPTIONS)
        program = engine._compiler.serialize(other)
        link: Any = engine._clients.link
        for name, value_ in (("claim", b"1"), ("0", program), ("end", b'{"chunks": 1, "is_hit": false}')):
            link.key_value_set_bytes(f"polyxla/programs/{fingerprint}/{name}", value_)
        link.key_value_set_bytes("polyxla/heartbeats/7", b"1")
        link.key_value_set_bytes("polyxla/retired/1", b"")
        set_flag("written")
    wait_for("written")
    own = engine.compiles
    executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
    total = value(run(engine, executable, SETTINGS.process, 1))
    news = sorted(engine._progress.retired()), "7" in engine._progress.heartbeats()
    say(engine.compiles - own, total, *news)
    # The other process must not read that this one has retired.
    set_flag(f"read-{SETTINGS.process}")
    wait_for(f"read-{1 - SETTINGS.process}")
    engine.close()


def long_compile() -> None:
    compile_once.HEARTBEAT_TIMEOUT_S = 3.0
    engine = JaxEngine(SETTINGS)
    compile_ = engine._clients.compile

    def slow(*arguments: Any) -> Any:
        set_flag("began")
        time.sleep(7)
        return compile_(*arguments)

    if SETTINGS.process == 0:
        engine._clients.compile = slow  # type: ignore[assignment,method-assign]
    else:
        wait_for("began")
    executable = engine.compile(summing(), OPTIONS)
    say(engine.compiles, value(run(engine, executable, SETTINGS.process, 1)))
    engine.close()


def late_replica(seconds: str) -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(summing(), OPTIONS)
    if SETTINGS.process == 1:
        time.sleep(float(seconds))
    say(value(run(engine, executable, SETTINGS.process, 1)))
    engine.close()


def backends_of_jax() -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
    results = [run(engine, executable, index, 1) for index in SETTINGS.local]
    say([value(result) for result in results], xla_bridge._backends)
    engine.close()


def process_0_waits(ends: str) -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
    value(run(engine, executable, SETTINGS.process, 1))
    started = time.monotonic()
    if SETTINGS.process == 0:
        set_flag("leaving")
    else:
        wait_for("leaving")
        time.sleep(1)
        if ends == "dies":
            os._exit(0)
        engine.compile(PROGRAMS["of_1"], OPTIONS)
    engine.close(others_s=60)
    say(SETTINGS.process == 1 or 1 < time.monotonic() - started < 30)


def one_stays_too_long() -> None:
    engine = JaxEngine(SETTINGS)
    if SETTINGS.process == 1:
        wait_for("left")
        os._exit(0)
    try:
        engine.close(others_s=0.5)
    except Exception as error:
        say(error)
    set_flag("left")


def a_failed_one_is_waited_for() -> None:
    """Process 1 fails in a collective that process 0 never joins, because it waits for process 1."""
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
    if SETTINGS.process == 0:
        wait_for("failed")
        say(sorted(engine._progress.retired()))
        os._exit(0)
    run(engine, executable, 1, 1)
    started = time.monotonic()
    try:
        engine.close(0.5)
    except Exception as error:
        say("had not finished after 0.5 s" in str(error), time.monotonic() - started < 20)
    set_flag("failed")
    os._exit(1)


def shorten_heartbeats() -> None:
    coordination_service.HEARTBEAT_TIMEOUT_S = 3
    client = functools.partial(_jax.get_distributed_runtime_client, heartbeat_timeout=3)
    _jax.get_distributed_runtime_client = client


def one_works_alone(process: str, others: str) -> None:
    shorten_heartbeats()
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(summing(), OPTIONS)
    value(run(engine, executable, SETTINGS.process, 1))
    if SETTINGS.process == int(process):
        wait_for("the others have finished")
        time.sleep(10)
        result = value(run(engine, engine.compile(module(OWN), OPTIONS), SETTINGS.process, 1))
        say(SETTINGS.coordinator, result)
    else:
        set_flag("the others have finished")
        if others == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    engine.close()


def one_is_missing() -> None:
    set_flag(f"{SETTINGS.process} is here")
    wait_for(f"{2 - SETTINGS.process} is here")
    try:
        clients.Clients(SETTINGS, timeout_s=3)
    except Exception as error:
        say(error)


if __name__ == "__main__":
    main(globals())
