"""Helpers of the programs that use an engine without torch_xla."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge import env, pjrt_plugin
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.programs.executable import ArrayType, Executable

OPTIONS = xla_client.CompileOptions().SerializeAsString()
SETTINGS = env.current()


def module(text: str) -> bytes:
    """Return a serialised HloModuleProto."""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def summing(name: str = "sum_of_all") -> bytes:
    """Return a program that sums a number over all replicas."""
    return module(f"""HloModule {name}, replica_count={SETTINGS.replicas}
    add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
    ENTRY main {{ x = f32[] parameter(0) k = f32[] constant(1) y = f32[] multiply(x, k)
      ROOT r = f32[] all-reduce(y), replica_groups={{}}, to_apply=add }}""")


def open_engine() -> Engine:
    """Return the engine that the environment asks for: on a PJRT plugin, or on jaxlib."""
    return pjrt_plugin.make_engine(SETTINGS, None) if SETTINGS.plugin else JaxEngine(SETTINGS)


def run(engine: Engine, executable: Executable, index: int, value: float) -> Future[memoryview]:
    """Execute a program of one number on one replica."""
    data = memoryview(np.array([value], np.float32).view(np.uint8).data)
    argument = engine.from_host(engine.devices[index], ArrayType("float32", ()), data)
    (result,) = engine.execute(executable, engine.devices[index], [argument])
    return engine.to_host(result)


def value(result: Future[memoryview]) -> float:
    """Wait for the result of `run`."""
    return float(np.frombuffer(result.result(40), np.float32)[0])


def say(*what: Any) -> None:
    """Print a line for the test."""
    print(">", *what, flush=True)


def _flag(name: str) -> Path:
    return Path(os.environ["FLAGS"], name)


def set_flag(name: str) -> None:
    """Continue the threads and processes that wait for a flag."""
    _flag(name).touch()


def is_set(name: str) -> bool:
    """Return whether a flag is set."""
    return _flag(name).exists()


def wait_for(name: str) -> None:
    """Wait until another thread or process sets a flag."""
    end = time.monotonic() + 60
    while not is_set(name):
        assert time.monotonic() < end, name
        time.sleep(0.01)


def main(functions: dict[str, Any]) -> None:
    """Run the function that the command line names."""
    functions[sys.argv[1]](*sys.argv[2:])
