"""The store by which the ranks of TorchTPU tell each other where an array is awaited.

TorchTPU writes every descriptor of a pair of ranks to the same key, and never deletes it. A sender could
read the descriptor of an array that has already arrived, or, where the receiver is faster, only the latest of
several. TorchTPU also waits for the descriptor in ``isend``, so that two ranks that first send and then
receive would wait for each other. Here the n-th ``recv`` of a key meets its n-th ``send``, and the thread
that sends the array waits for its descriptor.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from polyxla_bridge.transfers import ticket

_DESCRIPTORS = "cross_host_transfer_descriptor:"
"""Prefix of the keys of descriptors. Source: libpywrap_2_15_0_common.so of torch_tpu 0.2.0 contains it."""
_NAME, _READERS = "polyxla/name", "polyxla/readers"
"""Keys in a group's store while its ranks meet: the group's name, and how many ranks have read it."""
_stores: list[TransferStore] = []
"""Kept until the process ends, as torch's own store keeps the keys of a group."""


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: TransferStore, key: Any, *args: Any) -> Any:
        # `check` and `wait` take a list of keys, and the other functions one key.
        if isinstance(key, str):
            store, (key,) = self._place([key])
        else:
            store, key = self._place(key)
        return getattr(store, name)(key, *args)

    return call


class TransferStore(Store):
    """A group's store, in which each descriptor has a key of its own.

    Groups that are smaller than the job find each other in the job's store, which TorchTPU takes from below
    the group's `PrefixStore`, by the prefixes. So this object stands below a `PrefixStore` of its own, and
    passes on the calls for both.

    Args:
        store: the group's.
        name: of the group, the same in all its ranks, and of no other group.
    """

    # C++ calls these by name, and finds only what the class itself defines. torch's names have two styles.
    set, get, add, check, wait, compare_set, deleteKey = map(  # noqa: N815
        _forwarded, ("set", "get", "add", "check", "wait", "compare_set", "delete_key")
    )

    def __init__(self, store: Any, name: str) -> None:
        super().__init__()
        self._group = store
        self._name = name
        # torch's attribute exists on a `PrefixStore` only; a store without a prefix is the job's own.
        self._job = getattr(store, "_underlying_non_prefix_store", store)
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def for_group(self) -> Store:
        """Return the store to give to TorchTPU, which keeps only its C++ half alive."""
        _stores.append(self)
        return PrefixStore(self._name, self)

    def has_extended_api(self) -> bool:
        """Return whether it can get and set several values at once."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values; for descriptors, which a send reads, tickets."""
        store, keys = self._place(keys)
        # TorchTPU's `isend`, which calls this, must not wait for the receiver: the thread that sends does.
        if all(key.startswith(_DESCRIPTORS) for key in keys):
            return [ticket(functools.partial(_take, store, _next(self._sent, key))) for key in keys]
        return list(store.multi_get(keys))

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Store the values; descriptors, which a recv writes, under the next key."""
        store, keys = self._place(keys)
        names = [_next(self._received, key) if key.startswith(_DESCRIPTORS) else key for key in keys]
        store.multi_set(names, values)

    def _place(self, keys: list[str]) -> tuple[Any, list[str]]:
        """Return the store that has these keys, and their names in it."""
        # PrefixStore puts a slash between its prefix and the key.
        prefix = f"{self._name}/"
        if all(key.startswith(prefix) for key in keys):
            return self._group, [key.removeprefix(prefix) for key in keys]
        return self._job, keys


def _take(store: Any, key: str) -> bytes | None:
    # Waiting for the key would block other threads, whose calls share the store's connection.
    if not store.check([key]):
        return None
    value: bytes = store.get(key)
    # Each descriptor has a key of its own, so the store would grow with every array.
    store.delete_key(key)
    return value


def _next(counts: Counter[str], key: str) -> str:
    counts[key] += 1
    return f"{key}#{counts[key]}"


def give_stores() -> None:
    """Give each group that TorchTPU makes such a store. Call before TorchTPU registers its function."""
    from torch_tpu._internal.distributed import tpu_distributed

    create = tpu_distributed.create_process_group

    @functools.wraps(create)
    def create_process_group(store: Store, rank: int, size: int, *args: Any) -> Any:
        if rank == 0:
            # The name is unique in the job: it has this process's rank in the job, and the number of groups
            # that the process has made before.
            first = dist.get_rank() if dist.is_initialized() else 0
            store.set(_NAME, f"polyxla-{first}-{len(_stores)}")
        # `get` waits until the first rank has set the name.
        name = store.get(_NAME).decode()
        # The last reader deletes the keys, because a program that destroys a group and makes it anew may use
        # the same keys.
        if store.add(_READERS, 1) == size:
            store.delete_key(_NAME)
            store.delete_key(_READERS)
        return create(TransferStore(store, name).for_group(), rank, size, *args)

    tpu_distributed.create_process_group = create_process_group
