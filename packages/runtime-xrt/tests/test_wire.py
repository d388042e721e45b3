"""The network between a client and its worker fails: each training has the right value or a typed error.

Every message of a training is the one at which the network fails once. Real processes and sockets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from polyxla_testing.processes import wait_until
from polyxla_testing.wire import Direction, Fault, How, WireProxy
from polyxla_xrt.client.engine import GOODBYE_S
from polyxla_xrt.client.lease import REPLACED_S
from polyxla_xrt.client.probe import SILENT, SPEAKS_HTTP2
from polyxla_xrt.protocol import worker as protocol

PROGRAMS = Path(__file__).parent / "programs"
CUT_S = 5.0
"""Longest time from a cut, or from the end of the silence, to the error, in seconds, on a busy host."""
NOTICED_S = 1.0
"""Longest median of these times for a cut, in seconds, as the documentation promises."""
SILENCE_S, PING_S = 4, 1
"""As in `protocol`, but for processes that tests have no time to wait for."""
SOON_S = 5.0
"""Longest time from a loss that the worker has noticed to the end of the job there, in seconds."""
ATTACHED = 3
"""Messages in each direction before the first that belongs to the session: status, lease, attachment."""
SPARE = 4
"""How many more threads and files than before a worker may have: its pools come and go."""
SMALL, LARGE = 6000, 1 << 19
"""Numbers of weights. 24 KB take several frames, 2 MB several messages."""
SAMPLE = pytest.param(range(ATTACHED, 100, 12), id="sample")
ALL = pytest.param(range(1, 100), id="all", marks=pytest.mark.long)
"""Numbers of messages; a training has fewer than 100."""
SILENCES = (How.STOP, How.NEAR, How.FAR)
MIDDLE = 12
MARGIN_S = 0.5
TIMEOUT_S = 60.0


class Wire:
    """A worker, a proxy before it, and a process that trains through the proxy.

    Args:
        worker: the worker.
        impatience: `ping_s` and `silence_s`; None for those of users' processes.

    Attributes:
        values: what a training of each size gives.
        address: the proxy's address.
        ping_s: seconds between the pings of its processes.
        silence_s: seconds of silence after which they give up their peer.
        ended_s: time from the last failure to the end of its training, in seconds.
    """

    def __init__(self, worker: Any, impatience: tuple[int, int] | None = None) -> None:
        self.worker = worker
        self.ended_s = 0.0
        self.ping_s, self.silence_s = impatience or (protocol.PING_S, protocol.SILENCE_S)
        self.proxy = WireProxy(worker.address)
        self.address = self.proxy.address
        start = [str(PROGRAMS / "impatient.py"), *map(str, impatience)] if impatience else []
        command = [sys.executable, *start, str(PROGRAMS / "wire_client.py")]
        pipe = subprocess.PIPE
        self._client = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.values = {size: self.train(worker.address, size)["value"] for size in (SMALL, LARGE)}
        assert None not in self.values.values()

    def train(self, address: str, size: int = SMALL) -> dict[str, Any]:
        """Train through an address; return how it ended."""
        assert self._client.stdin
        assert self._client.stdout
        self._client.stdin.write(f"{address} {size}\n")
        line = self._client.stdout.readline()
        # Its standard error has where its threads were, if it hung.
        assert line, f"the client crashed or hung: it ended with {self._client.wait(TIMEOUT_S)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def problems(self, fault: Fault, size: int = SMALL) -> list[str] | None:
        """Train while the network fails; return what is wrong, or None if the training has fewer messages."""
        self.proxy.begin(fault)
        found = self.train(self.address, size)
        if (failed_at := self.proxy.failed_at) is None:
            return None
        limit_s = CUT_S
        # A client that gets a reset while it asks for cores may wait until the worker frees them.
        if fault.how in (How.STOP, How.FAR) or (fault.how is How.NEAR and fault.at < ATTACHED):
            limit_s += self.silence_s + (0 if fault.at >= ATTACHED else REPLACED_S)
        left = self.worker.wait_until(lambda status: not status["job"], CUT_S + self.silence_s + SOON_S)
        self.ended_s = found["at"] - failed_at
        checks = {
            f"the value is {found['value']}": found["value"] in (None, self.values[size]),
            f"{found['kind']} is not typed: {found['error']}": found["is_typed"],
            # The cores of the training before must be free.
            f"another job holds the cores: {found['error']}": found["kind"] != "WorkerHeldError",
            f"later calls do not raise this error: {found['after']}": not found["after"],
            f"the error has the wrong reason: {found['error']}": _says(fault, found["error"]),
            f"the worker is not named: {found['error']}": self.address in (found["error"] or self.address),
            f"ended after {self.ended_s:.1f} s": self.ended_s < limit_s,
            f"closed after {found['closed_s']:.1f} s": found["closed_s"] < GOODBYE_S + SOON_S,
            f"threads are left: {found['threads']}": not found["threads"],
            f"on_lost got {found['lost']}": found["lost"] in ([], [found["error"]]),
            f"the worker holds {left['memory_bytes']} bytes": not left["memory_bytes"],
        }
        return [f"{fault}: {what}" for what, is_right in checks.items() if not is_right]

    def close(self) -> None:
        """End the client and the proxy."""
        self._client.kill()
        self._client.communicate()
        self.proxy.close()


def _says(fault: Fault, error: str | None) -> bool:
    """Return whether an error, if there is one, says what has happened."""
    reasons = ["is gone: ", "ended the job: ", "broke: "]
    if fault.how in (How.STOP, How.FAR) and fault.at <= ATTACHED:
        reasons += [SILENT, SPEAKS_HTTP2]
    return error is None or any(reason in error for reason in reasons)


@pytest.fixture(scope="module")
def wire(worker: Any) -> Iterator[Wire]:
    with closing(Wire(worker)) as wire:
        yield wire


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Any:
    """The fixture that the parameter names."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def impatient_wire(share_worker: Callable[..., Any]) -> Iterator[Wire]:
    with closing(Wire(share_worker(impatience=(PING_S, SILENCE_S)), (PING_S, SILENCE_S))) as wire:
        yield wire


def check_all(wire: Wire, how: How, direction: Direction, numbers: range, size: int = SMALL) -> list[float]:
    """Let the network fail at messages of a training with these numbers.

    Returns:
        The times from the failures to the ends of the trainings, in seconds.
    """
    (threads, files), problems = wire.worker.resources, list[str]()
    ended_s: list[float] = []
    for number in numbers:
        found = wire.problems(Fault(direction, number, how), size)
        if found is None:
            break
        problems += found
        ended_s.append(wire.ended_s)
    else:
        raise AssertionError(f"a training has more than {numbers[-1]} messages")
    assert problems == []
    assert ended_s
    assert "Traceback" not in wire.worker.log
    assert wire.train(wire.worker.address)["value"] == wire.values[SMALL]
    wire.worker.wait_until_free()
    wait_until(lambda: wire.worker.resources[0] < threads + SPARE, f"fewer than {threads + SPARE} threads")
    wait_until(lambda: wire.worker.resources[1] < files + SPARE, f"fewer than {files + SPARE} open files")
    return ended_s


@pytest.mark.parametrize("numbers", [SAMPLE, ALL])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("how", "size"), [(How.CUT, SMALL), (How.HALF, SMALL), (How.ONE, SMALL), (How.HALF, LARGE)]
)
@pytest.mark.timeout(600)
def test_connections_are_cut_at_a_message(
    wire: Wire, how: How, size: int, direction: Direction, numbers: range
) -> None:
    ended_s = check_all(wire, how, direction, numbers, size)
    assert median(ended_s) < NOTICED_S


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        # The grant is lost, and only the client knows that its connection is gone.
        pytest.param(How.NEAR, range(2, 101, 98), id="near-sample"),
        *(pytest.param(how, range(1, 100), id=how.value, marks=pytest.mark.long) for how in SILENCES),
    ],
)
@pytest.mark.timeout(900)
def test_the_network_falls_silent_at_a_message(
    impatient_wire: Wire, how: How, direction: Direction, numbers: range
) -> None:
    check_all(impatient_wire, how, direction, numbers)


@pytest.mark.parametrize(
    "network", ["impatient_wire", pytest.param("wire", marks=pytest.mark.long)], indirect=True
)
@pytest.mark.parametrize("direction", Direction)
def test_a_short_stop_goes_unnoticed_and_a_long_one_ends_the_job(network: Wire, direction: Direction) -> None:
    short_s = network.silence_s - network.ping_s - MARGIN_S
    network.proxy.begin(Fault(direction, MIDDLE, How.STOP, short_s))
    found = network.train(network.address)
    assert network.proxy.failed_at
    assert found["at"] - network.proxy.failed_at > short_s
    assert (found["value"], found["lost"]) == (network.values[SMALL], [])
    network.worker.wait_until_free()
    fault = Fault(direction, MIDDLE, How.STOP, network.silence_s + MARGIN_S)
    assert network.problems(fault) == []
