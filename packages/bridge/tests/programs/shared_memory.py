"""Programs of test_shared_memory.py; each process of a job runs one of the functions."""

from __future__ import annotations

import os
import threading
import time

from engine_helpers import OPTIONS, SETTINGS, main, run, say, set_flag, summing, value, wait_for

from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.jax_engine import JaxEngine


def sum_up() -> None:
    engine = JaxEngine(SETTINGS)
    result = run(engine, engine.compile(summing(), OPTIONS), SETTINGS.process, SETTINGS.process + 1)
    say(engine._clients.memory.is_shared, value(result))
    engine.close()


def wait_for_the_last() -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(summing(), OPTIONS)
    value(run(engine, executable, SETTINGS.process, 1))
    if SETTINGS.process == SETTINGS.processes - 1:
        say("ready")
        time.sleep(60)
    result = run(engine, executable, SETTINGS.process, 1)
    say("ready")
    try:
        value(result)
    except Exception as error:
        say(error)


def leave_without_the_last() -> None:
    engine = JaxEngine(SETTINGS)
    executable = engine.compile(summing(), OPTIONS)
    value(run(engine, executable, SETTINGS.process, 1))
    # Otherwise the report would end the process.
    stall_watchdog.on_stall(lambda text, _: say(text.splitlines()[0]))
    if SETTINGS.process == 0:
        try:
            value(run(engine, executable, 0, 1))
        except Exception as error:
            say(error)
        set_flag("noticed")
    engine.close()
    # The process lives on without its engine.
    wait_for("noticed")


def leave_while_waiting() -> None:
    engine = JaxEngine(SETTINGS)
    result = run(engine, engine.compile(summing(), OPTIONS), 0, 1)

    def report() -> None:
        try:
            value(result)
        except Exception as error:
            say(error)

    waiting = threading.Thread(target=report)
    waiting.start()
    time.sleep(0.3)
    # Closing the engine would first wait for the replica.
    engine._clients.memory.leave()
    waiting.join(10)
    os._exit(0)


main(globals())
