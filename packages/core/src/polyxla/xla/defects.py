"""Defects of torch_xla 2.9.0 that are mended in place, also on a real TPU. Heavy.

Collectives that write into their arguments: torch_xla replaces the value of such an argument behind torch's
back. If the argument is a view, the tensor behind it keeps its old values, and the view has them again after
its next in-place operation. So accumulated gradients that are reduced and then clipped, and gradients in the
buckets of DistributedDataParallel, were those of one replica. Here, a collective writes into a tensor of its
own, which torch then copies. In XLA's program, this adds a copy only where the argument is a view.

Errors of a dataset that torch_xla's loader reads ahead: torch_xla ends the epoch without reporting them.

Replicas that are threads, where ``torch.serialization.safe_globals`` of one ends that of the others, in the
middle of their ``torch.load``: torch keeps one set for the process.

``torch.set_float32_matmul_precision``, which torch_xla ignores: it has a setting of its own, which does not
reach programs that are compiled already.

Parameters of lazy modules, which lose their class where a module is moved before its first call.

Tensors that a program still computes, which torch_xla refuses to divide with ``mark_sharding``.

Threads of a loader whose loop was left early: where one copies a batch while Python ends, Python ends it in
torch_xla's C++ code, which aborts the process (SIGABRT).
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch_xla
from torch import _weights_only_unpickler
from torch_xla.distributed.parallel_loader import ParallelLoader

from polyxla.lazy_modules import keep_lazy_parameters
from polyxla.process_settings import float32_precision
from polyxla.xla.activation_checkpoints import allow_activation_checkpoints
from polyxla.xla.autograd_threads import start_for_late_devices
from polyxla.xla.operators import replace_operators

_LEAVE_S = 5.0
"""Longest wait at the program's end for the threads of loaders, in seconds; a dataset may hang."""
_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITTEN = {
    "_xla_all_reduce_inplace": 1,
    "_xla_all_gather_out": 0,
    "_xla_all_gather_coalesced_out": 0,
    "_xla_reduce_scatter_out": 1,
    "_xla_reduce_scatter_coalesced_out": 1,
}
"""Functions of torch_xla's C++ module, with the position of the tensor or list that each writes into."""
_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}
"""torch's precisions of products of float32, with torch_xla's: float32, three passes of bfloat16, and one."""


@functools.cache
def mend_torch_xla() -> None:
    """Mend all of them, from now on. Several runtimes may call this."""
    _raise_in_loop()
    _end_loaders_before_python()
    replace_operators()
    _replace_collectives()
    _count_safe_globals()
    _obey_matmul_precision()
    _wait_before_sharding()
    keep_lazy_parameters()
    allow_activation_checkpoints()
    start_for_late_devices()


def _count_safe_globals() -> None:
    """Have a ``safe_globals`` block leave what blocks of other threads have added."""
    lock = threading.Lock()
    users: Counter[Any] = Counter()
    block: Any = _weights_only_unpickler._safe_globals

    def enter(self: Any) -> None:
        with lock:
            users.update(self.safe_globals)
            _weights_only_unpickler._add_safe_globals(self.safe_globals)

    def leave(self: Any, *_: object) -> None:
        with lock:
            users.subtract(self.safe_globals)
            _weights_only_unpickler._remove_safe_globals(
                [own for own in self.safe_globals if users[own] <= 0]
            )

    block.__enter__, block.__exit__ = enter, leave


_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def _replace_collectives() -> None:
    """Replace the functions through which all of torch_xla writes."""
    for name, position in _WRITTEN.items():
        setattr(_native, name, _copying(getattr(_native, name), position))


def _copying(collective: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any) -> Any:
        # The argument is a tensor or a list of tensors, and the collective is called with the same kind.
        given = arguments[position]
        written = [given] if isinstance(given, torch.Tensor) else list(given)
        own = [tensor.detach().clone() for tensor in written]
        into = own[0] if isinstance(given, torch.Tensor) else own
        result = collective(*arguments[:position], into, *arguments[position + 1 :])
        # torch_xla's functions record no gradient, and neither must the copy.
        with torch.no_grad():
            for tensor, value in zip(written, own, strict=True):
                tensor.copy_(value)
        return result

    return call


def _obey_matmul_precision() -> None:
    """Have torch_xla multiply float32 as torch's setting says, once a program has set it."""
    set_for_torch = torch.set_float32_matmul_precision
    set_for_xla = _native._xla_set_mat_mul_precision

    def set_for_new_programs(precision: str) -> None:
        # torch_xla finds compiled programs by a hash that leaves out the precision.
        if precision != _native._xla_get_mat_mul_precision() and _native._xla_metric_data("CompileTime"):
            warnings.warn(
                "The precision of matrix products changes after a program was compiled: the same program "
                "computes with the earlier precision when it runs again. Set the precision before the first "
                "step.",
                RuntimeWarning,
                stacklevel=3,
            )
        set_for_xla(precision)

    @functools.wraps(set_for_torch)
    def set_for_both(precision: str) -> None:
        set_for_torch(precision)
        # Torch warns of other names, and ignores them.
        if precision in _PRECISIONS:
            set_for_new_programs(_PRECISIONS[precision])

    _native._xla_set_mat_mul_precision = set_for_new_programs
    torch.set_float32_matmul_precision = set_for_both
    # What the script has set before it imported torch_xla. Torch's default is the highest precision, and a
    # TPU's is not: a program that sets nothing gets a TPU's.
    if given := float32_precision():
        set_for_new_programs(_PRECISIONS[given])


def _wait_before_sharding() -> None:
    """Have ``mark_sharding`` wait for a tensor that a program still computes."""
    mark = _native._xla_mark_sharding

    @functools.wraps(mark)
    def mark_when_computed(*arguments: Any) -> None:
        try:
            mark(*arguments)
        except RuntimeError as error:
            if "Data does not present on any device" not in str(error):
                raise
            _native._xla_wait_device_ops([])
            mark(*arguments)

    _native._xla_mark_sharding = mark_when_computed


class _Reported:
    """A loader whose exception ends the iteration, and is raised where the loop waits for the batch.

    Args:
        loader: what torch_xla reads in a thread.
        errors: what torch_xla's iterator raises once no batch is left.
    """

    def __init__(self, loader: Iterable[Any], errors: queue.Queue[BaseException]) -> None:
        self._loader, self._errors = loader, errors

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except GeneratorExit:
            # The user left the loop early, which is not an error of the dataset.
            raise
        except BaseException as error:
            # Stored before the iteration ends, because the loop then looks for it.
            self._errors.put(error)


def _raise_in_loop() -> None:
    """Make a loop over ``MpDeviceLoader`` or ``ParallelLoader`` raise what ended its dataset."""
    read: Any = ParallelLoader._loader_worker

    @functools.wraps(read)
    def loader_worker(self: Any) -> None:
        self._cpu_loader = _Reported(self._cpu_loader, self._exception_queue)
        read(self)

    ParallelLoader._loader_worker = loader_worker  # type: ignore[method-assign]


def _end_loaders_before_python() -> None:
    """Have the program's end wait for the threads of loaders that are still copying."""
    make: Any = ParallelLoader.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _loaders.add(self)

    any_loader: Any = ParallelLoader
    any_loader.__init__ = init
    atexit.register(_end_loaders)
    # A fork has none of the threads, and may have their queues' locks.
    os.register_at_fork(after_in_child=_loaders.clear)


def _end_loaders() -> None:
    deadline = time.monotonic() + _LEAVE_S
    loaders = list(_loaders)
    # `ParallelLoader.close` does the same, but waits for a dataset that hangs.
    for loader in loaders:
        loader._done = True
        for waiting in loader._queues.values():
            waiting.queue.close()
            waiting.cpu_loader_queue.close()
    for thread in [thread for loader in loaders for thread in loader._threads]:
        thread.join(max(0.0, deadline - time.monotonic()))
