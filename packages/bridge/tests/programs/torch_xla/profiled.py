"""Writes a profile to the directory on the command line, and prints the operations in it."""

import sys
from pathlib import Path

import torch
import torch_xla
import torch_xla.debug.profiler as xp
from jax.profiler import ProfileData

from polyxla_bridge.engine.jax_engine import OPERATIONS

x = torch.ones(64, 64, device="xla")
torch_xla.sync()
xp.start_trace(sys.argv[1])
print((x @ x).sum().item())
xp.stop_trace()
(path,) = Path(sys.argv[1]).rglob("*.xplane.pb")
planes = list(ProfileData.from_file(str(path)).planes)
lines = [line for plane in planes if plane.name == OPERATIONS for line in plane.lines]
print(any(event.name.startswith("dot") for line in lines for event in line.events))
print(*sorted(plane.name for plane in planes if plane.name.startswith("/")))
