"""Another user of the machine at the mesh: their calls have no effect, and their answers are not believed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from polyxla.plugin import POLYXLA_SECRET
from polyxla_xrt.client.mesh import MeshClient, read_config
from polyxla_xrt.errors import MeshConnectError, MeshRefusedError, MeshServiceLostError
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.proto import mesh_pb2_grpc
from polyxla_xrt.protocol.mesh import PROTOCOL, SEAL_TRAILER
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"
BOUND_S = 20.0
TAG = "polyxla.all_gather"
PAYLOAD = pickle.dumps("a stranger's")
NO_TOKEN: tuple[tuple[str, str], ...] = ()
WRONG = (("authorization", f"Bearer {'0' * 64}"),)


def test_a_stranger_who_comes_before_a_replica_does_not_take_its_place(server: MeshServer) -> None:
    first_client, other = MeshClient(server.address, 0, 2, SECRET), MeshClient(server.address, 1, 2, SECRET)
    with first_client, other, grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(1) as pool:
        first = pool.submit(first_client.rendezvous, TAG, b"first", timeout_s=BOUND_S)
        stub = mesh_pb2_grpc.MeshStub(channel)
        request = pb.RendezvousRequest(tag=TAG, ordinal=1, payload=PAYLOAD, timeout_s=BOUND_S)
        for metadata in (NO_TOKEN, WRONG):
            calls: list[Any] = [
                stub.Rendezvous(iter([request]), timeout=BOUND_S, metadata=metadata),
                stub.Attend(pb.AttendRequest(protocol=PROTOCOL, ordinal=1, world_size=2), metadata=metadata),
                stub.Goodbye.future(pb.GoodbyeRequest(ordinal=0), metadata=metadata),
                stub.Config.future(pb.ConfigRequest(protocol=PROTOCOL), metadata=metadata),
            ]
            assert [call.code() for call in calls] == [grpc.StatusCode.UNAUTHENTICATED] * len(calls)
        assert other.rendezvous(TAG, b"second", timeout_s=BOUND_S) == (b"first", b"second")
        assert first.result(BOUND_S) == (b"first", b"second")


def test_calls_are_refused_before_their_message_comes(server: MeshServer) -> None:
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(3 * BOUND_S)
        yield from ()

    with grpc.insecure_channel(server.address) as channel:
        calls = [
            channel.stream_unary(f"/polyxla.xrt.mesh.Mesh/{name}").future(never(), timeout=BOUND_S)
            for name in ("Goodbye", "Config", "Attend", "Rendezvous")
            for _ in range(20)
        ]
        codes = {call.code() for call in calls}
        ended.set()
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}


def test_a_process_of_another_job_is_refused(server: MeshServer) -> None:
    with pytest.raises(MeshRefusedError, match=r"the token is wrong.*same random text on all hosts"):
        MeshClient(server.address, 1, 2, "of another job")


class Impostor(mesh_pb2_grpc.MeshServicer):
    """A stranger's service that took the port: it lets everyone in, and answers with its own payloads."""

    def __init__(self) -> None:
        self.is_own = True
        self.is_over = threading.Event()
        self.heard: dict[str, str] = {}

    def Attend(self, request: Any, context: Any) -> Iterator[pb.AttendReply]:  # noqa: N802
        self.heard["Attend"] = f"{request} {context.invocation_metadata()}"
        yield pb.AttendReply()
        self.is_over.wait(BOUND_S)

    def Rendezvous(self, requests: Any, context: Any) -> Iterator[pb.RendezvousReply]:  # noqa: N802
        request = next(requests)
        self.heard["Rendezvous"] = f"{request} {context.invocation_metadata()}"
        sent = request.payload
        yield pb.RendezvousReply(payload=sent, ends=True)
        # The payload of the other ordinal is forged here: a bare one, or the sealed one of the first.
        yield pb.RendezvousReply(payload=PAYLOAD if self.is_own else sent, ends=True)

    def Goodbye(self, request: Any, context: Any) -> pb.GoodbyeReply:  # noqa: N802
        self.heard["Goodbye"] = f"{request} {context.invocation_metadata()}"
        return pb.GoodbyeReply()

    def Config(self, request: Any, context: Any) -> pb.ConfigReply:  # noqa: N802
        self.heard["Config"] = f"{request} {context.invocation_metadata()}"
        context.set_trailing_metadata(((SEAL_TRAILER, "0" * 64),))
        return pb.ConfigReply(workers="w;0;127.0.0.1:1")


@pytest.fixture
def impostor() -> Iterator[tuple[Impostor, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(4)), Impostor()
    mesh_pb2_grpc.add_MeshServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.is_over.set()
    server.stop(0)


@pytest.mark.parametrize("is_own", [True, False])
def test_payloads_of_a_stranger_in_the_place_of_the_service_are_not_returned(
    impostor: tuple[Impostor, str], is_own: bool
) -> None:
    servicer, address = impostor
    servicer.is_own = is_own
    client = MeshClient(address, 0, 2, SECRET)
    with pytest.raises(MeshServiceLostError, match="not the mesh service of this job"):
        client.rendezvous(TAG, b"first", timeout_s=BOUND_S)
    client.close()
    assert servicer.heard.keys() == {"Attend", "Rendezvous", "Goodbye"}
    assert SECRET not in str(servicer.heard)


def test_workers_that_a_stranger_lists_are_not_used(impostor: tuple[Impostor, str]) -> None:
    with pytest.raises(MeshConnectError, match="not the mesh service of this job"):
        read_config(impostor[1], BOUND_S, {POLYXLA_SECRET: SECRET})
    assert impostor[0].heard.keys() == {"Config"}
    assert SECRET not in str(impostor[0].heard)


def test_the_list_of_workers_reaches_the_hosts_of_the_job() -> None:
    config = pb.ConfigReply(workers="w;0;127.0.0.1:1", coordinator="127.0.0.1:2")
    server = MeshServer("127.0.0.1:0", 1, SECRET, config)
    assert read_config(server.address, BOUND_S, {POLYXLA_SECRET: SECRET}) == config
    with pytest.raises(MeshConnectError, match=r"the token is wrong.*same random text"):
        read_config(server.address, BOUND_S, {POLYXLA_SECRET: "of another job"})
    server.close(0)
