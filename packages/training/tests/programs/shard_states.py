"""Replicas in a process group of torch, on the CPU, that divide a state and save it.

Each replica is forked once torch is imported, and prints its lines whole.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from polyxla_training import load_into, shared_directory
from polyxla_training.checkpoint import BackgroundWriter, CheckpointError, CheckpointFolder, load, save
from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint
from polyxla_training.sharding.sharded_state import gathered

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 4), torch.float32),
    "uneven": ((5, 3), torch.bfloat16),
    "short": ((2,), torch.float64),
    "complex": ((6,), torch.complex64),
}


def values(step: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, (shape, dtype) in SHAPES.items()
    }


def state(mesh: DeviceMesh, step: int = 1) -> dict[str, Any]:
    """What is saved: divided tensors, tensors that differ between replicas, and other values."""
    rank = dist.get_rank()
    # The last dimension of the mesh divides columns, if a tensor has them.
    module = {
        name: distribute_tensor(whole, mesh, _placements(mesh, whole)) for name, whole in values(step).items()
    }
    return {"step": step, "module": module, "own": torch.tensor(rank), "list": [1, (2.5, "three")]}


def _placements(mesh: DeviceMesh, tensor: torch.Tensor) -> list[Placement]:
    if mesh.ndim == 1:
        return [Shard(0)]
    return [Replicate() if tensor.dim() == 1 else Shard(1), Shard(0)]


def _print_error(error: CheckpointError) -> None:
    # gloo prints lines of its own.
    os.write(1, f"error in {dist.get_rank()}: {error}\n".encode())


def save_once(mesh: DeviceMesh, path: str) -> None:
    save(state(mesh), path)


def save_steps(mesh: DeviceMesh, path: str, count: str) -> None:
    folder = CheckpointFolder(path, keep=2)
    for step in range(1, int(count) + 1):
        folder.save(step, state(mesh, step), keep_forever=step == 1)


def save_twice(mesh: DeviceMesh, path: str) -> None:
    for step in (1, 2):
        save(state(mesh, step), path)


def save_in_background(mesh: DeviceMesh, path: str) -> None:
    saved = state(mesh)
    with BackgroundWriter() as writer:
        writer.submit(partial(save, path=path), saved)
        for tensor in saved["module"].values():
            tensor.to_local().zero_()


def save_until_killed(mesh: DeviceMesh, path: str, first: str) -> None:
    folder = CheckpointFolder(path, keep=2)
    for step in itertools.count(int(first)):
        big = distribute_tensor(torch.full((2**18,), step), mesh, [Shard(0)])
        folder.save(step, {"step": step, "big": big})
        if dist.get_rank() == 0:
            os.write(1, b"saved %d\n" % step)


def save_on_a_full_disk(mesh: DeviceMesh, path: str) -> None:
    """Let ordinal 1 write 1000 bytes at most, as on a full disk of its host."""
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        save({"big": distribute_tensor(torch.zeros(2**12), mesh, [Shard(0)])}, path)
    except CheckpointError as error:
        _print_error(error)


def save_without_a_shared_directory(mesh: DeviceMesh, path: str) -> None:
    """Let ordinal 1 work in a directory of its own, as on a host of its own."""
    shared_directory.SEEN_S = 0.5
    own = Path(path, f"host{dist.get_rank()}")
    own.mkdir()
    os.chdir(own)
    try:
        save(state(mesh), "run/step-00000001.shards")
    except CheckpointError as error:
        _print_error(error)


def save_with_torch(mesh: DeviceMesh, path: str) -> None:
    try:
        save(state(mesh), path, format="torch")
    except CheckpointError as error:
        _print_error(error)
    # The end of this process would cut the connections to its group, which the other may be making still.
    dist.barrier()


def lose_a_replica(mesh: DeviceMesh, path: str) -> None:
    """Let ordinal 1 end by SIGKILL before it has written."""
    saved = state(mesh)
    with BackgroundWriter() as writer:
        writer.submit(lambda _: None, saved)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(saved, path)
    except CheckpointError as error:
        _print_error(error)


def read_in_shards(mesh: DeviceMesh, path: str) -> None:
    """Read what other replicas saved, in this division, and compare the whole tensors."""
    shards = ShardedCheckpoint(Path(path))
    found = shards.state(unread=("module.",))
    assert found["step"] == 1
    assert all(tensor.is_meta for tensor in found["module"].values())
    expected = values(1)
    targets: dict[str, DTensor] = {}
    for unread in found["module"].values():
        whole = torch.zeros(unread.shape, dtype=unread.dtype)
        targets[str(shards.name_of(unread))] = distribute_tensor(whole, mesh, _placements(mesh, whole))
    shards.read(targets)
    for name, whole in expected.items():
        assert torch.equal(targets[f"module.{name}"].full_tensor(), whole), name
    assert torch.equal(load(path)["module"]["even"], expected["even"])


def _divided_module(mesh: DeviceMesh, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    fully_shard(module, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def save_training(mesh: DeviceMesh, path: str) -> None:
    module, optimizer = _divided_module(mesh, 0)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        module(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    save(state, path)


def resume_training(mesh: DeviceMesh, path: str) -> None:
    """Compare what each replica has loaded in its shards with what one process loads."""
    module, optimizer = _divided_module(mesh, 1)
    assert load_into(path, module, optimizer) == {"epoch": 2}
    expected = load(path)
    found = gathered({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, keep=True)
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert len(expected["optimizer"]["state"]) == 6
    moments, saved_moments = found["optimizer"]["state"], expected["optimizer"]["state"]
    pairs = [(moments[number], saved) for number, saved in saved_moments.items()]
    for own, saved in [*pairs, (found["module"], expected["module"])]:
        assert own.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(own[name], value), name


def _replica(rank: int, count: int, own: str, task: str, arguments: Sequence[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=rank, world_size=count)
    shape = (2, count // 2) if task.endswith("_on_two_dimensions") else (count,)
    mesh = init_device_mesh("cpu", shape)
    globals()[task.removesuffix("_on_two_dimensions")](mesh, *arguments)


def run(printed: Path, environ: dict[str, str], task: str, count: int, *arguments: str) -> None:
    """Run a task, which is a function here, in replicas that are forked from this process; exit as they do.

    This process and they are a group of their own, and print to a file.
    """
    os.setsid()
    os.environ.update(environ)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The caller removes this directory, even if the whole group is killed.
                _replica(rank, count, str(printed.parent), task, arguments)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(codes))
