"""Ends with an engine whose ``close`` raises: ``pjrt`` or ``os`` error."""

import sys

import torch

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.errors import PjrtError


def close(engine: JaxEngine, *_: object) -> None:
    raise PjrtError(4, "not finished: replica 0") if sys.argv[1] == "pjrt" else OSError("gone")


JaxEngine.close = close  # type: ignore[assignment,method-assign]
print((torch.ones(2, device="xla") + 1).sum().item())
