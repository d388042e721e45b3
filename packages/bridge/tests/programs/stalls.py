"""Programs of test_stall_watchdog.py; each process of a job runs one of the functions."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import Any

from engine_helpers import (
    OPTIONS,
    SETTINGS,
    is_set,
    main,
    module,
    open_engine,
    run,
    say,
    set_flag,
    summing,
    value,
    wait_for,
)

from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.jax_engine import JaxEngine

OWN = "HloModule own\nENTRY main { x = f32[] parameter(0) ROOT y = f32[] sine(x) }"


def the_place_where_replica_1_hangs() -> None:
    time.sleep(60)


def replica_hangs() -> None:
    engine = open_engine()
    every = engine.compile(summing(), OPTIONS)
    for index in SETTINGS.local:
        run(engine, every, index, 1)
    engine.finish(30)
    run(engine, every, 0, 1)
    the_place_where_replica_1_hangs()


def replica_returns() -> None:
    engine = open_engine()
    every = engine.compile(summing(), OPTIONS)
    for result in [run(engine, every, index, 1) for index in SETTINGS.local]:
        value(result)
    if 1 in SETTINGS.local:
        engine.retire(1)
    if 0 not in SETTINGS.local:
        wait_for("reported")
        os._exit(0)
    since = time.monotonic()

    def end(text: str, returned: frozenset[int]) -> None:
        say(round(time.monotonic() - since, 1))
        set_flag("reported")
        stall_watchdog._end(text, returned)

    stall_watchdog.on_stall(end)
    run(engine, every, 0, 1)
    time.sleep(60)


def process_of_a_returned_replica_ends() -> None:
    engine = open_engine()
    every = engine.compile(summing(), OPTIONS)
    value(run(engine, every, SETTINGS.process, 1))
    if SETTINGS.process == 1:
        engine.retire(1)
        engine.finish(30)
        os._exit(0)
    try:
        value(run(engine, every, 0, 1))
    except Exception as error:
        say(error)


LONG = "900000000"
COMPUTES_ON = """HloModule long, replica_count=2
    add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
    ends { t = (s32[], f32[]) parameter(0) i = s32[] get-tuple-element(t), index=0
      n = s32[] constant(NUMBER) ROOT c = pred[] compare(i, n), direction=LT }
    body { t = (s32[], f32[]) parameter(0) i = s32[] get-tuple-element(t), index=0
      x = f32[] get-tuple-element(t), index=1 one = s32[] constant(1) j = s32[] add(i, one)
      y = f32[] sine(x) ROOT u = (s32[], f32[]) tuple(j, y) }
    ENTRY main { x = f32[] parameter(0) r = f32[] all-reduce(x), replica_groups={}, to_apply=add
      zero = s32[] constant(0) t = (s32[], f32[]) tuple(zero, r)
      w = (s32[], f32[]) while(t), condition=ends, body=body
      ROOT y = f32[] get-tuple-element(w), index=1 }"""

TWO_MEET = """HloModule two, replica_count=3
    add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
    ENTRY main { x = f32[] parameter(0)
      ROOT r = f32[] all-reduce(x), replica_groups={{0,1},{2}}, to_apply=add }"""


def others_return(reason: str) -> None:
    """Let replicas work for twice as long as those that wait for one that has returned may."""
    engine = JaxEngine(SETTINGS)
    if reason == "computes on":
        short, long = (engine.compile(module(COMPUTES_ON.replace("NUMBER", n)), OPTIONS) for n in ("1", LONG))
        results = [run(engine, long, 0, 1), run(engine, short, 1, 1)]
        value(results[1])
        engine.retire(1)
        since = time.monotonic()
        results[0].result(120)
        # Otherwise the program is too short to show anything.
        assert time.monotonic() - since > 1.5 * stall_watchdog.RETIRED_TIMEOUT_S
    else:
        pair = engine.compile(module(TWO_MEET), OPTIONS)
        engine.retire(2)
        results = [run(engine, pair, 0, 1)]
        time.sleep(2 * stall_watchdog.RETIRED_TIMEOUT_S)
        results.append(run(engine, pair, 1, 1))
    for result in results:
        value(result)
    engine.close()
    say("done")


def handler_is_called() -> None:
    reports: list[str] = []
    stall_watchdog.on_stall(lambda text, _: reports.append(text))
    engine = open_engine()
    every = engine.compile(summing(), OPTIONS)
    results = [run(engine, every, 0, 1)]
    deadline = time.monotonic() + 30
    while not reports and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    results.append(run(engine, every, 1, 1))
    say(len(reports), [value(result) for result in results])
    engine.close()


def stay_busy(engine: JaxEngine, reason: str) -> None:
    """Keep replica 1 busy until the flag is set."""
    own = engine.compile(module(OWN), OPTIONS)
    if reason == "compiles":
        fast = engine._clients.compile

        def slow(*arguments: Any) -> Any:
            wait_for("waited long")
            return fast(*arguments)

        engine._clients.compile = slow  # type: ignore[assignment,method-assign]
        engine.compile(module(OWN.replace("sine", "cosine")), OPTIONS)
    elif reason == "computes":
        thread = engine._threads[1]

        def long() -> None:
            # As for a program: the device's thread records it, then runs it.
            thread.enter("long", ())
            wait_for("waited long")

        thread.run(long).result()
    else:
        while not is_set("waited long"):
            value(run(engine, own, 1, 1))


def wait_long(engine: JaxEngine, result: Future[Any]) -> None:
    """Set the flag when replica 0 has waited longer than the timeout."""
    while (activity := engine.activities()[0]).program != "sum_of_all" or activity.seconds < 7:
        assert not result.done(), "replica 1 was not busy"
        time.sleep(0.05)
    set_flag("waited long")


def replica_is_busy(reason: str) -> None:
    engine = JaxEngine(SETTINGS)
    every = engine.compile(summing(), OPTIONS)

    def replica(index: int) -> None:
        if index == 1:
            stay_busy(engine, reason)
        result = run(engine, every, index, 1)
        if index == 0:
            wait_long(engine, result)
        sums[index] = value(result)

    sums: dict[int, float | None] = dict.fromkeys(SETTINGS.local)
    threads = [threading.Thread(target=replica, args=(index,)) for index in SETTINGS.local]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.close()
    say(sums)


def process_hangs() -> None:
    engine = JaxEngine(SETTINGS)
    every = engine.compile(summing(), OPTIONS)
    if SETTINGS.process == 1:
        wait_for("reported")
        say("process 0 has ended")
        os._exit(0)

    def end(text: str, returned: frozenset[int]) -> None:
        set_flag("reported")
        stall_watchdog._end(text, returned)

    stall_watchdog.on_stall(end)
    run(engine, every, 0, 1)
    time.sleep(60)


if __name__ == "__main__":
    main(globals())
