"""Convolutions of torch's library, as programs on the bridge call them, compared with XLA's own.

    nox -s bench -- convolutions [networks] [random] [--json]

Each is computed by both in turns, on all cores: forward, the gradient of the image, and that of the kernel. A
time is the best of several.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from harness import main, row
from jaxlib import _jax, xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine import custom_calls
from polyxla_bridge.engine.expansions import convolution, inlining, torch_library
from polyxla_bridge.programs import hlo, rewrite

ROUNDS = 8
SHAPES = 130
MOST_WORK = 6e8
"""Multiplications of the largest random convolution."""
MORE_WORK = 1e-3
"""Seconds below which the difference of two times is noise."""


@dataclass(frozen=True)
class Layer:
    """A convolution of square images."""

    batch: int
    inputs: int
    size: int
    outputs: int
    kernel: int
    padding: int = 0
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def places(self) -> int:
        """Length of the result, in each dimension."""
        return (self.size + 2 * self.padding - self.reach - 1) // self.stride + 1

    @property
    def reach(self) -> int:
        """Distance of the kernel's last place from its first."""
        return self.dilation * (self.kernel - 1)


NETWORKS = {
    "LeNet": Layer(128, 10, 12, 20, 5),
    "VGG": Layer(8, 128, 28, 128, 3, padding=1),
    "ResNet, first": Layer(8, 3, 112, 64, 7, padding=3, stride=2),
    "ResNet, 1x1": Layer(8, 256, 28, 64, 1),
    "ResNet, 3x3": Layer(8, 64, 56, 64, 3, padding=1),
    "ResNet, down": Layer(8, 128, 28, 128, 3, padding=1, stride=2),
    "ResNeXt": Layer(8, 128, 28, 128, 3, padding=1, groups=32),
    "MobileNet": Layer(8, 96, 28, 96, 3, padding=1, groups=96),
    "EfficientNet": Layer(8, 240, 14, 240, 5, padding=2, groups=240),
    "ConvNeXt": Layer(8, 96, 28, 96, 7, padding=3, groups=96),
    "U-Net, up": Layer(8, 64, 32, 128, 2, stride=2),
    "DCGAN, up": Layer(16, 64, 32, 128, 4, padding=1, stride=2),
    "dilated": Layer(8, 64, 28, 64, 3, padding=2, dilation=2),
}


def programs(layer: Layer) -> Iterator[tuple[str, bytes]]:
    """Yield the three programs of a layer, as TorchTPU writes them."""
    n, c, s, o, k, p, d, g = (
        *(layer.batch, layer.inputs, layer.size, layer.outputs, layer.kernel),
        *(layer.padding, layer.dilation, layer.groups),
    )
    r, reach, stride = layer.places, layer.reach, layer.stride
    before = reach - p
    after = s + reach - before - stride * (r - 1) - 1
    cut = reach + stride * (r - 1) + 1 - s - p
    images, results, kernels = f"[{n},{c},{s},{s}]", f"[{n},{o},{r},{r}]", f"[{o},{c // g},{k},{k}]"
    forms = {
        "forward": (
            *(images, kernels, results, f"size={k}x{k} stride={stride}x{stride} pad={p}_{p}x{p}_{p}"),
            *(f"rhs_dilate={d}x{d}", f"bf01_oi01->bf01, feature_group_count={g}"),
        ),
        "image": (
            *(results, f"[{o // g},{c},{k},{k}]", images),
            f"size={k}x{k} pad={before}_{after}x{before}_{after} lhs_dilate={stride}x{stride}",
            *(f"rhs_dilate={d}x{d} rhs_reversal=1x1", f"bf01_io01->bf01, feature_group_count={g}"),
        ),
        "kernel": (
            *(images, results, kernels, f"size={r}x{r} stride={d}x{d} pad={p}_{cut}x{p}_{cut}"),
            *(f"rhs_dilate={stride}x{stride}", f"fb01_io01->fb01, batch_group_count={g}"),
        ),
    }
    for name, (first, second, result, window, more, labels) in forms.items():
        text = f"""HloModule convolution
        ENTRY main {{ x = f32{first} parameter(0) w = f32{second} parameter(1)
          ROOT c = f32{result} convolution(x, w), window={{{window} {more}}}, dim_labels={labels} }}"""
        yield name, hlo_module_from_text(text).as_serialized_hlo_module_proto()


class Compiled:
    """A program of XLA, with arguments."""

    def __init__(self, data: bytes) -> None:
        for target in torch_library.TARGETS:
            custom_calls.register(target)
        (device,) = jax.devices("cpu")[:1]
        numbers = np.random.default_rng(0)
        self._program = device.client.compile_and_load(
            _jax.mlir.hlo_to_stablehlo(rewrite.for_jaxlib(data, 1)),
            _jax.DeviceList((device,)),
            xla_client.CompileOptions(),
        )
        self._arguments = [
            jax.device_put(numbers.normal(size=dims).astype(dtype)) for dtype, dims in hlo.parameters(data)
        ]
        self.times_s: list[float] = []

    def run(self) -> None:
        """Run it once, and note the time."""
        started = time.perf_counter()
        results: Any = self._program.execute_sharded(self._arguments)
        for parts in results.disassemble_into_single_device_arrays():
            parts[0].block_until_ready()
        self.times_s.append(time.perf_counter() - started)


def times_s(layer: Layer) -> Iterator[tuple[str, float, float | None]]:
    """Yield for each program the times by XLA and by torch; None if it is left to XLA."""
    for name, data in programs(layer):
        replaced = inlining.replace(data, convolution.choose)
        pair = [Compiled(data)] + ([Compiled(replaced)] if replaced is not data else [])
        for _ in range(ROUNDS):
            for each in pair:
                each.run()
        best = [min(each.times_s[1:]) for each in pair]
        yield name, best[0], best[1] if len(best) > 1 else None


def measure_networks() -> None:
    """Compare layers of known networks."""
    for network, layer in NETWORKS.items():
        for name, xla_s, torch_s in times_s(layer):
            if torch_s is not None:
                case = f"networks: {network}, {name}"
                row(case, f"{torch_s * 1e3:.2f} ms", f"{xla_s * 1e3:.2f} ms", torch_s / xla_s)


def measure_random() -> None:
    """Compare random convolutions that the rule gives to torch, and list those that XLA computes faster."""
    numbers = random.Random(0)
    ratios: dict[str, list[float]] = {}
    for layer in (random_layer(numbers) for _ in range(SHAPES)):
        for name, xla_s, torch_s in times_s(layer) if layer else ():
            if torch_s is None:
                continue
            ratios.setdefault(name, []).append(torch_s / xla_s)
            if torch_s > 1.2 * xla_s and torch_s - xla_s > MORE_WORK:
                row(f"{name}: {layer}", f"{torch_s * 1e3:.2f} ms", f"{xla_s * 1e3:.2f} ms", torch_s / xla_s)
    for name, found in ratios.items():
        slower = sum(ratio > 1 for ratio in found)
        case = f"random: {name}, median of {len(found)}"
        row(case, f"{slower} slower", f"worst {max(found):.2f}", statistics.median(found))


def random_layer(numbers: random.Random) -> Layer | None:
    """Return a convolution; None if it would be too large, or its kernel does not fit into its images."""
    kernel = numbers.choice([1, 1, 3, 3, 3, 5, 7])
    stride = numbers.choice([1, 1, 1, 2])
    dilation = numbers.choice([1, 1, 1, 1, 1, 2])
    batch, size = (
        numbers.choice([1, 2, 4, 8, 16, 32, 64, 128]),
        numbers.choice([7, 8, 12, 14, 16, 28, 32, 56]),
    )
    inputs, outputs = (numbers.choice([1, 3, 4, 8, 16, 32, 64, 128, 256]) for _ in range(2))
    groups = 1
    if numbers.random() < 0.2:
        outputs, groups = inputs, numbers.choice([inputs, max(1, inputs // 4)])
    padding = numbers.choice([0, dilation * (kernel // 2)])
    layer = Layer(batch, inputs, size, outputs, kernel, padding, stride, dilation, groups)
    work = batch * max(0, layer.places) ** 2 * outputs * inputs // groups * kernel**2
    return layer if layer.places > 0 and work < MOST_WORK else None


if __name__ == "__main__":
    main({"networks": measure_networks, "random": measure_random}, globals())
