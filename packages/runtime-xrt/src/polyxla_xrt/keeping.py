"""What a script keeps on the worker, for its next start with the same job name.

Light: torch is imported when something is kept.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_xrt import env
from polyxla_xrt.config.assignment import Assignment, read_assignment
from polyxla_xrt.config.resuming import read_resuming
from polyxla_xrt.config.variables import find
from polyxla_xrt.errors import WorkerConnectError, WorkerError
from polyxla_xrt.own_assignment import leased

if TYPE_CHECKING:
    from polyxla_xrt.client.channel import WorkerChannel

Asked = TypeVar("Asked")

KEEP_S = 30.0
"""Longest wait for the worker to take the next chunk, or to answer, in seconds."""


def keep(name: str, value: Any) -> None:
    """Keep a value on the worker, in place of what was kept under this name.

    It stays there for `polyxla worker --keep SECONDS` after the job's end, however that ends. The next job
    with the same `POLYXLA_XRT_JOB` gets it from `kept`. Call it in every replica; the value of ordinal 0 is
    kept. The call waits for the device, and returns when the worker has all of the value.

    Args:
        name: the name, of at most 300 characters.
        value: what `torch.save` writes and `torch.load` reads with ``weights_only``: tensors of any device,
            numbers and texts, in dicts, lists and tuples.

    Raises:
        UsageError: the job has no name, or the worker keeps nothing.
        WorkerError: the worker has no room for it, is gone, or takes nothing for 30 s.
    """
    assignment, environ = _assigned()
    if assignment.ordinal:
        return
    import grpc
    import torch
    from torch.utils import _pytree as pytree

    from polyxla_xrt.proto import worker_pb2 as pb
    from polyxla_xrt.protocol.channels import chunks
    from polyxla_xrt.protocol.worker import PROTOCOL

    on_host = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    torch.save(on_host, file := io.BytesIO())
    data = file.getbuffer()

    taken = time.monotonic()

    def requests() -> Iterator[pb.KeepRequest]:
        nonlocal taken
        yield pb.KeepRequest(protocol=PROTOCOL, job=assignment.job, name=name, size=len(data))
        for chunk, _ in chunks(data):
            # gRPC comes for the next chunk when the network has taken the one before.
            taken = time.monotonic()
            yield pb.KeepRequest(data=bytes(chunk))

    def send(channel: WorkerChannel) -> None:
        nonlocal taken
        taken = time.monotonic()
        call = channel.begin("Keep", requests())
        while (left := taken + KEEP_S - time.monotonic()) > 0:
            with contextlib.suppress(grpc.FutureTimeoutError):
                call.result(left)
                return
        call.cancel()
        raise WorkerError(
            f"{channel.where} has taken nothing of {name!r} for {KEEP_S:g} s",
            where=channel.address,
            fix="Check the network to it, and see the worker's log.",
        )

    _ask(assignment, environ, send)


def kept(name: str) -> Any:
    """Return what an earlier job with the same `POLYXLA_XRT_JOB`, or this one, has kept under a name.

    Args:
        name: the name.

    Returns:
        The value, with its tensors on the CPU; None if there is none.

    Raises:
        UsageError: the job has no name, or the worker keeps nothing.
        WorkerError: the worker is gone.
    """
    import torch

    from polyxla_xrt.proto import worker_pb2 as pb
    from polyxla_xrt.protocol.worker import PROTOCOL

    assignment, environ = _assigned()
    request = pb.RecallRequest(protocol=PROTOCOL, job=assignment.job, name=name)

    def recall(channel: WorkerChannel) -> bytes:
        return b"".join(reply.data for reply in channel.call("Recall", request))

    data = _ask(assignment, environ, recall)
    return None if data is None else torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _assigned() -> tuple[Assignment, Mapping[str, str]]:
    environ = snapshot()
    if not find(environ, env.POLYXLA_XRT_JOB):
        raise UsageError(
            "a job without a name keeps nothing: its next start could not find it",
            where=env.POLYXLA_XRT_JOB,
            fix=f"Set {env.POLYXLA_XRT_JOB} to a name of your choice, the same at each start.",
        )
    if assignment := read_assignment(environ) or leased():
        return assignment, environ
    import torch_xla

    # A plain script leases its cores when it first uses the device.
    torch_xla.device()
    if assignment := leased():
        return assignment, environ
    raise UsageError(
        "this process uses no worker of a TPU node",
        where=env.XRT_TPU_CONFIG,
        fix="Start the script with runtime xrt, or keep its state in a checkpoint.",
    )


def _ask(
    assignment: Assignment, environ: Mapping[str, str], do: Callable[[WorkerChannel], Asked]
) -> Asked | None:
    """Call the job's worker; return the answer, or None if there is nothing under the name.

    A job that outlives its worker waits for the next one, which the job gets again first.
    """
    from polyxla_xrt.client.probe import RETRY_S

    resuming = read_resuming(environ)
    addresses = (assignment.address, *(resuming.spares if resuming else ()))
    deadline = time.monotonic() + (resuming.wait_s if resuming else 0.0)
    for address in itertools.cycle(addresses):
        try:
            return _ask_once(address, environ, do)
        except (WorkerConnectError, UsageError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)
    raise AssertionError("a cycle does not end")


def _ask_once(address: str, environ: Mapping[str, str], do: Callable[[WorkerChannel], Asked]) -> Asked | None:
    import grpc

    from polyxla_xrt.client.channel import WorkerChannel

    channel = WorkerChannel(address, environ)
    try:
        return do(channel)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        if error.code() is grpc.StatusCode.ABORTED:
            raise UsageError(
                f"{channel.where} cannot do this: {error.details()}",
                where=address,
                fix="Start it with --keep SECONDS, which is the time for the job's next start.",
            ) from None
        raise channel.explain(error) from None
    finally:
        channel.close()
