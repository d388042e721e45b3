"""Seeds and states of the host's random number generators: reproducible, and different in every replica."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from polyxla import process_settings

NUMPY_SEEDS = 2**32
"""Source: numpy.random.seed takes 0 to 2**32 - 1."""


def derive(seed: int, *parts: object) -> int:
    """Return a 63-bit seed that depends on `seed` and every part; other parts give an independent stream."""
    # A hash, because seeds that differ by 1 give correlated streams in some generators.
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed this process's generators: Python's, torch's, and numpy's if it is imported.

    The replicas that are launched afterwards all start with these generators; their devices are seeded from
    the same seed, each differently. In a replica, call `polyxla.Replica.seed_everything` instead, which seeds
    its device too.
    """
    import torch

    process_settings.seeds.append(seed)
    random.seed(seed)
    # Not torch.manual_seed, which seeds every device and so would open the chips on TorchTPU.
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        # The global generator, not a new Generator: datasets draw from the global one.
        np.random.seed(seed % NUMPY_SEEDS)  # noqa: NPY002


def host_seed() -> int:
    """Return torch's seed in this process; 0 if torch is not imported."""
    torch: Any = sys.modules.get("torch")
    return int(torch.initial_seed()) if torch else 0


def host_state() -> dict[str, Any]:
    """Return the state of this process's generators, as a pytree that `polyxla_training.save` accepts."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_host_state(state: Mapping[str, Any]) -> None:
    """Restore this process's generators to a state that `host_state` returned."""
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002


@contextlib.contextmanager
def preserved_host_state() -> Iterator[None]:
    """Restore this process's generators on exit."""
    before = host_state()
    try:
        yield
    finally:
        restore_host_state(before)
