"""Runs programs with the cache directory on the command line; ``{process}`` in it is this process's index.

Prints the results and the fingerprints of all programs, then the number of compiles, hits and misses.
"""

import hashlib
import os
import sys

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla_helpers import engine, everywhere, xm

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.programs.executable import Executable

asked: set[str] = set()
compile_ = JaxEngine.compile


def compile_and_note(engine: JaxEngine, module: bytes, options: bytes) -> Executable:
    asked.add(hashlib.sha256(module + options).hexdigest())
    return compile_(engine, module, options)


def work() -> float:
    x = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3) + xr.global_ordinal()
    y = xm.all_reduce(xm.REDUCE_SUM, torch.softmax(x @ x.t(), 0))
    torch_xla.sync()
    return float(round(y.cpu().sum().item(), 5))


JaxEngine.compile = compile_and_note  # type: ignore[assignment,method-assign]
xr.initialize_cache(sys.argv[1].format(process=os.environ["POLYXLA_BRIDGE_PROCESS"]))
print(*everywhere(work), *sorted(asked))
print(engine().compiles, engine().cache.hits, engine().cache.misses)
