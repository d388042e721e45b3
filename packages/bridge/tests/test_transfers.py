"""Arrays between processes: what arrives, who may send, and what ends a wait."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polyxla_bridge import transfers
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.sealing import SEAL_BYTES, sealed, unsealed
from polyxla_bridge.transfers import Transfers, ticket

SECRET = "of the job"
ROW = ArrayType("float32", (3,))
DATA = memoryview(bytes(range(12)))
PATIENCE_S = 60
HEADER_BYTES = SEAL_BYTES + 256


@pytest.fixture
def pair() -> Iterator[tuple[Transfers, Transfers]]:
    """A sender, process 0, and a receiver, process 1."""
    sender, receiver = (Transfers(SECRET, "127.0.0.1", process, 5) for process in range(2))
    yield sender, receiver
    sender.close()
    receiver.close()


def port_of(descriptor: bytes) -> int:
    port: int = json.loads(descriptor[SEAL_BYTES:])[1]
    return port


def header(challenge: bytes, secret: str, fields: list[object]) -> bytes:
    return sealed(secret, f"transfer {challenge.hex()}", json.dumps(fields).encode().ljust(256))


@pytest.mark.parametrize("dims", [(3,), (), (0,), (1 << 22,)])
def test_an_array_arrives(pair: tuple[Transfers, Transfers], dims: tuple[int, ...]) -> None:
    type_ = ArrayType("float32", dims)
    data = bytes(n % 251 for n in range(min(type_.size_bytes, 997))) * (type_.size_bytes // 997 + 1)
    arrived, descriptor = pair[1].receive(type_)
    pair[0].send(type_, memoryview(data[: type_.size_bytes]), descriptor)
    assert arrived.result(PATIENCE_S) == data[: type_.size_bytes]


def test_arrays_may_arrive_in_any_order(pair: tuple[Transfers, Transfers]) -> None:
    awaited = [pair[1].receive(ROW) for _ in range(8)]
    for number in reversed(range(8)):
        pair[0].send(ROW, memoryview(bytes([number]) * 12), awaited[number][1])
    for number, (arrived, _) in enumerate(awaited):
        assert arrived.result(PATIENCE_S) == bytes([number]) * 12


def test_a_ticket_is_exchanged_when_there_is_a_descriptor(pair: tuple[Transfers, Transfers]) -> None:
    arrived, descriptor = pair[1].receive(ROW)
    answers = iter([None, None, descriptor])
    pair[0].send(ROW, DATA, ticket(lambda: next(answers)))
    assert arrived.result(PATIENCE_S) == DATA


def test_a_store_that_has_ended_is_an_error_of_the_sender(pair: tuple[Transfers, Transfers]) -> None:
    def look() -> bytes:
        raise ConnectionResetError("the store has ended")

    with pytest.raises(PjrtError, match=r"process 0 cannot learn where .* the store has ended"):
        pair[0].send(ROW, DATA, ticket(look))


@pytest.mark.parametrize("awaited", [ArrayType("float32", (6,)), ArrayType("int32", (3,))], ids=str)
def test_unlike_arrays_are_an_error_on_both_sides(
    pair: tuple[Transfers, Transfers], awaited: ArrayType
) -> None:
    arrived, descriptor = pair[1].receive(awaited)
    what = f"process 0 sends 3 elements of float32, and process 1 awaits {awaited.dims[0]} elements of "
    with pytest.raises(PjrtError, match=what + awaited.dtype):
        pair[0].send(ROW, DATA, descriptor)
    with pytest.raises(PjrtError, match=what + awaited.dtype):
        arrived.result(PATIENCE_S)


def test_another_shape_of_as_many_elements_is_received(pair: tuple[Transfers, Transfers]) -> None:
    arrived, descriptor = pair[1].receive(ArrayType("float32", (3, 1)))
    pair[0].send(ROW, DATA, descriptor)
    assert arrived.result(PATIENCE_S) == DATA


def test_a_receiver_that_has_ended_is_an_error_of_the_sender(pair: tuple[Transfers, Transfers]) -> None:
    arrived, descriptor = pair[1].receive(ROW)
    pair[1].close()
    with pytest.raises(PjrtError, match="process 1 has not received 3 elements of float32 from process 0"):
        pair[0].send(ROW, DATA, descriptor)
    with pytest.raises(PjrtError, match="ended before the array was moved"):
        arrived.result(PATIENCE_S)


def test_a_sender_that_ends_within_an_array_is_an_error_of_the_receiver(
    pair: tuple[Transfers, Transfers],
) -> None:
    arrived, descriptor = pair[1].receive(ROW)
    number, content = json.loads(descriptor[SEAL_BYTES:])[3:]
    with socket.create_connection(("127.0.0.1", port_of(descriptor))) as peer:
        peer.sendall(header(peer.recv(16), SECRET, [number, 0, content]))
        peer.sendall(DATA[:5])
    with pytest.raises(PjrtError, match="process 0 has not sent all of 3 elements of float32 to process 1"):
        arrived.result(PATIENCE_S)


def test_strangers_are_not_believed_and_do_not_disturb(
    pair: tuple[Transfers, Transfers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PROOF_TIMEOUT_S", 1.0)
    arrived, descriptor = pair[1].receive(ROW)
    number, content = json.loads(descriptor[SEAL_BYTES:])[3:]
    with ExitStack() as strangers:

        def connected() -> socket.socket:
            address = ("127.0.0.1", port_of(descriptor))
            return strangers.enter_context(socket.create_connection(address, timeout=PATIENCE_S))

        for _ in range(transfers.MOST_UNPROVED + 16):
            connected()
        pair[0].send(ROW, DATA, descriptor)
        assert arrived.result(PATIENCE_S) == DATA
        arrived, descriptor = pair[1].receive(ROW)
        number = json.loads(descriptor[SEAL_BYTES:])[3]
        old = connected().recv(16)
        while not old:
            # The silent ones still hold all places.
            time.sleep(0.1)
            old = connected().recv(16)
        other = connected()
        # Neither another secret nor an answer to another challenge is a proof.
        for secret, challenge in (("another", other.recv(16)), (SECRET, old)):
            guess = connected()
            guess.recv(16)
            guess.sendall(header(challenge, secret, [number, 0, content]) + DATA)
            assert _is_closed(guess)
        assert not arrived.done()
        pair[0].send(ROW, DATA, descriptor)
        assert arrived.result(PATIENCE_S) == DATA


def test_a_descriptor_of_another_job_is_refused(pair: tuple[Transfers, Transfers]) -> None:
    _, descriptor = pair[1].receive(ROW)
    forged = sealed(
        "another", "descriptor of an array", unsealed(SECRET, "descriptor of an array", descriptor)
    )
    for text in (forged, b"", b"[]"):
        with pytest.raises(PjrtError, match="a process of another job awaits an array"):
            pair[0].send(ROW, DATA, text)


def test_closing_ends_a_send_that_no_recv_meets(pair: tuple[Transfers, Transfers]) -> None:
    pair[0].close()
    with pytest.raises(PjrtError, match="ended before the array was moved"):
        pair[0].send(ROW, DATA, ticket(lambda: None))


def _is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True
