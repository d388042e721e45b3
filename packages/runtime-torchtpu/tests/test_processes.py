"""Whole programs: how TorchTPU finds the emulated libtpu, and what its threads must not do."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ADD = "import torch; print((torch.ones(2, device='tpu') + 1).cpu().tolist())"
OTHER_ORDER = """
import torch, torch_tpu
from polyxla_torchtpu import framework
framework.load()
print((torch.ones(2, device="tpu") + 1).cpu().tolist())
"""
# Each tensor is part of a cycle, which only a collection ends. TorchTPU ends the process if it runs in one of
# its own threads, which call the bridge for each operation.
CYCLES = """
import gc, threading, time, torch
gc.set_threshold(100)
collected = set()
x = torch.ones(4, device="tpu")
gc.callbacks.append(lambda phase, info: collected.add(threading.current_thread()))
for step in range(3000):
    cycle = [x + step]
    cycle.append(cycle)
deadline = time.monotonic() + 30
while not collected and time.monotonic() < deadline:
    pass
print(collected == {threading.main_thread()})
"""
DISABLED = """
import gc, time, torch
gc.disable()
x = torch.ones(4, device="tpu") + 1
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
for step in range(5000):
    cycle = []
    cycle.append(cycle)
time.sleep(0.3)
print(gc.isenabled(), collected)
"""
RANDOM = """
import torch
torch.manual_seed(5)
before = torch.tpu.default_generators[0].get_state()
first = torch.rand(3, device="tpu").tolist()
other = torch.rand(3, device="tpu").tolist()
torch.tpu.default_generators[0].set_state(before)
print(other != first == torch.rand(3, device="tpu").tolist())
"""
BACKWARD = """
import torch
x = torch.ones(1, requires_grad=True)
(x * 2).backward()
print(x.grad.item())
"""
THEN_LAUNCH = """
import os
import polyxla

def train(replica, parent):
    import torch
    x = torch.ones(1, device=replica.device, requires_grad=True)
    (x * 2).backward()
    return os.getpid() == parent, x.grad.item()

if __name__ == "__main__":
    import torch
    torch.ones(1, requires_grad=True).backward()
    print(polyxla.launch(train, (os.getpid(),), devices=1))
"""
SEED_THEN_LAUNCH = """
import sys
import torch
import polyxla

def draw(replica):
    return torch.rand(1, device=replica.device).item()

if __name__ == "__main__":
    (torch.manual_seed if "torch" in sys.argv else polyxla.seed_everything)(5)
    drawn = polyxla.launch(draw, devices=2)
    print(len({*drawn}), polyxla.launch(draw, devices=2) == drawn)
"""
MENDED = """
import subprocess, sys
import polyxla

def check(replica):
    import torch
    from torch.utils.checkpoint import checkpoint
    x = torch.ones(64, 64, device=replica.device, requires_grad=True)
    y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    same_masks = torch.equal(x.grad, y.detach())
    norm, expected = torch.nn.BatchNorm2d(2).to(replica.device), torch.nn.BatchNorm2d(2)
    for step in range(3):
        images = torch.arange(24.0).reshape(3, 2, 2, 2) * (step + 1)
        norm(images.to(replica.device))
        expected(images)
    moved = all(
        torch.allclose(getattr(norm, name).cpu(), getattr(expected, name))
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    command = [sys.executable, "-c", "import torch; print(torch.device('tpu'))"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    means = torch.nn.functional.avg_pool1d(x, 2)
    means.sum().backward()
    has_gradient = means.requires_grad and torch.allclose(x.grad.cpu(), y.detach().cpu() + 0.5)
    return same_masks, moved, has_gradient, child.stdout.splitlines()[-1:], child.stderr[-500:]

if __name__ == "__main__":
    print(*polyxla.launch(check, devices=2), sep="\\n")
"""
FLASH = """
import torch
torch.backends.cuda.enable_flash_sdp(True)
x = torch.ones(1, 2, 128, 128, device="tpu")
torch.nn.functional.scaled_dot_product_attention(x, x, x).cpu()
"""
# When the error comes, TorchTPU's threads still compile what it runs next.
RAISE = """
import atexit, sys, torch
atexit.register(print, "the program's own exit function")
x = torch.ones(16, 16, device="tpu")
for size in range(3, 15):
    torch.nn.functional.softmax(x[:size] @ x + size, -1).cumsum(0).sort()
raise getattr(__builtins__, sys.argv[1])("my own mistake")
"""
# As pytest keeps the error of a test that was expected to fail.
CAUGHT = """
import sys, torch
def test():
    try:
        raise AssertionError
    except AssertionError:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
test()
print((torch.ones(2, device="tpu") + 1).cpu().tolist())
"""
FAIL = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
total = torch.ones(2, device="tpu")
dist.all_reduce(total)
print(f"{{total.tolist()}}\\n", end="", flush=True)
if dist.get_rank() == 1:
    {ending}
dist.all_reduce(total)
print("not reached", total.tolist())
"""
# Rank 0 waits for rank 1 on the host.
FAIL_EARLY = """
import os, sys, torch
import torch.distributed as dist
torch.zeros(1, device="tpu").item()
if os.environ["RANK"] == "1":
    {ending}
dist.init_process_group("tpu_dist")
"""
# Two groups of every other device, which TorchTPU numbers so that those of a group are next to each other.
EVERY_OTHER = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("tpu_dist")
mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("outer", "inner"))
sums = {}
for name in mesh.mesh_dim_names:
    total = torch.full((2,), dist.get_rank() + 1.0, device="tpu")
    dist.all_reduce(total, group=mesh[name].get_group())
    bits = torch.tensor(dist.get_rank() + 1).to("tpu")
    dist.all_reduce(bits, dist.ReduceOp.BXOR, group=mesh[name].get_group())
    sums[name] = [*total.tolist(), bits.item()]
print(f"{dist.get_rank()} {sums}\\n", end="", flush=True)
dist.destroy_process_group()
"""

# TorchTPU makes a group with Python's lock held: rank 1 would never compute the sum that rank 0 waits for.
GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
total = torch.ones(2, device="tpu")
for _ in range(20):
    dist.all_reduce(total)
    total /= 2
if dist.get_rank() == 0:
    print(f"{total.tolist()}\\n", end="", flush=True)
group = dist.new_group([0, 1])
dist.all_reduce(total, group=group)
print(f"{total.tolist()}\\n", end="", flush=True)
dist.destroy_process_group()
"""

# Each process restores what it saved, and what it is told to put on the device.
RESTORE = """
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
path = Path(__file__).with_name(f"{dist.get_rank()}.pt")
torch.save([torch.ones(2, device="tpu"), torch.tensor([3, 4])], path)
kept, (_, moved) = torch.load(path)[0], torch.load(path, map_location="tpu")
sums = (kept + torch.ones(2, device="tpu")).tolist(), (moved + torch.ones_like(moved)).tolist()
print(f"{kept.device} {moved.device} {sums}\\n", end="", flush=True)
dist.destroy_process_group()
"""

COMPILED = """
import torch
from torch._dynamo.utils import counters
x = torch.ones(4, device="tpu")
for _ in range(2):
    with torch.no_grad():
        print(torch.compile(lambda x: (x * 3).sum())(x).item())
    torch._dynamo.reset()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code, **environ)


def run_python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "POLYXLA_EMULATE": "v5e-1", **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("code", "environ", "answer"),
    [
        pytest.param(ADD, {}, "[2.0, 2.0]", id="autoload"),
        pytest.param(OTHER_ORDER, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "[2.0, 2.0]", id="torch_tpu-first"),
        pytest.param(CYCLES, {}, "True", id="cycles"),
        pytest.param(DISABLED, {}, "False []", id="collection-off"),
        pytest.param(RANDOM, {}, "True", id="random"),
        pytest.param(CAUGHT, {}, "[2.0, 2.0]", id="caught"),
    ],
)
def test_a_program_runs_on_the_emulated_libtpu(code: str, environ: dict[str, str], answer: str) -> None:
    done = run(code, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == answer
    assert "nanobind" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("polyxla: ")]
    assert [line.partition(" on this")[0] for line in said] == ["polyxla: emulating a v5litepod-1"]


def test_a_kernel_for_tpu_cores_is_refused_with_what_to_write_instead() -> None:
    done = run(FLASH)
    assert done.returncode == 1, done.stderr[-3000:]
    raised = next(line for line in done.stderr.splitlines() if line.startswith("NotImplementedError: "))
    assert "has the tpu_custom_call" in raised
    assert raised.endswith("for attention, write torch.backends.cuda.enable_flash_sdp(False)")


@pytest.mark.parametrize(("error", "code"), [("ValueError", 1), ("KeyboardInterrupt", -signal.SIGINT)])
def test_an_exception_is_the_last_word_of_a_program_with_work_in_its_queue(error: str, code: int) -> None:
    """Otherwise TorchTPU's threads would call Python while it is finalised: signal 6 or 11."""
    done = run_python("-c", RAISE, error)
    assert done.returncode == code, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "the program's own exit function"
    assert done.stderr.splitlines()[-1] == f"{error}: my own mistake", done.stderr[-3000:]
    assert "failed" not in done.stderr


def run_several(directory: Path, code: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    program = directory / "program.py"
    program.write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), str(program)],
        # Two may be some of the host's four chips.
        env={**os.environ, "POLYXLA_EMULATE": "v4-8"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_replica_may_read_a_sum_while_another_makes_a_group(tmp_path: Path) -> None:
    done = run_several(tmp_path, GROUP)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")[:-1]) == ["[1.0, 1.0]", "[2.0, 2.0]", "[2.0, 2.0]"]


def test_each_process_restores_tensors_to_its_own_device(tmp_path: Path) -> None:
    done = run_several(tmp_path, RESTORE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == ["tpu:0 tpu:0 ([2.0, 2.0], [4, 5])"] * 2


def test_a_compiled_function_is_cached_for_jobs_of_as_many_devices(tmp_path: Path) -> None:
    for device_type in ("v5e-1", "v5e-4"):
        done = run(COMPILED, POLYXLA_EMULATE=device_type, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.stdout.splitlines()[-3:] == ["12.0", "12.0", "1"], done.stderr[-3000:]
        assert "AOTAutogradCache" not in done.stderr


def test_a_group_of_every_other_device_reduces_over_its_own(tmp_path: Path) -> None:
    done = run_several(tmp_path, EVERY_OTHER, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if line[:1].isdigit()) == [
        "0 {'outer': [4.0, 4.0, 2], 'inner': [3.0, 3.0, 3]}",
        "1 {'outer': [6.0, 6.0, 6], 'inner': [3.0, 3.0, 3]}",
        "2 {'outer': [4.0, 4.0, 2], 'inner': [7.0, 7.0, 7]}",
        "3 {'outer': [6.0, 6.0, 6], 'inner': [7.0, 7.0, 7]}",
    ]


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        pytest.param("raise ValueError('my own mistake')", "ValueError: my own mistake", id="raise"),
        pytest.param("sys.exit('my own mistake')", "my own mistake", id="exit"),
    ],
)
def test_a_process_that_fails_ends_a_job_of_torchrun(ending: str, said: str, tmp_path: Path) -> None:
    """TorchTPU's own exit function would join the other's collective as a barrier, or wait for ever."""
    done = run_several(tmp_path, FAIL.format(ending=ending))
    assert done.returncode != 0
    assert said in done.stderr
    # After an exception the process ends at once, and torchrun ends the others; some may report their wait.
    assert "Root Cause (first observed failure)" in done.stderr
    assert done.stdout.splitlines()[-1] == "[2.0, 2.0]"


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        pytest.param("raise ValueError('my own mistake')", "ValueError: my own mistake", id="raise"),
        pytest.param("sys.exit('my own mistake')", "my own mistake", id="exit", marks=pytest.mark.long),
    ],
)
def test_a_process_that_fails_early_does_not_wait_for_one_that_waits_for_it(
    ending: str, said: str, tmp_path: Path
) -> None:
    done = run_several(tmp_path, FAIL_EARLY.format(ending=ending))
    assert done.returncode != 0
    assert said in done.stderr
    assert "exitcode  : 1 " in done.stderr.partition("Root Cause")[2]


def test_a_tpu_that_does_not_exist_is_one_line_where_torch_is_imported() -> None:
    done = run("import torch", POLYXLA_EMULATE="v5e-2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("polyxla: error: ")
    assert "v5e-2" in done.stderr


def test_without_the_variable_nothing_is_emulated() -> None:
    done = run("import torch; print(torch.accelerator.is_available())", POLYXLA_EMULATE="")
    assert done.stdout.splitlines()[-1] == "False", done.stderr[-2000:]


def test_without_a_tpu_a_backward_pass_on_the_cpu_does_not_wait_for_one() -> None:
    done = run(BACKWARD, POLYXLA_EMULATE="")
    assert done.stdout.splitlines()[-1] == "2.0", done.stderr[-2000:]
    assert "no TPU chip is attached to this machine, and none is emulated" in done.stderr


def test_a_replica_after_it_is_not_launched_in_the_same_process(tmp_path: Path) -> None:
    """By then, torch has counted the devices: a backward pass on another one would fail."""
    program = tmp_path / "program.py"
    program.write_text(THEN_LAUNCH)
    done = run_python(str(program), POLYXLA_EMULATE="")
    assert done.stdout.splitlines()[-1] == "[(False, 2.0)]", done.stderr[-2000:]


def test_replicas_and_their_programs_lack_nothing_that_torch_promises(tmp_path: Path) -> None:
    """Masks of dropout, running statistics, gradients, and the device's name in a replica's program."""
    program = tmp_path / "program.py"
    program.write_text(MENDED)
    done = run_python(str(program), POLYXLA_EMULATE="")
    found = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("(")]
    assert [values[:4] for values in found] == [(True, True, True, ["tpu"])] * 2, (found, done.stderr[-2000:])


def test_seeds_before_a_launch_are_the_replicas_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SEED_THEN_LAUNCH)
    done = run_python(str(program), POLYXLA_EMULATE="v4-8")
    assert done.stdout.splitlines()[-1:] == ["2 True"], done.stderr[-2000:]
    # It seeds the devices too, so it opens them.
    refused = run_python(str(program), "torch", POLYXLA_EMULATE="v4-8")
    assert refused.returncode != 0
    assert "this process already uses the TPU" in refused.stderr
    assert "torch.manual_seed is one: use polyxla.seed_everything" in refused.stderr
