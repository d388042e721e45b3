"""Finds the lines that read the device or fall back, by watching every operation of a few steps.

Heavy: it builds on torch's dispatch modes. A traced step of a small network takes twice as long.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from polyxla.observe.findings import COPIES, Finding, Kind
from polyxla.observe.lines import caller

if TYPE_CHECKING:
    from polyxla.gauge import Gauge

_SCALAR_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::allclose"}


class Tracer(TorchDispatchMode):
    """Watches the operations of one thread between `start` and `stop`.

    Args:
        gauge: tells which operation was carried out by the host.

    Attributes:
        found: how often each line did what.
        flops: floating-point operations since `start`, those of matrix products and convolutions.
        compiled_at: the line at which the last program inside the step was cut and compiled.
    """

    def __init__(self, gauge: Gauge) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _end_in_children()
        self._gauge = gauge
        self._print = torch._tensor_str._str
        self._fallbacks: dict[str, int] = {}
        self.is_on = False
        self.found: Counter[Finding] = Counter()
        self.flops = 0
        self.compiled_at: str | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile do its work as if nobody watched."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See nothing of what torch.compile does to compile."""
        return True

    def start(self) -> None:
        """Watch from now on, unless another mode is in force here, which would end out of turn."""
        self.found.clear()
        self._fallbacks = self._gauge.fallbacks()
        self.flops, self.compiled_at = 0, None
        if self.is_on or _get_current_dispatch_mode() is not None:
            return
        self.__enter__()  # type: ignore[no-untyped-call]
        # Printing turns modes off.
        torch._tensor_str._str = self._printed  # type: ignore[assignment]
        self.is_on = True

    def stop(self) -> bool:
        """Watch no longer; return whether all that happened since `start` was seen.

        While a mode of somebody else's lies over this one, it stays: `stop` is to be called again.
        """
        if not self.is_on or _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)
        torch._tensor_str._str = self._print
        self.is_on = False
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note what it made the host do."""
        kwargs = kwargs or {}
        before = self._gauge.counts()
        result = func(*args, **kwargs)
        after = self._gauge.counts()
        name: str = func._schema.name
        ops = self._on_host(name) if after.host_reads > before.host_reads else []
        if ops or (name in COPIES and _leaves_device(args, result)):
            self._note(ops or [name], has_compiled=after.compiles > before.compiles)
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _on_host(self, name: str) -> list[str]:
        """Return what the host carried out for `name`; nothing if another replica of the process read."""
        if name in _SCALAR_READS:
            return [name]
        before, self._fallbacks = self._fallbacks, self._gauge.fallbacks()
        return [op for op, count in self._fallbacks.items() if count > before.get(op, 0)]

    def _note(self, ops: list[str], *, has_compiled: bool) -> None:
        line = caller()
        if line is None:
            return
        for op in ops:
            kind: Kind = "read" if op in _SCALAR_READS | COPIES else "fallback"
            self.found[Finding(kind, op, line)] += 1
        if has_compiled:
            self.compiled_at = line

    def _printed(self, tensor: torch.Tensor, **options: Any) -> str:
        line = caller()
        # Subclasses have no memory on the device: what torch.compile traces with, for one.
        is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter}
        if is_plain and tensor.device.type != "cpu" and line is not None:
            self.found[Finding("read", "print", line)] += 1
        text: str = self._print(tensor, **options)  # type: ignore[no-untyped-call]
        return text


def _leaves_device(args: tuple[Any, ...], result: Any) -> bool:
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    return isinstance(source, torch.Tensor) and source.device.type != "cpu" and result.device.type == "cpu"


@functools.cache
def _end_in_children() -> None:
    """Let no forked process, such as a DataLoader's worker, go on watching what nobody asks for."""
    os.register_at_fork(after_in_child=_end_here)


def _end_here() -> None:
    if isinstance(tracer := _get_current_dispatch_mode(), Tracer):
        tracer.stop()
