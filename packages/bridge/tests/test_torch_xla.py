"""torch_xla on the bridge: real programs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_S = 150
Run = Callable[..., list[subprocess.CompletedProcess[str]]]
Printed = Callable[..., list[list[str]]]


def test_every_dtype_and_odd_shapes_travel_both_ways(printed: Printed) -> None:
    (lines,) = printed(
        """
        device = torch_xla.device()
        dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
                  torch.float8_e4m3fn, torch.float8_e5m2]
        for dtype in dtypes:
            here = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
            back = here.to(device).cpu()
            wide = torch.complex128
            assert back.dtype == dtype and torch.equal(back.to(wide), here.to(wide)), dtype
        for shape in [(), (0,), (3, 0, 2), (1,), (2, 3, 4)]:
            here = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            assert torch.equal(here.to(device).cpu(), here), shape
        turned = torch.arange(6.0).reshape(2, 3).t()
        assert torch.equal(turned.to(device).cpu(), turned)
        print(xm.xla_device_hw(device), xr.device_type(), xr.global_device_count(), "all the same")
        """
    )
    assert lines == ["CPU CPU 1 all the same"]


def test_training_computes_what_torch_computes(printed: Printed) -> None:
    (lines,) = printed(
        """
        import copy
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)]
        here = torch.nn.Sequential(*layers)
        there = copy.deepcopy(here).to(torch_xla.device())
        data, labels = torch.randn(16, 1, 8, 8), torch.randint(3, (16,))
        def train(model, data, labels):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(10):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(data), labels).backward()
                optimizer.step()
                torch_xla.sync()
        train(here, data, labels)
        train(there, data.to(torch_xla.device()), labels.to(torch_xla.device()))
        worst = max((a - b.cpu()).abs().max().item() for a, b in zip(here.parameters(), there.parameters()))
        compiles = met.metric_data("CompileTime")[0]
        print(worst < 1e-4, compiles <= 4)
        """
    )
    assert lines == ["True True"]


def test_memory_is_given_back(printed: Printed) -> None:
    (lines,) = printed(
        """
        import resource
        device = torch_xla.device()
        def used():
            with open("/proc/self/statm") as file: return int(file.read().split()[1]) * 4096
        for step in range(300):
            tensor = torch.ones(1 << 20).to(device) * 2
            torch_xla.sync(wait=True)
            if step == 50: before = used()
        print((used() - before) < 32 << 20)
        """
    )
    assert lines == ["True"]


def test_an_exception_keeps_its_exit_code_and_text(run: Run) -> None:
    (done,) = run("x = torch.ones(2, device='xla') + 1\nraise SystemExit(7)")
    assert done.returncode == 7
    (done,) = run("x = torch.ones(2, device='xla') + 1\nprint(x.sum().item())\nraise KeyError('mine')")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "core dumped" not in done.stderr
    assert done.stdout == "4.0\n"


@pytest.mark.parametrize("error", ["PjrtError(4, 'not finished: replica 0')", "OSError('gone')"])
def test_devices_that_cannot_be_let_go_of_end_the_program_with_one_line(run: Run, error: str) -> None:
    (done,) = run(
        f"""
        from polyxla_bridge.errors import PjrtError
        from polyxla_bridge.engine.jax_engine import JaxEngine
        def close(engine):
            raise {error}
        JaxEngine.close = close
        print((torch.ones(2, device='xla') + 1).sum().item())
        """
    )
    text = "OSError: gone" if "gone" in error else "not finished: replica 0"
    assert (done.returncode, done.stdout, done.stderr) == (4, "4.0\n", f"polyxla: {text}\n")


def test_a_profile_can_be_taken(printed: Printed, tmp_path: Path) -> None:
    (lines,) = printed(
        f"""
        import torch_xla.debug.profiler as xp
        xp.start_trace({str(tmp_path)!r})
        print((torch.ones(2, device='xla') + 1).sum().item())
        xp.stop_trace()
        """
    )
    assert lines == ["4.0"]
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_what_is_not_implemented_says_so_by_name(run: Run) -> None:
    (done,) = run("torch_xla._XLAC._xla_get_devices()\nimport ctypes\n" + UNIMPLEMENTED)
    assert "PJRT_Client_DmaMap is not implemented by polyxla-bridge" in done.stdout, done.stderr


UNIMPLEMENTED = """
from polyxla_bridge import native
from polyxla_bridge.table import abi
library = ctypes.CDLL(str(native.PATH))
library.GetPjrtApi.restype = ctypes.c_void_p
api = abi.Api.from_address(library.GetPjrtApi())
error = abi.CALLBACKS["Client_DmaMap"](api.Client_DmaMap)(ctypes.byref(abi.ARGS["Client_DmaMap"]()))
message = abi.ARGS["Error_Message"](error=error)
abi.CALLBACKS["Error_Message"](api.Error_Message)(ctypes.byref(message))
print(ctypes.string_at(message.message, message.message_size).decode())
"""


@pytest.mark.parametrize("replicas", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_collectives_of_replicas_that_are_threads(printed: Printed, replicas: int) -> None:
    (lines,) = printed(COLLECTIVES, replicas)
    assert lines == ["right"] * replicas


COLLECTIVES = """
def check():
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    mine = torch.tensor([ordinal + 1.0, 2.0], device=device)
    every = [torch.tensor([i + 1.0, 2.0]) for i in range(size)]
    stacked = torch.stack(every)
    expected = {xm.REDUCE_SUM: stacked.sum(0), xm.REDUCE_MUL: stacked.prod(0),
                xm.REDUCE_MIN: stacked.min(0).values, xm.REDUCE_MAX: stacked.max(0).values}
    for op, value in expected.items():
        assert torch.allclose(xm.all_reduce(op, mine).cpu(), value), op
    flags = torch.tensor([ordinal == 0, True], device=device)
    assert xm.all_reduce(xm.REDUCE_AND, flags).cpu().tolist() == [size == 1, True]
    assert xm.all_reduce(xm.REDUCE_OR, flags).cpu().tolist() == [True, True]
    assert torch.allclose(xm.all_reduce(xm.REDUCE_SUM, mine, scale=1 / size).cpu(), stacked.mean(0))
    pair = [torch.ones(2, device=device), torch.full((3,), float(ordinal), device=device)]
    xm.all_reduce(xm.REDUCE_SUM, pair)
    assert pair[0].cpu().tolist() == [size] * 2 and pair[1].cpu()[0].item() == size * (size - 1) / 2
    groups = [[i, i + 1] for i in range(0, size, 2)]
    near = xm.all_reduce(xm.REDUCE_SUM, mine, groups=groups).cpu()[0].item()
    first = ordinal - ordinal % 2
    assert near == (first + 1) + (first + 2)
    for pinned in (True, False):
        assert torch.equal(xm.all_gather(mine, pin_layout=pinned).cpu(), torch.cat(every))
    whole = torch.arange(2.0 * size, device=device) + ordinal
    part = xm.reduce_scatter(xm.REDUCE_SUM, whole, scale=1.0, scatter_dim=0, shard_count=size).cpu()
    base = torch.arange(2.0 * size) * size + size * (size - 1) / 2
    assert torch.allclose(part, base[2 * ordinal : 2 * ordinal + 2])
    turned = xm.all_to_all(torch.arange(float(size), device=device) + 100 * ordinal, 0, 0, size).cpu()
    assert turned.tolist() == [100.0 * i + ordinal for i in range(size)]
    ring = xm.collective_permute(mine, [[i, (i + 1) % size] for i in range(size)]).cpu()
    assert ring[0].item() == (ordinal - 1) % size + 1.0
    assert xm.mesh_reduce("sum", ordinal + 1, sum) == size * (size + 1) // 2
    assert xm.rendezvous("tag", str(ordinal).encode()) == [str(i).encode() for i in range(size)]
    model = torch.nn.Linear(2, 2).to(device)
    with torch.no_grad():
        model.weight.fill_(float(ordinal + 3))
    xm.broadcast_master_param(model)
    assert model.weight.cpu()[0, 0].item() == 3.0
    leaf = torch.full((2,), ordinal + 1.0, device=device, requires_grad=True)
    import torch_xla.core.functions as xf
    (xf.all_gather(leaf) * (ordinal + 1.0)).sum().backward()
    # torch_xla's own backward takes this replica's slice of this replica's gradient.
    assert leaf.grad.cpu().tolist() == [ordinal + 1.0] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((4, 2), ordinal + 1.0, device=device)).sum().backward()
    xm.optimizer_step(optimizer, barrier=True)
    weights = xm.all_gather(model.weight.detach()[None])
    assert torch.equal(weights.cpu()[0], weights.cpu()[-1])
    return "right"
print(*everywhere(check), sep="\\n")
"""


def test_a_thread_that_lets_go_of_tensors_does_not_stop_the_step(printed: Printed) -> None:
    # torch_xla makes the step's seed with a lock held that tensors need when they go, and these go with
    # Python's lock held: whatever makes the seed must not need that one.
    (lines,) = printed(
        """
        import threading, time
        device = torch_xla.device()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(device)
        here = torch.ones(2, 4)
        def let_go(tensors):
            while tensors: tensors.pop()
        end = time.monotonic() + 5
        while time.monotonic() < end:
            tensors = [here.to(device) for _ in range(1000)]
            torch_xla.sync()
            thread = threading.Thread(target=let_go, args=[tensors])
            thread.start()
            while thread.is_alive():
                model(here.to(device)).sum().backward()
                torch_xla.sync()
        print("done")
        """
    )
    assert lines == ["done"]


def test_programs_end_while_their_devices_still_work(run: Run) -> None:
    (done,) = run(
        """
        import os, sys, time
        LIMIT_S = 30
        def program(number):
            for _ in range(3):
                tensor = torch.ones(200_000).to(torch_xla.device()) * 2
                torch_xla.sync()
            if number % 3 == 1: raise KeyError("mine")
            sys.exit(number % 3)
        codes = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                program(number)
            end = time.monotonic() + LIMIT_S
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.01)
            if ended == (0, 0): os.kill(child, 9)
            codes.append(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs")
        print(codes)
        """
    )
    assert done.stdout == f"{[0, 1, 2] * 2}\n", done.stderr


def test_ctrl_c_ends_a_waiting_replica() -> None:
    """In a process that is Python's from its beginning, unlike the others here."""
    script = """
import time, torch, torch_xla
print(torch.ones(2, device="xla").sum().item(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PJRT_DEVICE": "CPU_POLYXLA"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2.0\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert "KeyboardInterrupt" in errors
        assert process.returncode in (1, 130, -signal.SIGINT)
