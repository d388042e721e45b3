"""The speed of a training: windows of steps, the share of the chip's peak, and the totals of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from polyxla.plugin import generation_of


def utilization(flops: float, step_s: float, kind: str | None) -> float | None:
    """Return the share of a device's peak that a replica's step reaches (MFU); None for an unknown chip.

    Args:
        flops: floating-point operations in one replica's step, of the model alone.
        step_s: duration of the step, in seconds.
        kind: the kind of chip, as in `polyxla.plugin.Counters.chip`.
    """
    generation = generation_of(kind)
    if generation is None or flops <= 0 or step_s <= 0:
        return None
    # Of a device, not of a chip: on chips that show themselves as two devices, a replica has half of the
    # peak.
    return flops / step_s / generation.device_flops


@dataclass(frozen=True)
class ThroughputWindow:
    """The steps between two points in time.

    Attributes:
        steps: number of optimizer updates.
        seconds: wall time, without evaluations.
        records: number of records that this replica received; None without a loader of polyxla's.
        waited_s: the part of `seconds` in which the loop waited for a batch; None without such a loader.
    """

    steps: int = 0
    seconds: float = 0.0
    records: int | None = None
    waited_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Duration of one step, in seconds."""
        return self.seconds / self.steps if self.steps else None

    @property
    def wait_share(self) -> float | None:
        """Share of the time in which the loop waited for its input, 0 to 1."""
        return None if self.waited_s is None or self.seconds <= 0 else min(1.0, self.waited_s / self.seconds)

    def records_per_s(self, world_size: int) -> float | None:
        """Return the records of all replicas per second."""
        return None if self.records is None or self.seconds <= 0 else self.records * world_size / self.seconds

    def as_json(self, world_size: int) -> dict[str, Any]:
        """Return the rates by name."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "records_per_s": self.records_per_s(world_size),
            "wait_share": self.wait_share,
        }

    def __add__(self, other: ThroughputWindow) -> ThroughputWindow:
        mine, others = asdict(self), asdict(other)
        return ThroughputWindow(**{name: _sum(mine[name], others[name]) for name in mine})


class ThroughputMeter:
    """Divides a training into windows.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_step_at = self._window_since = clock()
        self._excluded_s = 0.0
        self._steps = 0
        self._loader: Any = None
        self._records, self._waited_s = 0, 0.0

    def step(self) -> None:
        """Record that a step was submitted to the device. Called every step."""
        self._last_step_at = self._clock()
        self._steps += 1

    def exclude(self) -> None:
        """Exclude the time since the last step from the window: an evaluation took it."""
        now = self._clock()
        self._excluded_s += now - self._last_step_at
        self._last_step_at = now

    def extend_step(self) -> None:
        """Make the last step end now, because the device has been waited for."""
        self._last_step_at = self._clock()

    def next_window(self, loader: Any) -> ThroughputWindow:
        """Return the window up to the last step, and begin the next one there.

        Args:
            loader: the `polyxla.replica.loader.Loader` of the steps, or None.
        """
        # Evaluations took a part of this time, up to the last step; rounding must not make it negative.
        seconds = max(0.0, self._last_step_at - self._window_since - self._excluded_s)
        window = ThroughputWindow(self._steps, seconds, *self._input(loader))
        self._window_since, self._steps, self._excluded_s = self._last_step_at, 0, 0.0
        return window

    def _input(self, loader: Any) -> tuple[int | None, float | None]:
        if loader is None:
            return None, None
        # A loader's totals are its own, so those of another loader begin at 0.
        before = (self._records, self._waited_s) if loader is self._loader else (0, 0.0)
        # The totals are kept as they are now, and the next window is the difference to them.
        self._loader, self._records, self._waited_s = loader, loader.records, loader.waited_s
        return loader.records - before[0], loader.waited_s - before[1]


def _sum(first: Any, other: Any) -> Any:
    # A value that is None in a window is None in all windows, except in the empty one that a sum begins with.
    return other if first is None else first if other is None else first + other


def in_seconds(seconds: float, form: str) -> str:
    """Return the time of a compilation, to stand after its count; nothing for 0, which is an unknown time.

    Args:
        seconds: the time.
        form: its format, such as ``.1f``.
    """
    return f" in {seconds:{form}} s" if seconds else ""


@dataclass
class Summary:
    """A run's totals. What the runtime or the loader does not report is None.

    Attributes:
        steps: number of optimizer updates.
        is_shared: whether the counters cover several replicas, which are threads of one process.
        seconds: wall time from the start of the first step.
        compiles: number of programs compiled.
        compile_s: time that their compilation took, in seconds.
        unexpected: number of programs compiled after the first steps and the first evaluation.
        reads_per_step: the user's own reads of the device per step.
        fallbacks: number of operations that ran on the host, by name.
        cache_hits: number of programs found in the persistent cache.
        cache_misses: number of programs not found in it.
        wait_share: share of the time in which the loop waited for its input.
        records_per_s: records of all replicas per second, including compilations after the first two steps.
        step_s: duration of a step in seconds, the median over the windows between reads of logged values.
        flops_per_step: floating-point operations in one replica's step.
        mfu: share of the chip's peak that was reached.
        chip: the kind of chip; None if it is unknown, and then `mfu` is None too.
        peak_bytes: the highest device memory in use that was seen.
    """

    steps: int = 0
    is_shared: bool = False
    seconds: float = 0.0
    compiles: int = 0
    compile_s: float = 0.0
    unexpected: int = 0
    reads_per_step: float | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    cache_hits: int = 0
    cache_misses: int = 0
    wait_share: float | None = None
    records_per_s: float | None = None
    step_s: float | None = None
    flops_per_step: int | None = None
    mfu: float | None = None
    chip: str | None = None
    peak_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return every field by its name."""
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield f"{self.steps} steps in {self.seconds:.1f} s"
        if self.compiles:
            yield f"{self.compiles} programs compiled{in_seconds(self.compile_s, '.1f')}"
        if self.unexpected:
            yield f"{self.unexpected} of them after the first steps"
        if self.is_shared:
            yield "counted over all replicas of this process"
        if self.reads_per_step is not None:
            yield f"{self.reads_per_step:.2g} reads of the device a step"
        if self.fallbacks:
            yield f"on the host: {', '.join(f'{name} x{count}' for name, count in self.fallbacks.items())}"
        if self.cache_hits or self.cache_misses:
            yield f"program cache: {self.cache_hits} hits, {self.cache_misses} misses"
        if self.wait_share is not None:
            yield f"{self.wait_share:.0%} of the time waiting for input"
        if self.step_s is not None:
            yield f"{self.step_s * 1e3:.3g} ms a step (median)"
        if self.records_per_s is not None:
            yield f"{self.records_per_s:.4g} records/s"
        # Said rather than left out: users look for it.
        yield "no MFU: the chip is unknown" if self.mfu is None else f"MFU {self.mfu:.1%} of {self.chip}"
