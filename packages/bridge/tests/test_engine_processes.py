"""Replicas in several real processes: engines that meet, compile once between them, and part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polyxla_bridge.engine import startup_barrier
from polyxla_bridge.env import Share
from polyxla_bridge.errors import PjrtError

TIMEOUT_S = 120
HEAD = """
import os, sys, time, threading
import numpy as np
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text
from polyxla_bridge import env
from polyxla_bridge.engine import stall_watchdog as watch
from polyxla_bridge.programs import compile_coordination as board
from polyxla_bridge.engine.engine import ArrayType
from polyxla_bridge.engine.jax_engine import JaxEngine

OPTIONS = xla_client.CompileOptions().SerializeAsString()
share = env.current()

def summing(name="sum_of_all", factor=1):
    text = f'''HloModule {name}, replica_count={share.replicas}
    add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
    ENTRY main {{ x = f32[] parameter(0) k = f32[] constant({factor}) y = f32[] multiply(x, k)
      ROOT r = f32[] all-reduce(y), replica_groups={{}}, to_apply=add }}'''
    return hlo_module_from_text(text).as_serialized_hlo_module_proto()

# A module carries a number, by the order in which it was made: that is the same here in all processes.
PROGRAMS = {name: summing(name) for name in ("of_0", "of_1", "of_2")}

def run(engine, executable, index, value):
    data = memoryview(np.float32([value]).view(np.uint8))
    argument = engine.from_host(engine.devices[index], ArrayType("float32", ()), data)
    (result,) = engine.execute(executable, engine.devices[index], [argument])
    return engine.to_host(result)

def value(promise):
    return float(np.frombuffer(promise.result(40), np.float32)[0])

def tell(news):
    open(os.path.join(os.environ["NEWS"], news), "w").close()

def hear(news):
    "Wait for another thread or process to tell."
    end = time.monotonic() + 60
    while not os.path.exists(os.path.join(os.environ["NEWS"], news)):
        assert time.monotonic() < end, news
        time.sleep(0.01)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(
    code: str, replicas: int, processes: int, **environ: str
) -> Iterator[list[subprocess.Popen[str]]]:
    coordinator = f"127.0.0.1:{free_port()}"
    each = 4 * replicas // processes
    news = tempfile.TemporaryDirectory()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(code)],
            env={
                **os.environ,
                "POLYXLA_BRIDGE_REPLICAS": str(replicas),
                "POLYXLA_BRIDGE_PROCESSES": str(processes),
                "POLYXLA_BRIDGE_PROCESS": str(process),
                "POLYXLA_BRIDGE_COORDINATOR": coordinator,
                "NPROC": str(each),
                "NEWS": news.name,
                "TF_CPP_MIN_LOG_LEVEL": "2",
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
        news.cleanup()


def outcomes(code: str, replicas: int, processes: int, **environ: str) -> list[tuple[int, list[str], str]]:
    """Return each process's exit code, the lines it printed, and its standard error."""
    with started(code, replicas, processes, **environ) as running:
        # All are read at once: gloo greets on a pipe that must not fill up.
        texts: list[tuple[str, str]] = [("", "")] * processes
        threads = [
            threading.Thread(
                target=lambda i=i, one=one: texts.__setitem__(i, one.communicate(timeout=TIMEOUT_S))
            )
            for i, one in enumerate(running)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S + 1)
        return [
            (one.returncode, [line for line in out.splitlines() if line.startswith("> ")], err)
            for one, (out, err) in zip(running, texts, strict=True)
        ]


def said(code: str, replicas: int, processes: int, **environ: str) -> list[list[str]]:
    found = outcomes(code, replicas, processes, **environ)
    assert [returned for returned, _, _ in found] == [0] * processes, [err[-3000:] for _, _, err in found]
    return [[line.removeprefix("> ") for line in lines] for _, lines, _ in found]


ONE_PROGRAM = """
engine = JaxEngine(share)
executable = engine.compile(summing(), OPTIONS)
results = [run(engine, executable, index, index + 1) for index in share.local]
total = share.replicas * (share.replicas + 1) / 2
print(">", engine.compiles, all(value(result) == total for result in results), executable.name)
engine.close()
left = [one.name for one in threading.enumerate() if one.name.startswith("polyxla") and one.is_alive()]
print(">", left)
"""


@pytest.mark.parametrize(("replicas", "processes"), [(4, 4), (2, 2), (4, 2)])
def test_one_program_is_compiled_once_for_all_processes(replicas: int, processes: int) -> None:
    found = said(ONE_PROGRAM, replicas, processes)
    compiles = [int(lines[0].split()[0]) for lines in found]
    assert sum(compiles) == 1, compiles
    assert all(lines[0].split()[1:] == ["True", "sum_of_all"] for lines in found), found
    assert all(lines[1] == "[]" for lines in found), "threads are left"


def test_different_programs_are_compiled_side_by_side() -> None:
    found = said(
        """
        engine = JaxEngine(share)
        mine = engine.compile(PROGRAMS[f"of_{share.process}"], OPTIONS)
        own = engine.compiles
        # Or one that is early would compile the others' programs too.
        tell(f"compiled-{share.process}")
        for other in range(share.processes):
            hear(f"compiled-{other}")
        # All of them, in an order of each process's own: nobody waits for somebody who waits for them.
        order = [(share.process + i) % share.processes for i in range(share.processes)]
        every = {i: engine.compile(PROGRAMS[f"of_{i}"], OPTIONS) for i in order}
        results = [value(run(engine, every[i], share.process, 1)) for i in range(share.processes)]
        print(">", own, engine.compiles, set(results) == {float(share.replicas)})
        engine.close()
        """,
        3,
        3,
    )
    assert found == [["1 1 True"]] * 3


def test_an_error_of_the_compiler_reaches_all_and_is_found_once() -> None:
    found = said(
        """
        engine = JaxEngine(share)
        text = "HloModule grows\\nENTRY main { ROOT x = f32[<=4] parameter(0) }"
        try:
            engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), OPTIONS)
        except Exception as error:
            known = "dynamic shapes are not supported" in str(error)
            print(">", engine.compiles, type(error).__name__, known)
        print(">", value(run(engine, engine.compile(summing(), OPTIONS), share.process, 1)))
        engine.close()
        """,
        2,
        2,
    )
    assert sorted(line[0] for line in found) == ["0 PjrtError True", "1 PjrtError True"]
    assert [line[1] for line in found] == ["2.0", "2.0"]


def test_who_waits_for_a_process_that_stopped_compiles_itself() -> None:
    found = said(
        """
        import hashlib
        board.PATIENCE_S = 1.0
        engine = JaxEngine(share)
        if share.process == 0:
            # Takes the program, and does nothing about it.
            engine._board.claim(hashlib.sha256(PROGRAMS["of_0"] + OPTIONS).hexdigest())
            tell("claimed")
        else:
            hear("claimed")
            started = time.monotonic()
            engine.compile(PROGRAMS["of_0"], OPTIONS)
            print(">", engine.compiles, time.monotonic() - started < 20)
        engine.close()
        """,
        2,
        2,
    )
    assert found == [[], ["1 True"]]


def test_a_long_compile_is_waited_for() -> None:
    found = said(
        """
        board.PATIENCE_S = 3.0
        engine = JaxEngine(share)
        if share.process == 0:
            fast = engine._clients.compile
            engine._clients.compile = lambda *arguments: (tell("began"), time.sleep(7), fast(*arguments))[2]
        else:
            hear("began")
        executable = engine.compile(summing(), OPTIONS)
        print(">", engine.compiles, value(run(engine, executable, share.process, 1)))
        engine.close()
        """,
        2,
        2,
    )
    assert found == [["1 2.0"], ["0 2.0"]]


@pytest.mark.parametrize("platforms", ["tpu", "cuda,cpu", ""])
def test_jaxs_own_choice_of_devices_does_not_matter(platforms: str) -> None:
    """And jax starts none of its own: they would take threads, or the accelerator."""
    found = said(
        """
        engine = JaxEngine(share)
        executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
        results = [run(engine, executable, index, 1) for index in share.local]
        from jax._src import xla_bridge
        print(">", [value(one) for one in results], xla_bridge._backends)
        engine.close()
        """,
        2,
        1,
        JAX_PLATFORMS=platforms,
        JAX_NUM_CPU_DEVICES="3",
    )
    assert found == [["[2.0, 2.0] {}"]]


def answers(shares: list[Share], timeout_s: float) -> list[BaseException | None]:
    """Hold a roll call between threads, one for each share; return what each got."""
    found: list[BaseException | None] = [None] * len(shares)

    def hold(number: int) -> None:
        try:
            startup_barrier.hold(shares[number], lambda: None, timeout_s).leave(timeout_s)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return found


def test_a_roll_call_of_all() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    assert answers([Share(8, 4, process, coordinator) for process in range(4)], 20) == [None] * 4


def test_those_who_did_not_come_are_named_to_all() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    found = answers([Share(8, 4, process, coordinator) for process in (0, 2)], 1)
    text = f"replicas [2, 3, 6, 7] (processes [1, 3] of 4) did not come to {coordinator} within 1 s"
    assert [str(one) for one in found] == [text, text]


def test_nobody_listens() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(PjrtError, match=rf"nobody listened on {coordinator} within 1 s: replicas \[0\]"):
        startup_barrier.hold(Share(2, 2, 1, coordinator), lambda: None, 1)
    assert time.monotonic() - started < 5


def test_processes_that_disagree() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    found = answers([Share(4, 2, 0, coordinator), Share(2, 2, 1, coordinator)], 20)
    assert all("came with {'replicas': 2, 'processes': 2}" in str(one) for one in found)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PjrtError, match=f"cannot listen on {coordinator}.*in use"):
            startup_barrier.hold(Share(2, 2, 0, coordinator), lambda: None, 1)


def test_a_stranger_at_the_door_is_sent_away() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    port = int(coordinator.rpartition(":")[2])
    found: list[list[BaseException | None]] = []
    first = threading.Thread(target=lambda: found.append(answers([Share(2, 2, 0, coordinator)], 20)))
    first.start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
        except OSError:
            time.sleep(0.02)
    assert answers([Share(2, 2, 1, coordinator)], 20) == [None]
    first.join(TIMEOUT_S)
    assert found == [[None]]


@pytest.mark.parametrize("ends", ["leaves", "dies"])
def test_process_0_stays_until_the_others_have_ended(ends: str) -> None:
    code = """
    engine = JaxEngine(share)
    executable = engine.compile(PROGRAMS["of_0"], OPTIONS)
    value(run(engine, executable, share.process, 1))
    started = time.monotonic()
    if share.process == 0:
        tell("leaving")
    else:
        hear("leaving")
        time.sleep(1)
        if os.environ["ENDS"] == "dies":
            os._exit(0)
        engine.compile(PROGRAMS["of_1"], OPTIONS)
    engine.close()
    print(">", share.process == 1 or time.monotonic() - started > 1)
    """
    found = said(code, 2, 2, ENDS=ends)
    assert found == [["True"], ["True"] if ends == "leaves" else []]


def test_who_stays_too_long_is_named() -> None:
    found = said(
        """
        from polyxla_bridge.engine import clients
        clients.LEAVE_TIMEOUT_S = 0.5
        engine = JaxEngine(share)
        if share.process == 1:
            hear("left")
            os._exit(0)
        try:
            engine.close()
        except Exception as error:
            print(">", error)
        tell("left")
        """,
        2,
        2,
    )
    assert found[0] == ["process 0 waited 0.5 s for replicas [1] (processes [1] of 2) to end, and ends first"]


def test_a_process_that_fails_to_connect_says_who_is_missing() -> None:
    code = """
    from polyxla_bridge.engine import clients
    tell(f"{share.process} is here")
    hear(f"{2 - share.process} is here")
    try:
        clients.Clients(share, timeout_s=3)
    except Exception as error:
        print(">", error)
    """
    with started(code, 3, 3) as running:
        running[1].kill()
        texts = [running[index].communicate(timeout=TIMEOUT_S)[0] for index in (0, 2)]
    assert all("replicas [1] (processes [1] of 3) did not come" in text for text in texts), texts
