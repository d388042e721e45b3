"""A process that trains on a core of a worker once for each line of its input, ``ADDRESS SIZE RESUME_S``.

Each line of its output says how a training ended: with a value, or with an error, and when.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import snapshot
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt import env
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.client.unanswered import MAX_IN_FLIGHT
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming
from polyxla_xrt.errors import WorkerError

TIMEOUT_S = 100
"""Longest wait for a value, in seconds: more than any silence that a process endures."""
HANG_S = 130
LEAVE_S = 5
"""How long the threads of a closed connection may take to end, in seconds."""
CALLS = 2 * MAX_IN_FLIGHT + 1
STEPS = 10
EVERY = 3
"""Steps between two snapshots of a training that goes on after a loss."""
SCALAR = ArrayType("float32", ())
STEP = """HloModule step, input_output_alias={ {0}: (0, {}, must-alias) }
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { w = f32[SIZE] parameter(0) x = f32[] parameter(1) xs = f32[SIZE] broadcast(x), dimensions={}
  error = f32[SIZE] subtract(xs, w) rate = f32[] constant(0.1)
  rates = f32[SIZE] broadcast(rate), dimensions={} change = f32[SIZE] multiply(error, rates)
  next = f32[SIZE] add(w, change) square = f32[SIZE] multiply(error, error) zero = f32[] constant(0)
  loss = f32[] reduce(square, zero), dimensions={0}, to_apply=add
  ROOT t = (f32[SIZE], f32[]) tuple(next, loss) }"""
OPTIONS: bytes = xla_client.CompileOptions().SerializeAsString()


class Training:
    """A training on the first core of a worker.

    Args:
        address: the worker's address.
        size: number of weights.
        resume_s: longest wait for a worker after a loss, in seconds; 0 if the loss ends the training.
        ends: closes the lease and the engine.

    Attributes:
        lost: what `RemoteEngine` said to `on_lost`.
    """

    def __init__(self, address: str, size: int, resume_s: float, ends: ExitStack) -> None:
        self.lost: list[str] = []
        self._environ = snapshot()
        if resume_s:
            given = {env.POLYXLA_XRT_RESUME: str(resume_s), env.POLYXLA_XRT_SNAPSHOT_EVERY: str(EVERY)}
            self._environ = self._environ | given
        self._address, self._size, self._ends = address, size, ends
        text = STEP.replace("SIZE", str(size))
        self._module: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
        self._engine: RemoteEngine | None = None
        self._weights: Buffer | None = None
        self._step: Executable | None = None

    def run(self) -> str:
        """Train; return a digest of every loss, of the weights, and of the weights amid the training."""
        resuming = read_resuming(self._environ)
        lease = self._ends.enter_context(closing(Lease(self._address, 1, self._environ, resuming=resuming)))
        assignment = Assignment(self._address, lease.job, (0,), "TPU", 0, 1, 0, 1)
        engine = RemoteEngine(assignment, self._environ, lambda error, _: self.lost.append(str(error)))
        self._engine = self._ends.enter_context(closing(engine))
        (device,) = engine.devices
        digest = hashlib.sha256()
        start = np.linspace(-1, 1, self._size, dtype=np.float32)
        weights = engine.from_host(device, ArrayType("float32", (self._size,)), start.view(np.uint8).data)
        self._weights = weights
        self._step = step = engine.compile(self._module, OPTIONS)
        for number in range(STEPS):
            before, x = weights, engine.from_host(device, SCALAR, scalar(number))
            weights, loss = engine.execute(step, device, [before, x])
            self._weights = weights
            digest.update(engine.to_host(loss).result(TIMEOUT_S))
            for array in (before, x, loss):
                engine.delete(array)
            if number == STEPS // 2:
                amid = engine.copy(weights, device)
        for array in (amid, weights):
            digest.update(engine.to_host(array).result(TIMEOUT_S))
        # After a loss, the figure depends on how far the worker is with what is computed again.
        assert engine.memory_stats(device)["bytes_limit"]
        return digest.hexdigest()

    def untyped(self) -> list[str]:
        """Call everything after a loss, often; return what did not raise the error of the loss."""
        if (engine := self._engine) is None or not self.lost:
            return []
        (device,) = engine.devices
        calls: dict[str, Callable[[], Any]] = {
            "from_host": lambda: engine.from_host(device, SCALAR, scalar(1)),
            "compile": lambda: engine.compile(self._module, OPTIONS),
            "memory_stats": lambda: engine.memory_stats(device),
        }
        if weights := self._weights:
            calls["to_host"] = lambda: engine.to_host(weights).result(TIMEOUT_S)
            calls["copy"] = lambda: engine.copy(weights, device)
        if weights and (step := self._step):
            calls["execute"] = lambda: engine.execute(step, device, [weights, weights])
        found = []
        for name, call in calls.items():
            for _ in range(CALLS):
                try:
                    call()
                    found.append(f"{name} returns")
                except PjrtError as error:
                    if [error.message] != self.lost:
                        found.append(f"{name}: {error}")
                except Exception as error:
                    found.append(f"{name}: {error!r}")
        return sorted({*found})


def scalar(number: float) -> memoryview:
    return memoryview(struct.pack("<f", number))


def outcome(address: str, size: int, resume_s: float) -> dict[str, Any]:
    threads = set(threading.enumerate())
    found: dict[str, Any] = {"value": None, "error": None, "kind": None, "is_typed": True, "after": []}
    with ExitStack() as ends:
        training = Training(address, size, resume_s, ends)
        try:
            found["value"] = training.run()
            found["at"] = time.monotonic()
        except Exception as error:
            found["at"] = time.monotonic()
            found["error"] = str(error)
            found["kind"] = type(error).__name__
            found["is_typed"] = isinstance(error, PjrtError | WorkerError)
            found["after"] = training.untyped()
        found["lost"] = training.lost
        closes = time.monotonic()
    found["closed_s"] = time.monotonic() - closes
    # gRPC's own threads end a moment after their channel.
    deadline = time.monotonic() + LEAVE_S
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    found["threads"] = sorted(thread.name for thread in left)
    return found


def main() -> None:
    for line in sys.stdin:
        # A training that hangs prints where each of its threads is, and ends the process.
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        address, size, resume_s = line.split()
        print(json.dumps(outcome(address, int(size), float(resume_s))), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
