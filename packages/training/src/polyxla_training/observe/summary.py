"""The totals of a run, and the line that reports them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


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
        yield "no MFU: the chip is unknown" if self.mfu is None else f"MFU {self.mfu:.1%} of {self.chip}"
