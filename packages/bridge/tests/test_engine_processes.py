"""Replicas in several real processes: engines that connect, compile once between them, and leave."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import pytest

from polyxla.plugin import free_ports
from polyxla_bridge.engine import startup_barrier
from polyxla_bridge.engine.coordination_service import CoordinationService
from polyxla_bridge.engine.shared_memory import SharedMemory
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError

TIMEOUT_S = 120
PROGRAM = "engine_processes.py"
SECRET = "of one job"
Outcomes = Callable[..., list[tuple[int, list[str], str]]]
Said = Callable[..., list[list[str]]]


def is_served(coordinator: str) -> bool:
    """Return whether a process runs whose command line names the coordinator's address."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if coordinator in command.read_text().split("\0"):
                return True
    return False


@pytest.fixture
def said(outcomes: Outcomes) -> Said:
    """Return a function that runs a program, and returns the lines that each process printed."""

    def said(*command: str, replicas: int, processes: int, **environ: str) -> list[list[str]]:
        found = outcomes(PROGRAM, *command, replicas=replicas, processes=processes, **environ)
        codes = [returned for returned, _, _ in found]
        assert codes == [0] * processes, [err[-3000:] for _, _, err in found]
        return [lines for _, lines, _ in found]

    return said


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "processes"), [(4, 4), (2, 2), (4, 2)])
def test_one_program_is_compiled_once_for_all_processes(said: Said, replicas: int, processes: int) -> None:
    found = said("one_program", replicas=replicas, processes=processes)
    compiles = [int(lines[0].split()[0]) for lines in found]
    assert sum(compiles) == 1, compiles
    assert all(lines[0].split()[1:] == ["True", "sum_of_all"] for lines in found), found
    assert all(lines[1] == "[]" for lines in found), "threads are left"


@pytest.mark.slow
def test_different_programs_are_compiled_at_the_same_time(said: Said) -> None:
    assert said("different_programs", replicas=3, processes=3) == [["1 1 True"]] * 3


@pytest.mark.slow
def test_a_compiler_error_is_found_once_and_raised_in_all_processes(said: Said) -> None:
    found = said("compiler_error", replicas=2, processes=2)
    assert sorted(line[0] for line in found) == ["0 PjrtError True", "1 PjrtError True"]
    assert [line[1] for line in found] == ["2.0", "2.0"]


@pytest.mark.slow
def test_a_process_compiles_itself_when_the_claiming_process_has_stopped(said: Said) -> None:
    assert said("stopped_compiler", replicas=2, processes=2) == [[], ["1 True"]]


@pytest.mark.slow
def test_a_long_compile_is_waited_for(said: Said) -> None:
    assert said("long_compile", replicas=2, processes=2) == [["1 2.0"], ["0 2.0"]]


@pytest.mark.long
def test_a_replica_may_be_late_at_the_first_collective(said: Said) -> None:
    """Longer than gloo waits for those that it is to connect."""
    assert said("late_replica", "33", replicas=2, processes=2) == [["2.0"], ["2.0"]]


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["tpu", "cuda,cpu", ""])
def test_jax_settings_of_the_user_are_ignored(said: Said, platforms: str) -> None:
    """And jax starts no backend, which would take threads, or the accelerator."""
    environ = {"JAX_PLATFORMS": platforms, "JAX_NUM_CPU_DEVICES": "3"}
    assert said("backends_of_jax", replicas=2, processes=1, **environ) == [["[2.0, 2.0] {}"]]


def enter(settings: BridgeSettings, timeout_s: float) -> startup_barrier.PeerConnections:
    memory = SharedMemory(settings)
    try:
        return startup_barrier.wait_for_peers(settings, memory, lambda _: None, timeout_s)
    finally:
        memory.leave()


def errors_at_barrier(job: list[BridgeSettings], timeout_s: float) -> list[BaseException | None]:
    """Pass the barrier in a thread for each process; return the error of each."""
    found: list[BaseException | None] = [None] * len(job)

    def arrive(number: int) -> None:
        try:
            enter(job[number], timeout_s).leave()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=arrive, args=(number,)) for number in range(len(job))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return found


def test_the_barrier_opens_when_all_processes_have_connected() -> None:
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    assert (
        errors_at_barrier(
            [BridgeSettings(8, 4, process, coordinator, secret=SECRET) for process in range(4)], 20
        )
        == [None] * 4
    )


def test_missing_processes_are_named_in_all_others() -> None:
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    found = errors_at_barrier(
        [BridgeSettings(8, 4, process, coordinator, secret=SECRET) for process in (0, 2)], 1
    )
    text = f"replicas [2, 3, 6, 7] (processes [1, 3] of 4) did not connect to {coordinator} within 1 s"
    assert [str(failure) for failure in found] == [text, text]


def test_a_missing_process_0_is_named() -> None:
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    started = time.monotonic()
    with pytest.raises(PjrtError, match=rf"nothing listened on {coordinator} within 1 s: replicas \[0\]"):
        enter(BridgeSettings(2, 2, 1, coordinator, secret=SECRET), 1)
    assert time.monotonic() - started < TIMEOUT_S


def test_processes_of_jobs_of_different_size_are_refused() -> None:
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    found = errors_at_barrier(
        [
            BridgeSettings(4, 2, 0, coordinator, secret=SECRET),
            BridgeSettings(2, 2, 1, coordinator, secret=SECRET),
        ],
        20,
    )
    assert all(
        "process 1 expects a job of {'replicas': 2, 'processes': 2}, process 0 one of" in str(failure)
        for failure in found
    )


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PjrtError, match=f"cannot listen on {coordinator}.*in use"):
            enter(BridgeSettings(2, 2, 0, coordinator, secret=SECRET), 1)


HELLO = b'[1, {"replicas": 2, "processes": 2}, [], null]\n'


def test_strangers_at_the_barrier_are_not_believed_and_not_waited_for() -> None:
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    settings = [BridgeSettings(2, 2, process, coordinator, secret=SECRET) for process in range(2)]
    found: list[list[BaseException | None]] = []
    first = threading.Thread(target=lambda: found.append(errors_at_barrier(settings[:1], 30)))
    first.start()
    host, _, port = coordinator.rpartition(":")
    started = time.monotonic()
    with ExitStack() as strangers:
        # More than process 0 keeps; those that say nothing would each have taken 5 s.
        for text in [b"GET / HTTP/1.1\r\n\r\n", HELLO, b"0" * 64 + HELLO, *([b""] * 100)]:
            while True:
                try:
                    stranger = socket.create_connection((host, int(port)), timeout=10)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < started + 10
                    time.sleep(0.02)
            strangers.enter_context(stranger).sendall(text)
            if text:
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert errors_at_barrier(settings[1:], 20) == [None]
    first.join(TIMEOUT_S)
    assert found == [[None]]


def test_a_stranger_in_the_place_of_process_0_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            with server.accept()[0] as peer:
                heard.append(peer.recv(4096))
                peer.sendall(b"0" * 64 + b'{"shares": [[0, [[0], []]], [1, [[1], []]]], "memory": null}\n')

        heard: list[bytes] = []
        stranger = threading.Thread(target=answer)
        stranger.start()
        settings = BridgeSettings(2, 2, 1, coordinator, secret=SECRET)
        with pytest.raises(PjrtError, match=f"what answers at {coordinator} is not process 0 of this job"):
            enter(settings, 20)
        stranger.join(TIMEOUT_S)
    assert SECRET.encode() not in heard[0]


@pytest.mark.slow
def test_a_strangers_program_in_the_store_is_not_run(said: Said) -> None:
    """Anyone who reaches the port can write there: programs, heartbeats, and that a replica has returned."""
    assert said("strangers_values", replicas=2, processes=2) == [["1 2.0 [] False"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["leaves", "dies"])
def test_process_0_can_stay_until_the_others_have_ended(said: Said, ends: str) -> None:
    found = said("process_0_waits", ends, replicas=2, processes=2)
    assert found == [["True"], ["True"] if ends == "leaves" else []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "others"), [pytest.param("0", "leave", marks=pytest.mark.long), ("1", "leave"), ("1", "die")]
)
def test_a_process_works_on_when_the_others_have_ended(outcomes: Outcomes, process: str, others: str) -> None:
    """For longer than heartbeats may be missing; and no process of the service is left."""
    found = outcomes(PROGRAM, "one_works_alone", process, others, replicas=3, processes=3)
    code, lines, printed = found.pop(int(process))
    assert (code, printed) == (0, "")
    coordinator, result = lines[0].split()
    assert result == "2.0"
    assert [code for code, _, _ in found] == [-signal.SIGKILL if others == "die" else 0] * 2
    deadline = time.monotonic() + TIMEOUT_S
    while is_served(coordinator):
        assert time.monotonic() < deadline, "the service is left"
        time.sleep(0.05)


def test_a_process_that_has_failed_waits_for_no_other(outcomes: Outcomes) -> None:
    found = outcomes(PROGRAM, "a_failed_one_is_waited_for", replicas=2, processes=2)
    assert [(code, lines) for code, lines, _ in found] == [(0, ["[1]"]), (1, ["True True"])], found


def test_a_service_that_cannot_listen_says_why() -> None:
    service = CoordinationService("nowhere.invalid:1", 2)
    ours, theirs = socket.socketpair()
    try:
        with (
            ours,
            theirs,
            pytest.raises(PjrtError, match=r"cannot listen on nowhere\.invalid:1: .* not known"),
        ):
            service.start([theirs])
    finally:
        service.shutdown()


def test_a_process_that_stays_too_long_is_named(said: Said) -> None:
    found = said("one_stays_too_long", replicas=2, processes=2)
    text = "process 0 waited 0.5 s for replicas [1] (processes [1] of 2) to end, and now ends before them"
    assert found[0] == [text]


def test_a_killed_process_is_named_as_missing(
    started: Callable[..., AbstractContextManager[list[subprocess.Popen[str]]]],
) -> None:
    with started(PROGRAM, "one_is_missing", replicas=3, processes=3) as running:
        running[1].kill()
        texts = [running[index].communicate(timeout=TIMEOUT_S)[0] for index in (0, 2)]
    assert all("replicas [1] (processes [1] of 3) did not connect" in text for text in texts), texts
