"""Waits of torch_xla with the GIL held, which the engine's threads need. Heavy: imports torch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch_xla

NUMBER = "aten::_local_scalar_dense"
"""The operator that reads a tensor's only element; torch_xla counts its calls under this name."""


def wait_without_gil() -> None:
    """Make torch_xla's functions that wait with the GIL held find what they wait for already done.

    They wait for the start of the step before, or compute a tensor themselves. In both cases another thread
    executes a program, for which it needs the GIL.
    """
    # Compiled by torch.compile (``openxla``).
    call_before("_run_cached_graph", lambda *_: _wait_for_step())
    call_before("_xla_mark_sharding", lambda tensor, _: _compute_copy(tensor))
    for name in ("_get_local_shards", "_get_local_shard_replica_and_indices"):
        call_before(name, _compute)
    _read_numbers_without_gil()


def call_before(name: str, prepare: Callable[..., None]) -> None:
    """Replace a function of torch_xla by one that first passes its arguments to `prepare`."""
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    function = getattr(native_part, name)

    @functools.wraps(function)
    def prepared(*args: Any) -> Any:
        prepare(*args)
        return function(*args)

    setattr(native_part, name, prepared)


def _read_numbers_without_gil() -> None:
    """Replace the operator that reads a tensor's only element by one that waits without the GIL.

    torch's C++ code calls it with the GIL held for a number in the place of an argument: ``x[i]``,
    ``torch.full((2,), i)``. torch_xla may have to compute the tensor first, on other threads.
    """
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]

    def read(tensor: Any) -> Any:
        native_part._xla_increment_counter(NUMBER, 1)
        # Like torch_xla's own kernel. torch's binding releases the GIL.
        (copy,) = torch._to_cpu([tensor])
        return copy.item()

    with warnings.catch_warnings():
        # torch warns that the operator had a kernel.
        warnings.simplefilter("ignore")
        _LIBRARY.impl(NUMBER, read, "XLA", allow_override=True)


_LIBRARY: Any = torch.library.Library("aten", "IMPL")
"""Its kernels live as long as it does."""


def _wait_for_step() -> None:
    """Wait until the last step has started on this replica's device; under SPMD, on all devices."""
    from torch_xla import runtime
    from torch_xla.core import xla_model

    here = [] if runtime.is_spmd() else xla_model.xla_real_devices([torch_xla.device()])
    xla_model.wait_device_ops(here)


def _compute_copy(tensor: Any) -> None:
    """Compute a tensor that is a copy of another one, as ``copy.deepcopy`` makes it.

    One whose data is still on the host is not sent to the devices here, since torch_xla will send its shards;
    and one that is yet to be computed stays so, since torch_xla only makes a note of its sharding.
    """
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    (is_pending,) = native_part._check_tensor_need_materialization([tensor])
    if not is_pending and "Tensor on host: None" in native_part._get_xla_tensor_debug_info(tensor):
        _compute([tensor])


def _compute(tensors: Any) -> None:
    """Compute tensors, and wait until they are."""
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    native_part._xla_sync_multi(list(tensors), [], True, False)
