"""A pod: several workers, each driven by a host of its own, and one job on all of their cores."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from polyxla_xrt.plan import free_port

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PATIENCE_S = 180
TRAIN = """
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr

def train(index):
    total = xm.all_reduce("sum", torch.ones((), device=torch_xla.device()) * xr.global_ordinal())
    torch_xla.sync()
    names = xm.rendezvous("names", str(xr.global_ordinal()).encode())
    told = [xr.global_ordinal(), index, xr.world_size(), int(total), b"".join(names).decode()]
    # One string: several processes write to one pipe.
    print(" ".join(map(str, ["ORDINAL", *told])) + "\\n", end="")

if __name__ == "__main__":
    torch_xla.launch(train)
"""


def test_two_hosts_are_one_job(
    two_hosts: list[Host],
    serve: Callable[..., Served],
    launch: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    workers = [serve(host, 2) for host in two_hosts]
    alike = {
        "XRT_MESH_SERVICE_ADDRESS": f"{two_hosts[0].address}:{free_port()}",
        "XRT_SHARD_WORLD_SIZE": "2",
        "TPU_NUM_DEVICES": "2",
    }
    config = "|".join(f"c_tpu_worker;{task};{worker.address}" for task, worker in enumerate(workers))
    run = ("-m", "polyxla", "run", str(script))
    # As a pod's launcher does it: only the first is told of all workers. It comes last, and is waited for.
    second = launch(two_hosts[1], *run, XRT_LOCAL_WORKER="c_tpu_worker:1", **alike)
    first = launch(two_hosts[0], *run, XRT_LOCAL_WORKER="c_tpu_worker:0", XRT_TPU_CONFIG=config, **alike)
    lines = []
    for launcher in (first, second):
        out, err = launcher.communicate(timeout=PATIENCE_S)
        assert launcher.returncode == 0, err
        lines += [line for line in out.splitlines() if line]
    assert sorted(lines) == [f"ORDINAL {ordinal} {ordinal} 4 6 0123" for ordinal in range(4)]
