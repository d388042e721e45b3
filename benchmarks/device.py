"""What the bridge does on a GPU, in a few minutes of a lent machine: tests, trainings and speeds.

    python benchmarks/device.py pack --to .whl            # where packages can be downloaded
    python benchmarks/device.py run --out DIRECTORY       # there, when the wheels are installed
    python benchmarks/device.py run --out DIRECTORY --plugin cpu=LIBRARY    # a trial on XLA's CPU plugin

``run`` calls the stages in the order of their value, each in a process of its own with a time limit. It
appends a line of JSON to ``results.jsonl`` for each result as soon as it is known, and the output of all
stages to ``log.txt``. A stage that fails has its error in the results, and the next one starts. docs/gpu.md
says how to call it on a machine that is lent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "core",
    "bridge",
    "runtime-torchtpu",
    "runtime-xrt",
    "training",
    "precision",
    "sampler",
    "examples",
    "testing",
    "tools",
)
"""The packages of this repository that the stages need."""
WHEELS = (
    "torch_tpu==0.2.0",
    "portpicker==1.6.0",
    "frozendict==2.5.1",
    "immutabledict==4.3.1",
    "pyzmq==27.3.0",
    "grpcio-health-checking==1.71.2",
)
"""Other packages that the machine lacks, without their dependencies: torch and jax are there."""
PYTHON, TORCH = "3.12", "2_11_0"
"""The machine's Python, and its torch in the names of TorchTPU's files."""
PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux_2_26_x86_64",
)
FULL_PRECISION = {"NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
"""Products of float32 in float32. NVIDIA's libraries take TF32 by default, and so do XLA's Triton kernels,
whose products the libraries then compute instead."""
EMULATED = {"POLYXLA_EMULATE": "v5e-1", "POLYXLA_RUNTIME": "torchtpu"}
PLAIN = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Otherwise torch would load TorchTPU."""
TIMEOUT_S = 120.0
_results = os.environ.get("DEVICE_RESULTS", "")
_stage = os.environ.get("DEVICE_STAGE", "")
SCRATCH = os.environ.get("DEVICE_SCRATCH", "")
"""A directory that the stages of one run share."""
PLATFORM = os.environ.get("DEVICE_PLATFORM", "cuda")
"""``cuda``, or ``cpu`` where XLA's CPU plugin takes the GPU's place: sizes are small then."""
IS_CPU = PLATFORM == "cpu"


def emit(what: str, **values: Any) -> None:
    """Append a result to the file of results, and print it."""
    line = json.dumps({"stage": _stage, "what": what, **values})
    print(line, flush=True)
    _append(_results, line)


def _append(path: str, line: str) -> None:
    with Path(path).open("a") as lines:
        lines.write(line + "\n")


def rounded(number: float, digits: int = 4) -> float:
    """Return a number with so many significant digits."""
    return float(f"{number:.{digits}g}")


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Write an error of a part into the results, and continue."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        emit(what, error=f"{type(error).__name__}: {error}"[:1500])


# Stage 0: the machine, the plugin, its options and its words.


def facts() -> None:
    import importlib.metadata
    import platform

    from polyxla_bridge import pjrt_plugin
    from polyxla_bridge.env import current
    from polyxla_bridge.plugin_client import plugin
    from polyxla_bridge.plugin_client.client import PluginClient

    names = (
        "torch",
        "torch_tpu",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
        "numpy",
        "polyxla-bridge",
        "grpcio",
        "protobuf",
    )
    versions = {}
    for name in names:
        with reported(name):
            versions[name] = importlib.metadata.version(name)
    emit("versions", python=platform.python_version(), glibc=platform.libc_ver()[1], **versions)
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit,pcie.link.gen.max,pcie.link.width.max"
    with reported("nvidia-smi"):
        asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        emit("nvidia-smi", gpus=subprocess.check_output(asked, text=True, timeout=20).splitlines())
    settings = current()
    loaded = plugin.load(pjrt_plugin.library_path(settings.plugin))
    started = time.perf_counter()
    client = PluginClient(loaded, settings.plugin_options)
    took = time.perf_counter() - started
    device = client.devices[0]
    emit(
        "plugin",
        path=str(loaded.path.name),
        api=f"0.{loaded.minor}",
        platform=client.platform,
        version=client.platform_version[:200],
        devices=len(client.devices),
        kind=device.kind,
        attributes={name: str(value)[:100] for name, value in device.attributes.items()},
        memory=client.memory_stats(device),
        open_s=rounded(took),
        serializes=loaded.has("Executable_Serialize"),
    )
    client.close()
    options: dict[str, Mapping[str, Any]] = {
        "a fraction": {"memory_fraction": 0.1},
        "no preallocation": {"preallocate": False},
        "cuda_async": {"allocator": "cuda_async"},
        "platform": {"allocator": "platform"},
        "first device": {"visible_devices": [0]},
        "a device that is not there": {"visible_devices": [7]},
        "an option that is not there": {"nonsense": 1},
        "an allocator that is not there": {"allocator": "mine"},
    }
    # In processes of their own: a process finds its devices once, whatever later clients ask for.
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawning, max_tasks_per_child=1, max_workers=1) as fresh:
        for name, given in options.items():
            with reported(f"options: {name}"):
                emit(f"options: {name}", given=given, **fresh.submit(_opened, given).result(TIMEOUT_S))
    with reported("doctor"):
        command = [sys.executable, "-m", "polyxla", "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        findings = json.loads(done.stdout)["findings"]
        emit(
            "doctor",
            findings=[
                f"{finding['status']} {finding['subject']}: {finding['found']}" for finding in findings
            ],
        )


def _opened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Open the plugin with options; return what it has then."""
    from polyxla_bridge import pjrt_plugin
    from polyxla_bridge.env import current
    from polyxla_bridge.plugin_client import plugin
    from polyxla_bridge.plugin_client.client import PluginClient

    settings = current()
    loaded = plugin.load(pjrt_plugin.library_path(settings.plugin))
    with closing(PluginClient(loaded, {**settings.plugin_options, **given})) as client:
        memory = client.memory_stats(client.devices[0]) or {}
        return {"devices": [device.id for device in client.devices], "bytes_limit": memory.get("bytes_limit")}


# Stage 1: the contract of an engine, as tests.


def conformance() -> None:
    import xml.etree.ElementTree as ET

    report = f"{SCRATCH}/conformance.xml"
    tests = str(ROOT / "packages/bridge/tests/test_gpu.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=8",
        f"--junitxml={report}",
        tests,
    ]
    subprocess.run(command, cwd=ROOT, check=False)
    failed, passed, skipped = {}, 0, 0
    for case in ET.parse(report).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error")]
        skips = [part for part in case if part.tag == "skipped"]
        if bad:
            failed[case.get("name")] = (bad[0].text or bad[0].get("message") or "")[-1500:]
        passed, skipped = passed + (not bad and not skips), skipped + bool(skips)
    emit("conformance", passed=passed, failed=len(failed), skipped=skipped, seconds=_seconds(report))
    for name, text in failed.items():
        emit("conformance: failed", test=name, text=text)


def _seconds(report: str) -> float:
    found = re.search(r'<testsuite [^>]* time="([\d.]+)"', Path(report).read_text())
    return float(found[1]) if found else 0.0


# Stage 2: TorchTPU, whose chip is emulated by the GPU, against torch on the CPU.


def digits_losses(device: str) -> list[float]:
    """Train the example's network on the digits; return the loss of each step."""
    import torch
    from torch.nn import functional as F

    from polyxla_examples.digits import DigitsNet, datasets

    torch.manual_seed(0)
    network = DigitsNet(0.01).to(device)
    images, labels = datasets()[0].tensors
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.002, weight_decay=0.01)
    losses = []
    for step in range(DIGITS_STEPS):
        part = slice(32 * step, 32 * step + 32)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images[part].to(device)), labels[part].to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


DIGITS_STEPS, DECODER_STEPS = 40, 40


def decoder_losses(
    device: str, is_compiled: bool = False, steps: int = DECODER_STEPS
) -> tuple[list[float], float]:
    """Train a small decoder on random tokens; return the losses, and the seconds of a later step."""
    import torch

    torch.manual_seed(0)
    model = _decoder(layers=2, width=128, heads=4, vocabulary=97, context=64).to(device)
    run = torch.compile(model) if is_compiled else model
    words = torch.randint(97, (16, 65), generator=torch.Generator().manual_seed(1))
    inputs, targets = (part.contiguous().to(device) for part in (words[:, :-1], words[:, 1:]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, times = [], []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - started)
    return losses, statistics.median(times[steps // 2 :])


def _decoder(layers: int, width: int, heads: int, vocabulary: int, context: int) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = (
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(4 * width, width, bias=False),
            )

        def forward(self, x: Any, mask: Any) -> Any:
            batch, length, _ = x.shape
            parts = (
                self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            )
            q, k, v = parts.unbind()
            scores = (q @ k.transpose(-1, -2)) / (width // heads) ** 0.5 + mask
            mixed = (
                (torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v)
                .transpose(1, 2)
                .reshape(batch, length, width)
            )
            x = x + self.out(mixed)
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            mask = torch.full((context, context), -1e9).triu(1)
            self.mask = nn.Buffer(mask)

        def forward(self, tokens: Any, targets: Any) -> Any:
            length = tokens.shape[1]
            x = self.words(tokens) + self.places.weight[:length]
            for block in self.blocks:
                x = block(x, self.mask[:length, :length].to(x.dtype))
            return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())

    return Decoder()


def on_cpu() -> None:
    """Write the losses of torch on the CPU."""
    losses = {"digits": digits_losses("cpu"), "decoder": decoder_losses("cpu")[0]}
    Path(SCRATCH, "losses.json").write_text(json.dumps(losses))
    emit("losses on the CPU", first={name: curve[0] for name, curve in losses.items()})


def torchtpu() -> None:
    """Compare the losses on the emulated chip with those of the CPU."""
    import torch

    expected = json.loads(Path(SCRATCH, "losses.json").read_text())
    with reported("digits"):
        started = time.perf_counter()
        torch.zeros(1).to("tpu").cpu()
        emit(
            "opened",
            device=str(torch.zeros(1).to("tpu").device),
            seconds=rounded(time.perf_counter() - started),
        )
    with reported("digits"):
        started = time.perf_counter()
        _compare("digits", digits_losses("tpu"), expected["digits"], started)
    for name, is_compiled in (("decoder", False), ("decoder, torch.compile", True)):
        with reported(name):
            started = time.perf_counter()
            losses, step_s = decoder_losses("tpu", is_compiled)
            _compare(name, losses, expected["decoder"], started, step_ms=rounded(1e3 * step_s))


def _compare(what: str, losses: list[float], expected: list[float], started: float, **more: Any) -> None:
    differences = [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]
    emit(
        what,
        steps=len(losses),
        first=losses[0],
        last=losses[-1],
        cpu_last=expected[-1],
        largest_difference=rounded(max(differences)),
        within_1e4=max(differences) <= 1e-4,
        seconds=rounded(time.perf_counter() - started),
        **more,
    )


def digits_example() -> None:
    """Run the example as a user does, without the variable that keeps JAX off the GPU."""
    example = ["polyxla", "run", "-m", "polyxla_examples.digits", "--epochs", "3", "--json"]
    started = time.perf_counter()
    command = [sys.executable, "-m", *example]
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=90, check=True)
    took = rounded(time.perf_counter() - started)
    emit("polyxla run digits", whole_s=took, **json.loads(done.stdout.splitlines()[-1]))


def torchtpu_step() -> None:
    """Train the transformer of `torch_step` on the emulated chip, compiled."""
    _torch_step("tpu", ("TorchTPU compiled",))


def default_precision() -> None:
    """Compare them once more, with the precision that XLA and NVIDIA's libraries take by default."""
    expected = json.loads(Path(SCRATCH, "losses.json").read_text())
    started = time.perf_counter()
    _compare("decoder, default precision", decoder_losses("tpu")[0], expected["decoder"], started)


# Stage 3 and 7: a worker on the GPU, and a program that computes there.


class Worker:
    """A worker with one core, in processes of its own."""

    def __init__(self) -> None:
        plugin = os.environ["POLYXLA_PJRT_PLUGIN"]
        platform = plugin if plugin == "cuda" else f"plugin={plugin}"
        options = json.loads(os.environ.get("POLYXLA_PJRT_OPTIONS", "{}"))
        given = [f"--plugin-option={name}={value}" for name, value in options.items()]
        command = [
            sys.executable,
            "-m",
            "polyxla",
            "worker",
            "--platform",
            platform,
            *given,
            "--devices",
            "1",
            "--json",
        ]
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--address", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        document = "".join(iter(self.process.stdout.readline, "}\n"))
        self.served = json.loads(document + "}")
        self.open_s = time.perf_counter() - started

    @property
    def serving_pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    @contextmanager
    def engine(self) -> Iterator[Any]:
        from polyxla_xrt.client.engine import RemoteEngine
        from polyxla_xrt.client.lease import Lease
        from polyxla_xrt.config.assignment import Assignment

        address, environ = self.served["address"], dict(os.environ)
        with (
            closing(Lease(address, 1, environ, wait_s=TIMEOUT_S)) as lease,
            closing(RemoteEngine(Assignment(address, lease.job, (0,), "TPU", 0, 1, 0, 1), environ)) as engine,
        ):
            yield engine

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()


PRODUCT = """HloModule product
ENTRY main { x = f32[SIZE,SIZE] parameter(0) y = f32[SIZE,SIZE] parameter(1)
  ROOT d = f32[SIZE,SIZE] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    operand_precision={highest,highest} }"""


def check_product(engine: Any, size: int = 256) -> float:
    """Return the largest error of a product, relative to its largest element."""
    import numpy as np

    from polyxla_testing.engine_conformance import compiled, download, upload

    numbers = np.random.default_rng(time.time_ns())
    x, y = (numbers.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    program = compiled(engine, PRODUCT.replace("SIZE", str(size)))
    (result,) = engine.execute(program, engine.devices[0], [upload(engine, x), upload(engine, y)])
    right = x.astype(np.float64) @ y.astype(np.float64)
    return float(np.abs(download(engine, result) - right).max() / np.abs(right).max())


def worker() -> None:
    import numpy as np

    from polyxla_testing.engine_conformance import DOUBLING, compiled, download, upload

    with closing(Worker()) as served, served.engine() as engine:
        emit("worker", platform=served.served["platform"], open_s=rounded(served.open_s))
        emit("product", relative_error=rounded(check_product(engine)))
        doubling, value = compiled(engine, DOUBLING), upload(engine, np.float32(1))
        started = time.perf_counter()
        for _ in range(100):
            (value,) = engine.execute(doubling, engine.devices[0], [value])
        assert download(engine, value) == 2.0**100
        emit("100 programs in a row", right=True, ms_each=rounded(10 * (time.perf_counter() - started)))
        # An upload is only queued, so both ways are measured together.
        sent = np.random.default_rng(0).integers(0, 255, 1 << 26, dtype=np.uint8)
        started = time.perf_counter()
        assert np.array_equal(download(engine, upload(engine, sent)), sent)
        rate = 2 * sent.nbytes / (time.perf_counter() - started) / 1e9
        emit("64 MiB to the worker and back", gb_s=rounded(rate))
        _stablehlo_on(engine)


def _stablehlo_on(engine: Any) -> None:
    """Run a StableHLO program of JAX's on a remote engine, against NumPy."""
    import jax
    import numpy as np

    from polyxla_bridge.programs.compile_request import to_hlo
    from polyxla_testing.engine_conformance import OPTIONS, download, upload

    def program(x: Any) -> Any:
        return jax.nn.softmax(x, axis=-1).sum(axis=0)

    x = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    text = jax.jit(program).lower(x).as_text()
    (result,) = engine.execute(
        engine.compile(to_hlo(text.encode()), OPTIONS), engine.devices[0], [upload(engine, x)]
    )
    shifted = np.exp(x - x.max(-1, keepdims=True))
    right = (shifted / shifted.sum(-1, keepdims=True)).sum(0)
    emit(
        "StableHLO through the worker",
        largest_error=rounded(float(np.abs(download(engine, result) - right).max())),
    )


def restart() -> None:
    """Kill the process that has the GPU while it computes, and use the GPU again."""
    import numpy as np

    from polyxla_testing.engine_conformance import SLOW, compiled, upload

    with closing(Worker()) as served:
        with reported("the job that was killed"), served.engine() as engine:
            slow, value = compiled(engine, SLOW), upload(engine, np.ones(4096, np.float32))
            for _ in range(20):
                (value,) = engine.execute(slow, engine.devices[0], [value])
            time.sleep(0.5)
            os.kill(served.serving_pid, signal.SIGKILL)
            started = time.perf_counter()
            engine.to_host(value).result(TIMEOUT_S)
        deadline = time.monotonic() + 60
        while True:
            try:
                with served.engine() as engine:
                    error = check_product(engine)
                break
            except Exception as refused:
                if time.monotonic() > deadline:
                    raise
                print(refused, flush=True)
                time.sleep(0.2)
        emit(
            "a job after kill -9",
            relative_error=rounded(error),
            seconds=rounded(time.perf_counter() - started),
        )
    with local_engine() as engine:
        emit("an engine after the worker", relative_error=rounded(check_product(engine)))


# Stage 4: a transformer's step as StableHLO, by JAX and by `PjrtEngine`; and the same step in torch.


SIZES = (
    {"layers": 2, "width": 64, "heads": 4, "vocabulary": 97, "context": 32, "batch": 4}
    if IS_CPU
    else {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32768, "context": 1024, "batch": 8}
)
STEPS = 10 if IS_CPU else 30
RATE = 0.01


def parameters() -> dict[str, Any]:
    """Return the decoder's parameters: float32, from a seed."""
    import numpy as np

    numbers, width = np.random.default_rng(0), SIZES["width"]

    def normal(*shape: int) -> Any:
        return (0.02 * numbers.standard_normal(shape)).astype(np.float32)

    layers = SIZES["layers"]
    return {
        "words": normal(SIZES["vocabulary"], width),
        "places": normal(SIZES["context"], width),
        "qkv": normal(layers, width, 3 * width),
        "out": normal(layers, width, width),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
        "scales": np.ones((layers, 2, width), np.float32),
        "head": normal(width, SIZES["vocabulary"]),
    }


def tokens() -> Any:
    """Return the batch: random tokens, with one more in each row than the decoder reads."""
    import numpy as np

    size = (SIZES["batch"], SIZES["context"] + 1)
    return np.random.default_rng(1).integers(0, SIZES["vocabulary"], size, dtype=np.int32)


def _jax_step() -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    width, heads, context = SIZES["width"], SIZES["heads"], SIZES["context"]

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def loss(held: dict[str, Any], batch: Any) -> Any:
        low = {name: weight.astype(jnp.bfloat16) for name, weight in held.items()}
        x = low["words"][batch[:, :-1]] + low["places"]
        mask = jnp.where(jnp.tril(jnp.ones((context, context), bool)), 0.0, -1e9)
        for layer in range(SIZES["layers"]):
            parts = (norm(x, held["scales"][layer, 0]) @ low["qkv"][layer]).reshape(
                *x.shape[:2], 3, heads, width // heads
            )
            q, k, v = (parts[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
            scores = (q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32) / (width // heads) ** 0.5 + mask
            mixed = (jax.nn.softmax(scores).astype(jnp.bfloat16) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + mixed @ low["out"][layer]
            x = x + jax.nn.gelu(norm(x, held["scales"][layer, 1]) @ low["up"][layer]) @ low["down"][layer]
        logits = (x @ low["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    def step(held: dict[str, Any], batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(held, batch)
        return {name: weight - RATE * gradients[name] for name, weight in held.items()}, value

    return step


def jax_step() -> None:
    """Train by JAX's own client, and leave the program for the engine."""
    os.environ["JAX_PLATFORMS"] = PLATFORM
    import jax
    import numpy as np

    device = jax.devices()[0]
    held, batch = jax.device_put(parameters(), device), jax.device_put(tokens(), device)
    lowered = jax.jit(_jax_step(), donate_argnums=0).lower(held, batch)
    Path(SCRATCH, "step.mlir").write_text(lowered.as_text())
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    losses, times = [], []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(STEPS):
            held, loss = compiled(held, batch)
        losses.append(float(np.asarray(loss)))
        times.append((time.perf_counter() - started) / STEPS)
    _say_step("JAX", times, losses, compile_s=rounded(compile_s), device=str(device))


def _say_step(who: str, times: list[float], losses: list[float], **more: Any) -> None:
    best = min(times)
    words = SIZES["batch"] * SIZES["context"]
    emit(
        who,
        step_ms=rounded(1e3 * best),
        rounds_ms=[rounded(1e3 * seconds) for seconds in times],
        tokens_per_s=rounded(words / best),
        losses=losses,
        **more,
    )
    _append(f"{SCRATCH}/steps.jsonl", json.dumps([who, best]))


def local_engine() -> Any:
    """Return a context in which an engine is open in this process, on the plugin of the environment."""
    from polyxla_bridge import env, pjrt_plugin

    return closing(pjrt_plugin.make_engine(env.current(), None))


def engine_step() -> None:
    """Train by the same program on `PjrtEngine`."""
    import jax

    from polyxla_bridge.programs.compile_request import to_hlo
    from polyxla_testing.engine_conformance import OPTIONS, download, upload

    program = to_hlo(Path(SCRATCH, "step.mlir").read_bytes())
    with local_engine() as engine:
        device = engine.devices[0]
        started = time.perf_counter()
        executable = engine.compile(program, OPTIONS)
        compile_s = time.perf_counter() - started
        # JAX flattens a dictionary in the order of its keys.
        state = [upload(engine, leaf) for leaf in jax.tree.leaves(parameters())]
        batch = upload(engine, tokens())
        losses, times = [], []
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(STEPS):
                *state, loss = engine.execute(executable, device, [*state, batch])
            losses.append(float(download(engine, loss)))
            times.append((time.perf_counter() - started) / STEPS)
        stats = engine.memory_stats(device)
        _say_step(
            "PjrtEngine",
            times,
            losses,
            compile_s=rounded(compile_s),
            donated=len(executable.native["donated"]),
            memory=dict(stats),
        )
        found = dict(map(json.loads, Path(SCRATCH, "steps.jsonl").read_text().splitlines()))
        if "JAX" in found:
            emit("ratio to JAX", ratio=rounded(found["JAX"] / min(times)))


def torch_step() -> None:
    """Train the same decoder in torch, eager and compiled, with bfloat16 products and float32 parameters."""
    _torch_step("cpu" if IS_CPU else "cuda", ("torch eager", "torch compiled"))


def _torch_step(name: str, whose: Sequence[str]) -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    words = torch.from_numpy(tokens()).long()
    inputs, targets = (part.contiguous().to(name) for part in (words[:, :-1], words[:, 1:]))
    shape = {key: SIZES[key] for key in ("layers", "width", "heads", "vocabulary", "context")}
    for who in whose:
        with reported(who):
            torch.manual_seed(0)
            model = _decoder(**shape).to(name)
            run = torch.compile(model) if who.endswith("compiled") else model
            _time_torch(who, run, torch.optim.SGD(model.parameters(), lr=RATE), inputs, targets)


def _time_torch(who: str, run: Any, optimizer: Any, inputs: Any, targets: Any) -> None:
    import torch

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    started = time.perf_counter()
    step().item()
    first_s = time.perf_counter() - started
    for _ in range(3):
        step().item()
    losses, times = [], []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        losses.append(loss.item())
        times.append((time.perf_counter() - started) / STEPS)
    _say_step(who, times, losses, first_s=rounded(first_s))


# Stage 5: transfers.


def transfer_rates(engine: Any, size: int, rounds: int = 5) -> tuple[float, float]:
    """Return the best rates of copies to the device and back, in GB/s; check that the bytes are the same."""
    import numpy as np

    from polyxla_testing.engine_conformance import upload

    sent = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    up, down = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        buffer = upload(engine, sent)
        _wait(engine, buffer)
        up.append(time.perf_counter() - started)
        into = memoryview(bytearray(size))
        started = time.perf_counter()
        engine.to_host(buffer, into).result(TIMEOUT_S)
        down.append(time.perf_counter() - started)
        assert bytes(into[-4096:]) == sent[-4096:].tobytes()
        engine.delete(buffer)
    return rounded(size / min(up) / 1e9), rounded(size / min(down) / 1e9)


def _wait(engine: Any, buffer: Any) -> None:
    """Wait until a buffer is on its device."""
    value = buffer.value.result(TIMEOUT_S)
    if hasattr(value, "ready"):
        value.ready().wait()


def transfers() -> None:
    with local_engine() as engine:
        for size in (1 << 20, 1 << 24, 1 << 28):
            up, down = transfer_rates(engine, size)
            emit("PjrtEngine", mib=size >> 20, to_device_gb_s=up, to_host_gb_s=down)


def jax_transfers() -> None:
    """Measure JAX's own copies of ordinary memory."""
    os.environ["JAX_PLATFORMS"] = PLATFORM
    import jax
    import numpy as np

    for size in (1 << 20, 1 << 24, 1 << 28):
        sent = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
        up, down = [], []
        for _ in range(5):
            started = time.perf_counter()
            array = jax.device_put(sent).block_until_ready()
            up.append(time.perf_counter() - started)
            started = time.perf_counter()
            np.asarray(array)
            down.append(time.perf_counter() - started)
        rates = {
            "to_device_gb_s": rounded(size / min(up) / 1e9),
            "to_host_gb_s": rounded(size / min(down) / 1e9),
        }
        emit("JAX", mib=size >> 20, **rates)


def torch_transfers() -> None:
    """Measure cudaMemcpy, by torch: from pinned and from ordinary memory."""
    import torch

    name = "cpu" if IS_CPU else "cuda"
    for size in (1 << 20, 1 << 24, 1 << 28):
        for is_pinned in (False,) if IS_CPU else (False, True):
            host = torch.randint(0, 255, (size,), dtype=torch.uint8)
            host = host.pin_memory() if is_pinned else host
            there, back = (
                torch.empty(size, dtype=torch.uint8, device=name),
                torch.empty_like(host, pin_memory=is_pinned),
            )
            up: list[float] = []
            down: list[float] = []
            for _ in range(5):
                for times, to, source in ((up, there, host), (down, back, there)):
                    started = time.perf_counter()
                    to.copy_(source)
                    if not IS_CPU:
                        torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
            rates = {
                "to_device_gb_s": rounded(size / min(up) / 1e9),
                "to_host_gb_s": rounded(size / min(down) / 1e9),
            }
            emit(
                "cudaMemcpy, pinned" if is_pinned else "cudaMemcpy, ordinary memory", mib=size >> 20, **rates
            )


# Stage 6: memory.


HUGE = """HloModule huge
ENTRY main { x = f32[] parameter(0) ROOT b = f32[1048576,65536] broadcast(x), dimensions={} }"""
"""Its result has 256 GiB."""
TEMPORARY = """HloModule temporary
less { p = f32[] parameter(0) q = f32[] parameter(1) ROOT l = pred[] compare(p, q), direction=LT }
ENTRY main { x = f32[300000] parameter(0) a = f32[300000,300000] broadcast(x), dimensions={0}
  s = f32[300000,300000] sort(a), dimensions={0}, to_apply=less
  ROOT r = f32[1,1] slice(s), slice={[0:1],[0:1]} }"""
"""An array within it has 335 GiB."""


def memory() -> None:
    """Run 200 steps, and ask for more memory than there is."""
    import gc

    import numpy as np

    from polyxla_testing.engine_conformance import DONATING, DOUBLING, compiled, download, ones, upload

    with local_engine() as engine:
        device = engine.devices[0]
        donating, product = compiled(engine, DONATING), compiled(engine, PRODUCT.replace("SIZE", "1024"))
        counts: list[dict[str, int]] = []
        for end in range(50, 251, 50):
            single, value = upload(engine, ones(1)), upload(engine, ones(0))
            x = upload(engine, np.eye(1024, dtype=np.float32))
            for _ in range(50):
                value, number = engine.execute(donating, device, [value, single])
                (x,) = engine.execute(product, device, [x, x])
                batch = upload(engine, np.ones(1 << 20, np.uint8))
            assert download(engine, value)[0] == 50
            assert download(engine, x)[0, 0] == 1
            # The allocator counts its pieces, which may be larger than the arrays that they hold: only
            # without an array is the count the same each time.
            del single, value, x, number, batch
            engine.finish(TIMEOUT_S)
            gc.collect()
            # An array is freed when its copy has ended, too.
            ends = time.monotonic() + 3
            while engine.memory_stats(device)["bytes_in_use"] and time.monotonic() < ends:
                time.sleep(0.01)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            counts.append(
                {
                    "step": end,
                    "device": engine.memory_stats(device)["bytes_in_use"],
                    "resident_mib": resident >> 20,
                    "buffers": engine.live_buffers,
                }
            )
        emit(
            "200 steps",
            is_flat=all(count["device"] == count["buffers"] == 0 for count in counts),
            resident_growth_mib=counts[-1]["resident_mib"] - counts[0]["resident_mib"],
            counts=counts,
        )
        if IS_CPU:
            emit("out of memory", skipped="XLA's CPU client does not limit memory")
            return
        with reported("out of memory: a program's result"):
            (result,) = engine.execute(compiled(engine, HUGE), device, [upload(engine, np.float32(1))])
            _wait(engine, result)
        with reported("out of memory: temporary arrays"):
            row = upload(engine, np.ones(300000, np.float32))
            (result,) = engine.execute(compiled(engine, TEMPORARY), device, [row])
            download(engine, result)
        with reported("out of memory: arrays"):
            held: list[Any] = []
            while len(held) < 200:
                held.append(upload(engine, np.zeros(1 << 30, np.uint8)))
                _wait(engine, held[-1])
        held.clear()
        gc.collect()
        (twice,) = engine.execute(compiled(engine, DOUBLING), device, [upload(engine, np.float32(2))])
        emit("a program after that", right=bool(download(engine, twice) == 4))


STAGES: dict[str, tuple[Callable[[], None], float, Mapping[str, str]]] = {
    "facts": (facts, 60, {}),
    "conformance": (conformance, 150, {}),
    "cpu": (on_cpu, 60, {**PLAIN, "POLYXLA_PJRT_PLUGIN": ""}),
    "torchtpu": (torchtpu, 150, {**EMULATED, **FULL_PRECISION}),
    "worker": (worker, 60, {}),
    "jax": (jax_step, 90, {}),
    "engine": (engine_step, 90, {}),
    "torch": (torch_step, 120, PLAIN),
    "transfers": (transfers, 40, {}),
    "jax-transfers": (jax_transfers, 40, {}),
    "cuda-transfers": (torch_transfers, 40, PLAIN),
    "memory": (memory, 60, {}),
    "restart": (restart, 60, {}),
    "digits": (digits_example, 60, EMULATED),
    "torchtpu-step": (torchtpu_step, 120, EMULATED),
    "default-precision": (default_precision, 60, EMULATED),
}
"""The stages in order: what runs, for how many seconds at most, and with which variables."""


# Running them.


def run(out: Path, minutes: float, patience: float, plugin: str, only: Sequence[str]) -> None:
    """Run the stages until they are done or the time is over; `patience` multiplies their limits."""
    out.mkdir(parents=True, exist_ok=True)
    kind, _, path = plugin.partition("=")
    environ = {
        **os.environ,
        "POLYXLA_COMPILE_CACHE": "off",
        "PYTHONUNBUFFERED": "1",
        # A stage opens the GPU by JAX only where it says so.
        "JAX_PLATFORMS": "cpu",
        "POLYXLA_PJRT_PLUGIN": path or kind,
        "DEVICE_RESULTS": str((out / "results.jsonl").resolve()),
        "DEVICE_PLATFORM": kind,
    }
    if kind == "cpu":
        environ["POLYXLA_PJRT_OPTIONS"] = '{"cpu_device_count": 1}'
    ends = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as scratch, (out / "log.txt").open("ab") as log:
        for name, (_, limit_s, variables) in STAGES.items():
            if only and name not in only:
                continue
            left = min(patience * limit_s, ends - time.monotonic())
            own = {"DEVICE_STAGE": name, "DEVICE_SCRATCH": scratch}
            _call(name, left, {**environ, **variables, **own}, log)


def _call(name: str, left_s: float, environ: Mapping[str, str], log: Any) -> None:
    """Run a stage, and write how it ended."""
    if left_s < 5:
        _ended(name, environ, "not started: the time is over", 0)
        return
    log.write(f"\n===== {name}\n".encode())
    log.flush()
    start = log.tell()
    started = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "stage", name]
    with subprocess.Popen(
        command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            code: int | str = process.wait(left_s)
        except subprocess.TimeoutExpired:
            code = f"ended after {left_s:.0f} s"
        # Its child processes may still run, and hold the GPU.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _ended(name, environ, code, time.monotonic() - started)
    if code:
        with Path(log.name).open("rb") as text:
            text.seek(start)
            print(text.read()[-1500:].decode(errors="replace"), flush=True)


def _ended(name: str, environ: Mapping[str, str], code: int | str, seconds: float) -> None:
    line = json.dumps({"stage": name, "what": "end", "code": code, "seconds": round(seconds, 1)})
    print(line, flush=True)
    _append(environ["DEVICE_RESULTS"], line)


# Carrying what a machine without a network lacks.


def pack(to: Path) -> None:
    """Write the wheels to install there: of this repository, and of other packages."""
    to.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for wheel in to.glob("polyxla_*.whl"):
        wheel.unlink()
    for package in PACKAGES:
        subprocess.run(
            [*pip, "wheel", "-q", "--no-deps", "-w", str(to), str(ROOT / "packages" / package)], check=True
        )
    target = [
        f"--python-version={PYTHON}",
        "--implementation=cp",
        *(f"--platform={platform}" for platform in PLATFORMS),
    ]
    for needed in WHEELS:
        name = re.split("==", needed)[0].replace("-", "_")
        if not any(to.glob(f"{name}-*.whl")):
            subprocess.run(
                [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", *target, "-d", str(to), needed],
                check=True,
            )
            if name == "torch_tpu":
                _strip(next(to.glob("torch_tpu-*.whl")))
    print(f"{sum(wheel.stat().st_size for wheel in to.glob('*.whl')) / 2**20:.1f} MiB in {to}")


def _strip(wheel: Path) -> None:
    """Take the files for other releases of torch and the symbols from TorchTPU's wheel, and compress it."""
    import zipfile

    with tempfile.TemporaryDirectory() as made:
        smaller = Path(made, wheel.name)
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as new:
            for entry in old.infolist():
                release = re.search(r"_(2_\d\d_0)[/.]", entry.filename)
                if entry.is_dir() or (release and release[1] != TORCH) or "/include/" in entry.filename:
                    continue
                path = Path(old.extract(entry, made))
                if path.suffix == ".so":
                    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
                new.write(path, entry.filename)
                path.unlink()
        wheel.write_bytes(smaller.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the wheels that the machine lacks")
    packing.add_argument("--to", type=Path, required=True)
    running = commands.add_parser("run", help="run the stages")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--minutes", type=float, default=8)
    running.add_argument("--patience", type=float, default=1, help="multiplies the limits of the stages")
    running.add_argument("--plugin", default="cuda", help="cuda, or cpu=LIBRARY")
    running.add_argument("--only", nargs="+", choices=STAGES, default=(), metavar="STAGE")
    stage = commands.add_parser("stage", help="run one stage in this process")
    stage.add_argument("name", choices=STAGES)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.to)
    elif given.command == "run":
        run(given.out, given.minutes, given.patience, given.plugin, given.only)
    else:
        with reported("error"):
            STAGES[given.name][0]()
            return
        sys.exit(1)


if __name__ == "__main__":
    main()
