"""Random numbers from one seed: the same again in every run, different in every replica."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

NUMPY_SEEDS = 2**32
"""Source: numpy.random.seed takes 0 to 2**32 - 1."""


def derive(seed: int, *parts: object) -> int:
    """Return a seed of 63 bits that depends on `seed` and on every part: another part, another stream."""
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators of this process: Python's, torch's, and numpy's where it is imported.

    Replicas that are launched afterwards draw their devices' random numbers from the same seed, each its own;
    in a replica, `polyxla.Replica.seed_everything` seeds its device too.
    """
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        # Not a Generator: it is this one that datasets draw from.
        np.random.seed(seed % NUMPY_SEEDS)  # noqa: NPY002


def host_seed() -> int:
    """Return what torch was seeded with in this process; 0 where it is not imported."""
    torch: Any = sys.modules.get("torch")
    return int(torch.initial_seed()) if torch else 0


def host_state() -> dict[str, Any]:
    """Return where this process's generators stand, as `polyxla_training.save` takes it."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_host(state: Mapping[str, Any]) -> None:
    """Let this process's generators go on from `host_state`."""
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002


@contextlib.contextmanager
def kept_host() -> Iterator[None]:
    """Afterwards, let this process's generators stand where they stood."""
    before = host_state()
    try:
        yield
    finally:
        restore_host(before)
