"""What a program sets for its whole process, such as a seed, holds in the processes of its replicas, too.

Otherwise a seed or a default type at a script's top level would hold on one replica, which runs in the
launching process, and be lost on several.
"""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass
from typing import Any

seeds: list[int] = []
"""The seeds that `polyxla.seed_everything` has given to the generators of this process."""
_FLOAT32_PRECISIONS = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
"""How torch stores its precisions of products of float32, with the names that it takes."""
_lock = threading.Lock()
_applied: list[ProcessSettings] = []


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of one process. It can be unpickled without torch.

    Attributes:
        torch: those of torch, by name; empty if the process has not imported it.
        numpy_state: state of NumPy's global generator; empty if the process has not imported NumPy.
        python_state: that of Python's generator; None unless `polyxla.seed_everything` has seeded it.
            Replicas that all continue one that nobody has seeded would draw the same names and ports.
    """

    torch: dict[str, Any]
    numpy_state: tuple[Any, ...]
    python_state: Any

    def apply(self) -> None:
        """Set them in this process, once: the first of the replicas that are its threads does it for all."""
        with _lock:
            if any(settings is self for settings in _applied):
                return
            _applied[:] = [self]
            # A process whose runtime needs no torch is not to import it for this.
            if self.torch and "torch" in sys.modules:
                _set_torch(**self.torch)
            if self.numpy_state and "numpy" in sys.modules:
                import numpy as np

                kind, keys, *rest = self.numpy_state
                np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002
            if self.python_state is not None:
                random.setstate(self.python_state)


def _set_torch(
    *,
    dtype: str,
    is_deterministic: bool,
    only_warns: bool,
    detects_anomaly: bool,
    checks_nan: bool,
    sharing: str,
    float32_precision: str | None,
    state: bytes,
) -> None:
    import torch

    torch.set_default_dtype(getattr(torch, dtype))
    torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
    torch.autograd.set_detect_anomaly(detects_anomaly, checks_nan)
    torch.multiprocessing.set_sharing_strategy(sharing)
    if float32_precision:
        torch.set_float32_matmul_precision(float32_precision)
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def process_settings() -> ProcessSettings:
    """Return those of this process. Imports nothing: what is not imported has nothing set."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    of_torch = torch and {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "only_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "detects_anomaly": torch.is_anomaly_enabled(),
        "checks_nan": torch.is_anomaly_check_nan_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "float32_precision": float32_precision(),
        "state": torch.get_rng_state().numpy().tobytes(),
    }
    numpy_state: tuple[Any, ...] = ()
    if numpy:
        kind, keys, *rest = numpy.random.get_state()
        numpy_state = (kind, keys.tobytes(), *rest)
    return ProcessSettings(
        torch=of_torch or {},
        numpy_state=numpy_state,
        python_state=random.getstate() if seeds else None,
    )


def float32_precision() -> str | None:
    """Return what was given to ``torch.set_float32_matmul_precision``; None if nothing was.

    torch's own getter says ``highest`` for both.
    """
    import torch

    of_mkldnn: Any = torch.backends.mkldnn
    return _FLOAT32_PRECISIONS.get(of_mkldnn.matmul.fp32_precision)
