"""Rendezvous within one process: refused, cut off or interrupted calls."""

from __future__ import annotations

import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from polyxla import UsageError
from polyxla_xrt.client.mesh import MeshClient
from polyxla_xrt.errors import MeshError, MeshRefusedError, MeshServiceLostError, MismatchError, MissingError
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.proto import mesh_pb2_grpc
from polyxla_xrt.protocol.channels import CHUNK_BYTES
from polyxla_xrt.protocol.mesh import MAX_PAYLOAD_BYTES, call_token
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"
OURS = (("authorization", f"Bearer {call_token(SECRET)}"),)

BOUND_S = 20.0
"""Time limit: far below every timeout that would also end the wait, and enough for a busy machine."""


def test_threads_of_one_participant_meet_under_different_tags(server: MeshServer) -> None:
    tags = [f"tag {number}" for number in range(40)]
    first_client, other = MeshClient(server.address, 0, 2, SECRET), MeshClient(server.address, 1, 2, SECRET)
    with first_client, other, ThreadPoolExecutor(80) as pool:
        found = [pool.submit(first_client.rendezvous, tag, b"0") for tag in tags]
        found += [pool.submit(other.rendezvous, tag, b"1") for tag in tags[::-1]]
        assert {future.result(30) for future in found} == {(b"0", b"1")}


def test_a_tag_may_be_used_once_at_a_time(server: MeshServer) -> None:
    with MeshClient(server.address, 0, 2, SECRET) as client, ThreadPoolExecutor(2) as pool:
        twice = [pool.submit(client.rendezvous, "twice", b"") for _ in range(2)]
        for future in twice:
            with pytest.raises(MismatchError, match="Duplicate ordinal: 0 already waits here"):
                future.result(10)


@pytest.mark.parametrize("size", [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 32 << 20])
def test_payloads_of_every_size_arrive_whole(server: MeshServer, size: int) -> None:
    payload = random.Random(size).randbytes(size)
    first_client, other = MeshClient(server.address, 0, 2, SECRET), MeshClient(server.address, 1, 2, SECRET)
    with first_client, other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first_client.rendezvous, "large", payload)
        assert other.rendezvous("large", b"small") == (payload, b"small")
        assert waiting.result(30) == (payload, b"small")


class Huge(bytes):
    def __len__(self) -> int:
        return MAX_PAYLOAD_BYTES + 1


def test_an_oversized_payload_or_invalid_timeout_is_refused_before_it_is_sent(server: MeshServer) -> None:
    with MeshClient(server.address, 0, 2, SECRET) as client:
        with pytest.raises(UsageError, match="'big' has 1073741825 bytes, more than 1073741824"):
            client.rendezvous("big", Huge())
        for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(UsageError, match="a rendezvous cannot wait for"):
                client.rendezvous("tag", timeout_s=timeout_s)
    with pytest.raises(MeshServiceLostError, match="this process has said goodbye"):
        client.rendezvous("tag")
    client.close()


def test_close_returns_who_had_not_left_and_cuts_them_off(server: MeshServer) -> None:
    with MeshClient(server.address, 0, 2, SECRET) as client, ThreadPoolExecutor(1) as pool:
        waiting: Future[tuple[bytes, ...]] = pool.submit(client.rendezvous, "x" * 500, b"")
        time.sleep(0.2)
        assert server.close(0.1) == (0, 1)
        assert server.close(0.1) == (0, 1)
        lost = rf"lost the mesh service at {server.address}"
        with pytest.raises(MeshServiceLostError, match=lost) as caught:
            waiting.result(10)
    assert len(str(caught.value)) < 600


def test_errors_survive_pickling(server: MeshServer) -> None:
    with MeshClient(server.address, 0, 2, SECRET) as client, pytest.raises(MissingError) as caught:
        client.rendezvous("tag", timeout_s=0.1)
    caught.value.add_note("of replica 0")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, MissingError)
    assert isinstance(again, MeshError)
    assert str(again) == str(caught.value)
    assert again.__notes__ == ["of replica 0"]
    assert "(of these never connected: 1)" in str(again)


INTERRUPTED = Path(__file__).parent / "programs" / "interrupted_wait.py"


@pytest.mark.parametrize("what", ["meet", "close", "connect"])
def test_ctrl_c_ends_every_wait_and_the_service_with_its_process(what: str) -> None:
    command = [sys.executable, str(INTERRUPTED), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0
        assert time.monotonic() - begin < BOUND_S


def test_a_process_that_closes_nothing_exits() -> None:
    command = [sys.executable, str(INTERRUPTED), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert (done.stdout, done.stderr) == ("ready\n", "")


def test_a_peer_that_never_reads_does_not_block_the_others(server: MeshServer) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as silent:
        silent.sendall(b"\x00\xff" * 50)
        with MeshClient(server.address, 0, 2, SECRET) as client:
            assert client.rendezvous("alone", b"x", [0]) == (b"x",)


def test_leaving_right_after_the_last_rendezvous_cuts_off_no_one() -> None:
    def work(address: str, ordinal: int) -> int:
        with MeshClient(address, ordinal, 4, SECRET) as client:
            return len(client.rendezvous("last", b"x"))

    for _ in range(10):
        server = MeshServer("127.0.0.1:0", 4, SECRET)
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(work, server.address, ordinal) for ordinal in range(4)]
            assert server.close(20) == ()
            assert [future.result(1) for future in found] == [4] * 4


@pytest.mark.parametrize(
    ("requests", "code", "says"),
    [
        ([], grpc.StatusCode.FAILED_PRECONDITION, "needs a timeout_s of more than 0"),
        ([{}], grpc.StatusCode.FAILED_PRECONDITION, "needs a timeout_s of more than 0"),
        ([{"timeout_s": 1e9}], grpc.StatusCode.FAILED_PRECONDITION, "at most 604800"),
        ([{"timeout_s": 9}], grpc.StatusCode.FAILED_PRECONDITION, "Ordinal 0 has not attended"),
        ([{"timeout_s": 9, "ordinal": 7}], grpc.StatusCode.INVALID_ARGUMENT, "Invalid ordinal: 7"),
        ([{"payload": bytes(5 << 20)}], grpc.StatusCode.RESOURCE_EXHAUSTED, "larger"),
    ],
)
def test_a_malformed_request_gets_an_error_and_the_service_continues(
    server: MeshServer, requests: list[dict[str, Any]], code: grpc.StatusCode, says: str
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        messages = iter([pb.RendezvousRequest(**request) for request in requests])
        with pytest.raises(grpc.RpcError) as caught:
            list(mesh_pb2_grpc.MeshStub(channel).Rendezvous(messages, timeout=10, metadata=OURS))
        assert caught.value.code() is code
        assert says in caught.value.details()
        mesh_pb2_grpc.MeshStub(channel).Goodbye(pb.GoodbyeRequest(ordinal=7), timeout=10, metadata=OURS)
    with MeshClient(server.address, 0, 2, SECRET) as client:
        assert client.rendezvous("alone", b"x", [0]) == (b"x",)


def test_a_payload_whose_chunks_exceed_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyxla_xrt.server.mesh.server.MAX_PAYLOAD_BYTES", CHUNK_BYTES)
    server = MeshServer("127.0.0.1:0", 1, SECRET)
    with MeshClient(server.address, 0, 1, SECRET) as client:
        assert client.rendezvous("fits", bytes(CHUNK_BYTES))
        with pytest.raises(MeshRefusedError, match="A payload has more than 1048576 bytes"):
            client.rendezvous("does not", bytes(CHUNK_BYTES + 1))
    assert server.close(5) == ()
