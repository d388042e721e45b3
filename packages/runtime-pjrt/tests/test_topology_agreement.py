"""The tables of polyxla.tpu agree with those of torch_xla and of the emulated libtpu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla.plugin import GENERATIONS, AcceleratorType, process_environments
from polyxla.tpu.accelerators import sizes
from polyxla_bridge.libtpu.topology import EMULATED_GENERATIONS

TYPES = [f"{generation}-{size}" for generation in GENERATIONS for size in sizes(generation)]
SMALL_TYPES = [name for name in TYPES if int(name.split("-")[1]) <= 512]


@pytest.mark.long
def test_torch_xla_sets_the_same_variables() -> None:
    """For the first, the middle and the last host of every type, described as GKE describes them."""
    described, ours = [], []
    for name in SMALL_TYPES:
        kind = AcceleratorType.parse(name, "here")
        names = [f"h{i}" for i in range(kind.hosts)]
        for worker_id in sorted({0, kind.hosts // 2, kind.hosts - 1}):
            host = {
                "TPU_SKIP_MDS_QUERY": "true",
                "TPU_ACCELERATOR_TYPE": kind.name,
                "TPU_HOST_BOUNDS": ",".join(map(str, kind.bounds.hosts)),
                "TPU_CHIPS_PER_HOST_BOUNDS": ",".join(map(str, kind.bounds.chips_per_host)),
                "TPU_WORKER_ID": str(worker_id),
                "TPU_WORKER_HOSTNAMES": ",".join(names),
            }
            described.append((host, kind.chips_per_host))
            ours.append([*process_environments(kind, worker_id=worker_id, hostnames=names)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "programs" / "torch_xla_topology.py")],
        input=json.dumps(described),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert json.loads(done.stdout) == ours


def test_the_emulated_libtpus_table_of_generations_agrees_with_cores() -> None:
    """polyxla-bridge imports no other package of ours, so it has a table of its own."""
    known = {
        name: generation.counts_y_first
        for name, generation in GENERATIONS.items()
        if generation.counts_y_first is not None
    }
    # An emulator has to number v6e's chips somehow; on a real host, core does not rely on any order.
    assert GENERATIONS.keys() - known.keys() == {"v6e"}
    assert {name: EMULATED_GENERATIONS[name].counts_y_first for name in known} == known
    assert {
        name: (chip.cores, chip.cores * chip.tensor_cores) for name, chip in EMULATED_GENERATIONS.items()
    } == {
        name: (generation.devices_per_chip, generation.cores_per_chip)
        for name, generation in GENERATIONS.items()
    }
