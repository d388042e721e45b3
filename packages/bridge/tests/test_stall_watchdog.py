"""Replicas that wait in vain, in real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap

import pytest

from polyxla_bridge import env

TIMEOUT_S = 120
HEAD = """
import os, sys, threading, time
import numpy as np
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text
from polyxla_bridge import env
from polyxla_bridge.engine import stall_watchdog as watch
from polyxla_bridge.engine.engine import ArrayType
from polyxla_bridge.engine.jax_engine import JaxEngine

OPTIONS = xla_client.CompileOptions().SerializeAsString()
share = env.current()

SUM = f'''HloModule sum_of_all, replica_count={share.replicas}
add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
ENTRY main {{ x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={{}}, to_apply=add }}'''
OWN = "HloModule own\\nENTRY main { x = f32[] parameter(0) ROOT y = f32[] sine(x) }"
def compiled(engine, text):
    return engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), OPTIONS)

def run(engine, executable, index, value):
    data = memoryview(np.float32([value]).view(np.uint8))
    argument = engine.from_host(engine.devices[index], ArrayType("float32", ()), data)
    (result,) = engine.execute(executable, engine.devices[index], [argument])
    return engine.to_host(result)

def value(promise):
    return float(np.frombuffer(promise.result(60), np.float32)[0])

def tell(news):
    open(os.path.join(os.environ["NEWS"], news), "w").close()

def hear(news):
    "Wait for another thread or process to tell."
    end = time.monotonic() + 60
    while not os.path.exists(os.path.join(os.environ["NEWS"], news)):
        assert time.monotonic() < end, news
        time.sleep(0.01)
"""


def outcomes(
    code: str, replicas: int, processes: int, stall_timeout_s: str = "2"
) -> list[tuple[int, str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    news = tempfile.TemporaryDirectory()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(code)],
            env={
                **os.environ,
                "POLYXLA_BRIDGE_REPLICAS": str(replicas),
                "POLYXLA_BRIDGE_PROCESSES": str(processes),
                "POLYXLA_BRIDGE_PROCESS": str(process),
                "POLYXLA_BRIDGE_COORDINATOR": f"127.0.0.1:{port}",
                env.POLYXLA_STALL_TIMEOUT_S: stall_timeout_s,
                "NEWS": news.name,
                "NPROC": str(4 * replicas // processes),
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        found = []
        for one in running:
            out, err = one.communicate(timeout=TIMEOUT_S)
            found.append((one.returncode, out, err))
        return found
    finally:
        for one in running:
            one.kill()
            one.communicate(timeout=TIMEOUT_S)
        news.cleanup()


def test_a_replica_that_waits_in_vain_tells_where_all_are_and_ends() -> None:
    ((code, _, err),) = outcomes(
        """
        def the_place_where_replica_1_hangs():
            time.sleep(60)
        engine = JaxEngine(share)
        every = compiled(engine, SUM)
        for index in share.local:
            run(engine, every, index, 1).result
        engine.finish(30)
        run(engine, every, 0, 1)
        the_place_where_replica_1_hangs()
        """,
        2,
        1,
    )
    assert code == 5, err
    assert "waits in vain for others to join its collectives (replica 0: in sum_of_all with all-reduce" in err
    assert "replica 1: idle for" in err
    assert "the_place_where_replica_1_hangs" in err
    assert "POLYXLA_STALL_TIMEOUT_S=2 " in err


def test_a_handler_is_called_once_instead() -> None:
    ((code, out, err),) = outcomes(
        """
        texts = []
        watch.on_stall(texts.append)
        engine = JaxEngine(share)
        every = compiled(engine, SUM)
        promises = [run(engine, every, 0, 1)]
        deadline = time.monotonic() + 30
        while not texts and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        promises.append(run(engine, every, 1, 1))
        print(len(texts), [value(one) for one in promises])
        engine.close()
        """,
        2,
        1,
    )
    assert code == 0, err
    assert "1 [2.0, 2.0]" in out


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("reason", ["compiles", "computes", "computes often"])
def test_one_that_compiles_or_computes_may_keep_others_waiting(processes: int, reason: str) -> None:
    found = outcomes(
        f"""
        engine = JaxEngine(share)
        every, own = compiled(engine, SUM), compiled(engine, OWN)

        def keep_waiting(reason):
            if reason == "compiles":
                fast = engine._clients.compile
                engine._clients.compile = lambda *arguments: (hear("waited long"), fast(*arguments))[1]
                compiled(engine, OWN.replace("sine", "cosine"))
            elif reason == "computes":
                # What the device's thread does with a long program.
                stream = engine._streams[1]
                stream.run(lambda: (stream.enter("long", ()), hear("waited long"))).result()
            else:
                while not os.path.exists(os.path.join(os.environ["NEWS"], "waited long")):
                    value(run(engine, own, 1, 1))

        def replica(index):
            if index == 1:
                keep_waiting({reason!r})
            promise = run(engine, every, index, 1)
            if index == 0:
                while (position := engine.positions()[0]).program != "sum_of_all" or position.seconds < 7:
                    assert not promise.done(), "nobody kept it waiting"
                    time.sleep(0.05)
                tell("waited long")
            sums[index] = value(promise)

        sums = dict.fromkeys(share.local)
        threads = [threading.Thread(target=replica, args=(index,)) for index in share.local]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        engine.close()
        print(sums)
        """,
        2,
        processes,
        stall_timeout_s="3",
    )
    assert [code for code, _, _ in found] == [0] * processes, [err for _, _, err in found]
    expected = ["{0: 2.0}\n", "{1: 2.0}\n"] if processes == 2 else ["{0: 2.0, 1: 2.0}\n"]
    assert [out for _, out, _ in found] == expected


def test_a_process_that_hangs_is_no_reason_to_wait() -> None:
    waits, hangs = outcomes(
        """
        engine = JaxEngine(share)
        every = compiled(engine, SUM)
        if share.process == 1:
            time.sleep(60)
        run(engine, every, 0, 1)
        time.sleep(60)
        """,
        2,
        2,
    )
    assert waits[0] == 5, waits[2]
    assert "replica 0: in sum_of_all with all-reduce" in waits[2]
    # By jaxlib, once process 0 is gone.
    assert "UNAVAILABLE" in hangs[2]


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_timeout_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"POLYXLA_STALL_TIMEOUT_S='.*' is not a number of seconds above 0"):
        env.from_environ({env.POLYXLA_STALL_TIMEOUT_S: text})
