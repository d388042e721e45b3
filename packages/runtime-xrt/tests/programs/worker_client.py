"""A process that leases a worker's cores, or drives one of them, by orders on lines of its input.

``lease ADDRESS WAIT_S`` answers with the job's key, then with why the job ended.
``session ADDRESS JOB ORDINAL`` drives the core of that number. ``double`` doubles a number there, ``stall``
waits for a replica that never comes, ``wait`` says why the job ended.
"""

from __future__ import annotations

import json
import struct
import sys
from concurrent.futures import Future
from typing import Any

from polyxla import PolyxlaError
from polyxla.plugin import snapshot
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.errors import WorkerError

TIMEOUT_S = 60
DOUBLE = "HloModule double ENTRY main { x = f32[] parameter(0) ROOT y = f32[] add(x, x) }"
SUM = """HloModule meet, replica_count=2
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={}, to_apply=add }"""


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def hold(address: str, wait_s: str) -> None:
    ended: Future[str] = Future()
    try:
        lease = Lease(
            address,
            2,
            snapshot(),
            wait_s=float(wait_s),
            on_wait=say,
            on_end=lambda error: ended.set_result(str(error)),
        )
    except PolyxlaError as error:
        say({"error": type(error).__name__, "text": str(error)})
        return
    say(lease.job)
    for line in sys.stdin:
        if line.strip() == "wait":
            say(ended.result(TIMEOUT_S))
        else:
            lease.close()
            say("closed")


def drive(address: str, job: str, ordinal: str) -> None:
    ended: Future[str] = Future()

    def lost(error: WorkerError, _: int) -> None:
        ended.set_result(str(error))

    assignment = Assignment(address, job, (int(ordinal),), "TPU", int(ordinal), 2, int(ordinal), 2)
    try:
        engine = RemoteEngine(assignment, snapshot(), lost)
    except PolyxlaError as error:
        say({"error": type(error).__name__, "text": str(error)})
        return
    say("attached")
    for line in sys.stdin:
        match line.strip():
            case "double":
                say(number(run(engine, compiled(engine, DOUBLE), int(ordinal))))
            case "stall":
                run(engine, compiled(engine, SUM), int(ordinal))
                say("sent")
            case "wait":
                say(ended.result(TIMEOUT_S))
            case "leave":
                engine.close()
                say("left")


def compiled(engine: RemoteEngine, text: str) -> Executable:
    from jaxlib import xla_client
    from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return engine.compile(module, xla_client.CompileOptions().SerializeAsString())


def run(engine: RemoteEngine, program: Executable, ordinal: int) -> Future[memoryview]:
    device = engine.devices[ordinal]
    argument = engine.from_host(device, ArrayType("float32", ()), memoryview(struct.pack("<f", 21)))
    (result,) = engine.execute(program, device, [argument])
    return engine.to_host(result)


def number(value: Future[memoryview]) -> float:
    (found,) = struct.unpack("<f", value.result(TIMEOUT_S))
    return float(found)


def main(what: str, address: str, *more: str) -> None:
    if what == "lease":
        hold(address, *more)
    else:
        drive(address, *more)


if __name__ == "__main__":
    main(*sys.argv[1:])
