"""What TorchTPU offers on one device: each function is a check; the outcomes are printed as JSON."""

# TorchTPU adds to torch what torch's types lack.
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import threading
import time
import traceback

import torch

TIMEOUT_S = 20
MIB = 1 << 20


def memory_in_use() -> None:
    start = torch.accelerator.memory_allocated()
    x = torch.ones(MIB, device="tpu")
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() - start == 4 * MIB
    free, total = torch.accelerator.get_memory_info()
    assert total - free == torch.accelerator.memory_allocated()
    del x
    gc.collect()
    deadline = time.monotonic() + TIMEOUT_S
    while torch.accelerator.memory_allocated() != start and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.accelerator.memory_allocated() == start


def memory_peak() -> None:
    x = torch.ones(4 * MIB, device="tpu")
    torch.accelerator.synchronize()
    del x
    peak = torch.accelerator.max_memory_allocated()
    assert peak >= 16 * MIB
    deadline = time.monotonic() + TIMEOUT_S
    while torch.accelerator.max_memory_allocated() > peak - 16 * MIB and time.monotonic() < deadline:
        torch.accelerator.reset_peak_memory_stats()
        time.sleep(0.01)
    assert torch.accelerator.max_memory_allocated() <= peak - 16 * MIB
    stats = torch.accelerator.memory_stats()
    assert stats["reserved_bytes.all.current"] == torch.accelerator.memory_reserved() == 0
    assert all(0 <= value < 1 << 40 for value in stats.values()), stats


def streams() -> None:
    stream = torch.tpu.Stream()
    with torch.tpu.stream(stream):
        assert torch.accelerator.current_stream() == stream
        x = torch.ones(8, device="tpu") * 3
    torch.accelerator.current_stream().wait_stream(stream)
    stream.synchronize()
    assert x.sum().item() == 24


def events() -> None:
    before, after = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    before.record()
    x = torch.ones(300, 300, device="tpu")
    for _ in range(10):
        x = x @ x / 300
    after.record()
    after.synchronize()
    assert after.query()
    assert before.elapsed_time(after) >= 0
    assert x[0, 0].item() == 1


def random_numbers() -> None:
    torch.manual_seed(7)
    first = torch.rand(5, device="tpu").tolist()
    assert len({*first}) == 5
    assert torch.rand(5, device="tpu").tolist() != first
    state = torch.tpu.default_generators[0].get_state()
    second = torch.randn(5, device="tpu").tolist()
    torch.tpu.default_generators[0].set_state(state)
    assert torch.randn(5, device="tpu").tolist() == second
    torch.manual_seed(7)
    assert torch.rand(5, device="tpu").tolist() == first
    generator = torch.Generator(device="tpu").manual_seed(3)
    drawn = torch.rand(5, device="tpu", generator=generator).tolist()
    generator.manual_seed(3)
    assert torch.rand(5, device="tpu", generator=generator).tolist() == drawn


def distributions() -> None:
    torch.manual_seed(1)
    count = 10000
    normal = torch.randn(count, device="tpu")
    assert abs(normal.mean().item()) < 0.1
    assert 0.9 < normal.std().item() < 1.1
    assert 0.4 < torch.bernoulli(torch.full((count,), 0.5, device="tpu")).mean().item() < 0.6
    order = torch.randperm(100, device="tpu").tolist()
    assert sorted(order) == list(range(100)) != order
    drawn = torch.randint(3, 7, (count,), device="tpu")
    assert (drawn.min().item(), drawn.max().item()) == (3, 6)
    dropped = torch.nn.functional.dropout(torch.ones(count, device="tpu"), 0.25)
    assert 0.7 < (dropped > 0).float().mean().item() < 0.8
    assert torch.multinomial(torch.tensor([0.0, 1.0, 0.0], device="tpu"), 1).item() == 1


def bfloat16() -> None:
    x = torch.arange(64, dtype=torch.bfloat16, device="tpu").reshape(8, 8) / 8
    expected = (x.cpu() @ x.cpu().T).float()
    assert torch.allclose((x @ x.T).float().cpu(), expected, rtol=1e-2)
    assert (x + x).dtype == torch.bfloat16
    assert torch.equal(x.cpu().to("tpu").cpu(), x.cpu())


def autocast() -> None:
    layer = torch.nn.Linear(16, 4).to("tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = layer(torch.ones(2, 16, device="tpu"))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def dtypes() -> None:
    names = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64"
    for name in names.split():
        dtype = getattr(torch, name)
        x = torch.tensor([0, 1, 1], dtype=dtype)
        assert torch.equal(x.to("tpu").cpu(), x), name
        assert x.to("tpu").to(torch.float32 if name != "complex64" else dtype).sum().item() == 2, name


def float8() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        x = torch.tensor([0.5, 1.5, -2.0, 448.0])
        y = x.to("tpu").to(dtype)
        assert y.dtype == dtype
        assert torch.equal(y.float().cpu(), x.to(dtype).float()), name
        assert torch.equal(x.to(dtype).to("tpu").float().cpu(), x.to(dtype).float()), name


def scaled_product() -> None:
    x = torch.randn(16, 16)
    y = torch.randn(16, 16)
    one, two = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t()
    scale = torch.tensor(2.0)
    arguments = [tensor.to("tpu") for tensor in (one, two, scale, scale)]
    got = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)
    expected = one.float() @ two.float() * 4
    assert torch.allclose(got.float().cpu(), expected, rtol=2e-2, atol=0.1)


def updates_in_place() -> None:
    x = torch.zeros(1000, device="tpu")
    view = x[10:20]
    for _ in range(5):
        x += 1
    view.mul_(2)
    assert x.sum().item() == 5 * 1000 + 5 * 10
    y = torch.empty(3, device="tpu")
    torch.add(torch.ones(3, device="tpu"), 1, out=y)
    assert y.tolist() == [2, 2, 2]


def compiled_updates_in_place() -> None:
    @torch.compile
    def step(state: torch.Tensor, x: torch.Tensor) -> None:
        state.mul_(0.5).add_(x)

    state, x = torch.zeros(MIB, device="tpu"), torch.ones(MIB, device="tpu")
    for _ in range(4):
        step(state, x)
    assert state[5].item() == 1.875
    assert x[5].item() == 1


def optimizer_steps() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    same = copy.deepcopy(model).to("tpu")
    expected, losses = adamw_losses(model, "cpu"), adamw_losses(same, "tpu")
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4), losses


def adamw_losses(model: torch.nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(16.0).reshape(2, 8).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copies() -> None:
    x = torch.arange(10.0)
    assert torch.equal(x.to("tpu", non_blocking=True).cpu(), x)
    assert torch.equal(x.to("tpu").t().cpu(), x.t())
    z = torch.zeros(4, 5, device="tpu")
    z[1:3, ::2] = torch.ones(2, 3)
    assert z.sum().item() == 6
    assert torch.zeros(0, 3, device="tpu").cpu().shape == (0, 3)
    assert torch.tensor(3.5, device="tpu").item() == 3.5


def pinned_memory() -> None:
    x = torch.arange(10.0).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(1).is_pinned()
    assert torch.equal(x.to("tpu", non_blocking=True).cpu(), torch.arange(10.0))
    copied = (x.to("tpu") + 1).to("cpu", non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(copied, torch.arange(1.0, 11.0))
    assert torch.zeros(0).pin_memory().shape == (0,)


def pinned_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(512.0).reshape(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=1)
    totals = [rows.to("tpu", non_blocking=True).sum().item() for (rows,) in loader]
    assert totals == [float(sum(range(32 * row, 32 * row + 32))) for row in range(16)]


def data_dependent_shapes() -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0], device="tpu")
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 0].tolist() == [1, 2]
    assert torch.unique(torch.tensor([3, 1, 3], device="tpu")).tolist() == [1, 3]


def errors() -> None:
    x = torch.ones(2, 3, device="tpu")
    for wrong, error in ((lambda: x @ x, RuntimeError), (lambda: x[5], IndexError)):
        with contextlib.suppress(error):
            wrong().cpu()
            raise AssertionError(f"{error.__name__} was not raised")
    assert x.sum().item() == 6


def saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.arange(4, device="tpu")}, file)
    file.seek(0)
    assert torch.load(file, map_location="tpu")["x"].tolist() == [0, 1, 2, 3]


def profiler() -> None:
    with torch.profiler.profile() as profile:
        (torch.ones(10, device="tpu") + 1).cpu()
    assert profile.key_averages()


def device_properties() -> None:
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "tpu"


def threads() -> None:
    sums = []

    def work() -> None:
        x = torch.ones(100, device="tpu")
        for _ in range(20):
            x = x + 1
        sums.append(x.sum().item())

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(TIMEOUT_S)
    assert sums == [2100.0] * 4


def cumulative() -> None:
    x = torch.rand(2, 30, 4, generator=torch.Generator().manual_seed(0))
    there = x.to("tpu")
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        for dim in (0, 1, -1):
            torch.testing.assert_close(getattr(there, name)(dim).cpu(), getattr(x, name)(dim))
    for name in ("cummax", "cummin"):
        found, expected = getattr(there, name)(1), getattr(x, name)(1)
        assert torch.equal(found.values.cpu(), expected.values)
        assert torch.equal(found.indices.cpu(), expected.indices)
    there.requires_grad_()
    there.cumsum(1).square().sum().backward()
    x.requires_grad_().cumsum(1).square().sum().backward()
    torch.testing.assert_close(there.grad.cpu(), x.grad)
    counts = torch.arange(100, device="tpu").remainder(7)
    assert counts.cumsum(0).tolist() == torch.arange(100).remainder(7).cumsum(0).tolist()


CHECKS = [
    memory_in_use,
    memory_peak,
    streams,
    events,
    random_numbers,
    distributions,
    bfloat16,
    autocast,
    dtypes,
    float8,
    scaled_product,
    updates_in_place,
    compiled_updates_in_place,
    optimizer_steps,
    pinned_memory,
    pinned_batches,
    copies,
    data_dependent_shapes,
    errors,
    saved_and_loaded,
    profiler,
    device_properties,
    threads,
    cumulative,
]


def main() -> None:
    outcomes = {}
    for check in CHECKS:
        try:
            check()
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
