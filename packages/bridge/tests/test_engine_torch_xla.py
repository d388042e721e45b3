"""What torch_xla asks of the engine, in real programs: lists of tensors, several processes, its cache."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import Share

Printed = Callable[..., list[list[str]]]
Run = Callable[..., list[subprocess.CompletedProcess[str]]]


@pytest.mark.parametrize(("replicas", "processes"), [(1, 1), (2, 1), (4, 1), (4, 4)])
def test_collectives_of_lists_groups_and_dtypes(printed: Printed, replicas: int, processes: int) -> None:
    found = printed(LISTS + "print(*everywhere(check))", replicas, processes)
    assert found == [[" ".join(["right"] * (replicas // processes))]] * processes


# In lists, torch_xla 2.9.0 ends the process itself where layouts are pinned ("Check failed: has_layout()").
LISTS = """
def check():
    device, ordinal, size = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    total = size * (size + 1) / 2

    def whole(count, more=0.0):
        return torch.arange(float(count), device=device).reshape(size, -1) * (ordinal + 1) + more

    def mine(count, more=0.0):
        return (torch.arange(float(count)).reshape(size, -1) * total + size * more)[ordinal : ordinal + 1]

    def same(found, *expected):
        torch_xla.sync()
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one.cpu(), other), (ordinal, one.cpu(), other)

    scatter = dict(scale=1.0, scatter_dim=0, shard_count=size, pin_layout=False)
    lists = [whole(size * 2), whole(size * 3, 1.0), whole(size)]
    expected = [mine(size * 2), mine(size * 3, 1.0), mine(size)]
    same(xm.reduce_scatter(xm.REDUCE_SUM, lists, **scatter), *expected)
    most = xm.reduce_scatter(xm.REDUCE_MAX, lists, **scatter)
    same(most[:1], (torch.arange(size * 2.0).reshape(size, -1) * size)[ordinal : ordinal + 1])
    outputs = [torch.zeros(1, columns, device=device) for columns in (2, 3, 1)]
    xm.reduce_scatter(xm.REDUCE_SUM, lists, output=outputs, **scatter)
    same(outputs, *expected)
    for bucket in (0, 1):
        same(xm.reduce_scatter_bucketized(xm.REDUCE_SUM, lists, bucket_cap_mb=bucket, **scatter), *expected)
    half = xm.reduce_scatter_bucketized(xm.REDUCE_SUM, lists, bucket_cap_mb=0, **{**scatter, "scale": 0.5})
    same(half, *[one * 0.5 for one in expected])
    if size == 4:
        groups = [[0, 2], [1, 3]]
        group = groups[ordinal % 2]
        place = group.index(ordinal)
        apart = {**scatter, "shard_count": 2, "groups": groups}
        lists = [torch.arange(4.0, device=device) + ordinal, torch.arange(2.0, device=device)]
        found = xm.reduce_scatter(xm.REDUCE_SUM, lists, **apart)
        same(found[:1], (2 * torch.arange(4.0) + sum(group))[2 * place : 2 * place + 2])
        number = torch.full((1,), float(ordinal), device=device)
        same([xm.all_reduce(xm.REDUCE_SUM, number, groups=groups)], torch.tensor([float(sum(group))]))
        same([xm.all_gather(number, groups=groups)], torch.tensor([float(one) for one in group]))
    pair = [torch.full((2,), float(ordinal), device=device), torch.full((3,), 2.0 * ordinal, device=device)]
    every = [torch.tensor([k * i for i in range(size) for _ in range(n)]) for k, n in ((1.0, 2), (2.0, 3))]
    same(xm.all_gather(pair, pin_layout=False), *every)
    same(xm.all_gather_bucketized(pair, pin_layout=False, bucket_cap_mb=1), *every)
    output = torch.zeros(size * 2, device=device)
    xm.all_gather(pair[0], output=output)
    same([output], every[0])
    wide = xm.all_gather(torch.full((2, 2), float(ordinal), device=device), dim=1)
    same([wide], torch.stack([every[0], every[0]]))
    for op, combine in ((xm.REDUCE_SUM, sum), (xm.REDUCE_MIN, min), (xm.REDUCE_MAX, max)):
        two = [torch.full((2,), ordinal + 1.0, device=device), torch.full((3,), ordinal + 2, device=device)]
        xm.all_reduce(op, two)
        torch_xla.sync()
        assert two[0].cpu()[0].item() == combine([i + 1.0 for i in range(size)]), op
        assert two[1].cpu()[0].item() == combine([i + 2 for i in range(size)]), op
    for op, expected in ((xm.REDUCE_AND, [size == 1, True]), (xm.REDUCE_OR, [True, True])):
        flags = [torch.tensor([ordinal == 0, True], device=device), torch.tensor([True], device=device)]
        xm.all_reduce(op, flags)
        torch_xla.sync()
        assert flags[0].cpu().tolist() == expected, op
    reals = [torch.bfloat16, torch.float16, torch.float64]
    for dtype in [*reals, torch.int32, torch.int64, torch.uint8, torch.int8]:
        found = xm.all_reduce(xm.REDUCE_SUM, torch.ones(3, device=device, dtype=dtype)).cpu()
        assert found.tolist() == [size] * 3 and found.dtype == dtype, dtype
    sent = torch.arange(size * 2.0, device=device).reshape(size, 2) + 100 * ordinal
    got = xm.all_to_all(sent, 0, 1, size).cpu()
    assert got.tolist() == [[100.0 * i + 2 * ordinal + k for i in range(size) for k in range(2)]], got
    ring = [[i, (i + 1) % size] for i in range(size)]
    found = xm.collective_permute(torch.tensor([float(ordinal)], device=device), ring).cpu()
    assert found.item() == (ordinal - 1) % size
    found = xm.collective_permute(torch.tensor([ordinal + 5.0], device=device), [[0, size - 1]]).cpu()
    assert found.item() == (5.0 if ordinal == size - 1 else 0.0)
    return "right"
"""


def test_four_processes_compile_one_program_once(printed: Printed) -> None:
    found = printed(
        """
        def train():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
            model = model.to(torch_xla.device())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch_xla.sync()
            before = engine().compiles
            data = torch.ones(4, 8) * (xr.global_ordinal() + 2)
            for _ in range(5):
                optimizer.zero_grad()
                model(data.to(torch_xla.device())).square().sum().backward()
                xm.optimizer_step(optimizer)
                torch_xla.sync()
            weight = model[0].weight.detach().cpu().sum().item()
            return engine().compiles, met.metric_data("CompileTime")[0], round(weight, 5)
        print(*everywhere(train)[0])
        """,
        4,
        4,
    )
    mine, asked, weights = zip(*[lines[0].split() for lines in found], strict=True)
    assert len(set(weights)) == 1, found
    assert len(set(asked)) == 1, found
    # As many as one process would compile alone.
    assert sum(map(int, mine)) == int(asked[0]), found


def test_what_torch_xlas_cache_keeps_can_be_loaded(printed: Printed, tmp_path: Path) -> None:
    """By the engine: torch_xla 2.9.0 itself loads nothing back from a plugin.

    Source: https://github.com/pytorch/xla/issues/9094 (it asks a function that plugins do not have).
    """
    code = f"""
    xr.initialize_cache({str(tmp_path)!r}, readonly=False)
    def work():
        x = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3)
        y = torch.softmax(x @ x.t(), 0)
        torch_xla.sync()
        return y.cpu().sum().item()
    print(*everywhere(work), met.counter_value("PersistentCacheMiss"))
    """
    assert printed(code) == [["2.0 1"]]
    (kept,) = [one for one in tmp_path.iterdir() if not one.name.startswith("polyxla-")]
    engine = JaxEngine(Share())
    try:
        executable = engine.deserialize(kept.read_bytes())
        assert (2, 2) in [one.dims for one in executable.outputs]
        assert engine.compiles == 0
    finally:
        engine.close()


@pytest.mark.parametrize("folder", ["shared", "of-{ordinal}"])
@pytest.mark.parametrize(("replicas", "processes"), [(1, 1), (2, 1), (2, 2)])
def test_the_next_job_compiles_nothing(
    run: Run, tmp_path: Path, replicas: int, processes: int, folder: str
) -> None:
    code = f"""
    import hashlib
    asked, compile_ = set(), JaxEngine.compile
    def compile(engine, module, options):
        asked.add(hashlib.sha256(module + options).hexdigest())
        return compile_(engine, module, options)
    JaxEngine.compile = compile
    xr.initialize_cache({str(tmp_path / folder)!r}.format(ordinal=os.environ["POLYXLA_BRIDGE_PROCESS"]))
    def work():
        x = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3) + xr.global_ordinal()
        y = xm.all_reduce(xm.REDUCE_SUM, torch.softmax(x @ x.t(), 0))
        torch_xla.sync()
        return round(y.cpu().sum().item(), 5)
    print(*everywhere(work), *sorted(asked))
    print(engine().compiles, engine().cache.hits, engine().cache.misses)
    """
    before, after = run(code, replicas, processes), run(code, replicas, processes)
    # What torch_xla's own attempt comes to, and nothing else.
    lines = [line for one in (*before, *after) for line in one.stderr.splitlines()]
    assert [line for line in lines if "Failed to deserialize executable" not in line] == []
    (first, second) = ([one.stdout.splitlines() for one in job] for job in (before, after))
    assert [one[0] for one in first] == [one[0] for one in second]
    counts = [[tuple(map(int, one[1].split())) for one in job] for job in (first, second)]
    of_each = [sum(len(name) == 64 for name in one[0].split()) for one in first]
    programs = len({name for one in first for name in one[0].split() if len(name) == 64})
    assert [sum(compiles for compiles, _, _ in job) for job in counts] == [programs, 0]
    # Whoever compiles or looks, each process counts the programs that it needs.
    assert [one[1:] for one in counts[0]] == [(0, count) for count in of_each]
    assert [one[1:] for one in counts[1]] == [(count, 0) for count in of_each]


def test_memory_is_what_tensors_take(printed: Printed) -> None:
    (lines,) = printed(
        """
        device = torch_xla.device()
        start = xm.get_memory_info(device)["bytes_used"]
        big = torch.ones(1 << 20).to(device)
        more = big + 1
        # torch_xla sends a tensor when a program first needs it.
        more.cpu()
        info = xm.get_memory_info(device)
        print(info["bytes_used"] - start, info["bytes_limit"] > info["peak_bytes_used"] >= 8 << 20)
        del big, more
        gc.collect()
        deadline = time.monotonic() + 10
        # The thread that read the tensor for cpu() lets go of it a moment after.
        while (held := xm.get_memory_info(device)["bytes_used"] - start) and time.monotonic() < deadline:
            time.sleep(0.01)
        print(held)
        """
    )
    assert lines == [f"{8 << 20} True", "0"]


def test_training_takes_no_more_memory_with_every_step(printed: Printed) -> None:
    (lines,) = printed(
        """
        device = torch_xla.device()
        model = torch.nn.Linear(64, 64).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(32, 64)
        def used():
            with open("/proc/self/statm") as file: return int(file.read().split()[1]) * 4096
        for step in range(2001):
            optimizer.zero_grad()
            model(data.to(device)).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
            if step in (500, 2000):
                xm.wait_device_ops()
                live = len(engine()._accounts[0]._live)
                print(live, engine().memory_stats(engine().devices[0])["bytes_in_use"], used())
        """
    )
    (live, in_use, resident), (live_after, in_use_after, resident_after) = (
        map(int, line.split()) for line in lines
    )
    assert (live_after, in_use_after) == (live, in_use)
    assert resident_after - resident < 16 << 20
