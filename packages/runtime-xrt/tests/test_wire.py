"""The network between a client and its worker fails: each training has the right value or a typed error.

Every message of a training is the one at which the network fails once. Real processes and sockets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from polyxla_testing.processes import wait_until
from polyxla_testing.wire import Direction, Fault, How, WireProxy
from polyxla_xrt.client.lease import REPLACED_S
from polyxla_xrt.client.probe import SILENT, SPEAKS_HTTP2
from polyxla_xrt.client.session import GOODBYE_S
from polyxla_xrt.protocol import worker as protocol

PROGRAMS = Path(__file__).parent / "programs"
CUT_S = 5.0
"""Longest time from a cut, or from the end of the silence, to the error, in seconds, on a busy host."""
NOTICED_S = 1.0
"""Longest median of these times for a cut, in seconds, as the documentation promises."""
SILENCE_S, PING_S = 4, 1
"""As in `protocol`, but for processes that tests have no time to wait for."""
SOON_S = 20.0
"""Longest time from a loss that the worker has noticed to the end of the job there, in seconds."""
ATTACHED = 3
"""Messages in each direction before the first that belongs to the session: status, lease, attachment."""
SPARE = 4
"""How many more threads and files than before a worker may have: its pools come and go."""
SMALL, LARGE = 6000, 1 << 19
"""Numbers of weights. 24 KB take several frames, 2 MB several messages."""
END = 200
"""More than a training's messages in one direction."""
SAMPLE, ALL = range(ATTACHED, END, 12), range(1, END)
"""Numbers of messages."""
CUTS, SILENCES = (How.CUT, How.HALF, How.ONE), (How.STOP, How.NEAR, How.FAR)
OUTAGE_S = 60
RESUME_S, SHORT_S = 30, 2
"""Longest waits for a worker after a loss, in seconds."""
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

    def train(self, address: str, size: int = SMALL, resume_s: float = 0) -> dict[str, Any]:
        """Train through an address; return how it ended."""
        assert self._client.stdin
        assert self._client.stdout
        self._client.stdin.write(f"{address} {size} {resume_s}\n")
        line = self._client.stdout.readline()
        # Its standard error has where its threads were, if it hung.
        assert line, f"the client crashed or hung: it ended with {self._client.wait(TIMEOUT_S)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def problems(self, fault: Fault, size: int = SMALL, resume_s: float = 0) -> list[str] | None:
        """Train while the network fails; return what is wrong, or None if the training has fewer messages."""
        self.proxy.begin(fault)
        found = self.train(self.address, size, resume_s)
        if (failed_at := self.proxy.failed_at) is None:
            return None
        limit_s = CUT_S * fault.times + (fault.seconds or 0)
        # A client that gets a reset while it asks for cores may wait until the worker frees them.
        if fault.how in (How.STOP, How.FAR) or (fault.how is How.NEAR and fault.at < ATTACHED):
            limit_s += self.silence_s + (0 if fault.at >= ATTACHED else REPLACED_S)
        self.worker.wait_until(lambda status: not status["jobs"], CUT_S + self.silence_s + SOON_S)
        self.ended_s = found["at"] - failed_at
        # A job that has not begun has nothing to go on with.
        may_fail = not resume_s or fault.at < ATTACHED
        checks = {
            f"the value is {found['value']}": found["value"] == self.values[size]
            or (may_fail and found["value"] is None),
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


def check_all(wire: Wire, faults: Iterable[Fault], size: int = SMALL, resume_s: float = 0) -> list[float]:
    """Train with one failure of the network after another.

    Returns:
        The times from the failures to the ends of the trainings, in seconds.
    """
    (threads, files), problems = wire.worker.resources, list[str]()
    ended_s: list[float] = []
    for fault in faults:
        found = wire.problems(fault, size, resume_s)
        if found is None:
            break
        problems += found
        ended_s.append(wire.ended_s)
    else:
        raise AssertionError(f"a training has more than {fault.at} messages")
    assert problems == []
    assert ended_s
    assert "Traceback" not in wire.worker.log
    assert wire.train(wire.worker.address)["value"] == wire.values[SMALL]
    wire.worker.wait_until_free()
    wait_until(lambda: wire.worker.resources[0] < threads + SPARE, f"fewer than {threads + SPARE} threads")
    wait_until(lambda: wire.worker.resources[1] < files + SPARE, f"fewer than {files + SPARE} open files")
    return ended_s


@pytest.mark.parametrize(
    "numbers", [pytest.param(SAMPLE, id="sample"), pytest.param(ALL, id="all", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("how", "size"), [*((how, SMALL) for how in CUTS), (How.HALF, LARGE)])
@pytest.mark.timeout(600)
def test_connections_are_cut_at_a_message(
    wire: Wire, how: How, size: int, direction: Direction, numbers: Iterable[int]
) -> None:
    ended_s = check_all(wire, (Fault(direction, number, how) for number in numbers), size)
    assert median(ended_s) < NOTICED_S


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("how", "size", "numbers"),
    [
        pytest.param(How.HALF, LARGE, SAMPLE[::2], id="sample"),
        *(pytest.param(how, SMALL, ALL, id=how.value, marks=pytest.mark.long) for how in CUTS),
        pytest.param(How.HALF, LARGE, ALL, id="large", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(900)
def test_a_job_outlives_three_cuts(
    wire: Wire, how: How, size: int, direction: Direction, numbers: Iterable[int]
) -> None:
    """The second and the third may come while the session that the first one ended begins anew."""
    check_all(wire, (Fault(direction, number, how, times=3) for number in numbers), size, RESUME_S)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        # The grant is lost, and only the client knows that its connection is gone.
        pytest.param(How.NEAR, (2, END), id="near-sample"),
        *(pytest.param(how, ALL, id=how.value, marks=pytest.mark.long) for how in SILENCES),
    ],
)
@pytest.mark.timeout(900)
def test_the_network_falls_silent_at_a_message(
    impatient_wire: Wire, how: How, direction: Direction, numbers: Iterable[int]
) -> None:
    check_all(impatient_wire, (Fault(direction, number, how) for number in numbers))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        pytest.param(How.NEAR, (MIDDLE, END), id="near-sample"),
        *(pytest.param(how, ALL, id=how.value, marks=pytest.mark.long) for how in SILENCES),
    ],
)
@pytest.mark.timeout(900)
def test_a_job_outlives_a_silence(
    impatient_wire: Wire, how: How, direction: Direction, numbers: Iterable[int]
) -> None:
    stop_s = SILENCE_S + 1 if how is How.STOP else None
    check_all(
        impatient_wire, (Fault(direction, number, how, stop_s) for number in numbers), resume_s=RESUME_S
    )


@pytest.mark.long
def test_a_job_outlives_a_minute_without_a_network(wire: Wire) -> None:
    fault = Fault(Direction.TO_SERVER, MIDDLE, How.STOP, OUTAGE_S)
    assert wire.problems(fault, resume_s=OUTAGE_S + RESUME_S) == []
    assert OUTAGE_S < wire.ended_s < OUTAGE_S + CUT_S


@pytest.mark.slow
def test_a_job_whose_network_stays_away_gives_up_in_time(impatient_wire: Wire) -> None:
    impatient_wire.proxy.begin(Fault(Direction.TO_SERVER, MIDDLE, How.STOP))
    found = impatient_wire.train(impatient_wire.address, resume_s=SHORT_S)
    assert f"no worker has taken the job again within {SHORT_S} s: " in found["error"]
    assert impatient_wire.address in found["error"]
    assert (found["kind"], found["lost"]) == ("PjrtError", [found["error"]])
    assert (found["after"], found["threads"]) == ([], [])
    assert impatient_wire.proxy.failed_at
    assert found["at"] - impatient_wire.proxy.failed_at < SILENCE_S + SHORT_S + CUT_S
    impatient_wire.worker.wait_until_free()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "direction"),
    [
        ("impatient_wire", Direction.TO_CLIENT),
        pytest.param("impatient_wire", Direction.TO_SERVER, marks=pytest.mark.long),
        *(pytest.param("wire", direction, marks=pytest.mark.long) for direction in Direction),
    ],
    indirect=["network"],
)
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
