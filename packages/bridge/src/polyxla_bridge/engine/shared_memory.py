"""Memory in which the replicas of one machine pass arrays to each other, in place of gloo's sockets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int64

from polyxla_bridge import native
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import custom_calls
from polyxla_bridge.env import POLYXLA_SHARED_MEMORY, BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.shared_file import Address, SharedFile

MOST_REPLICAS = 512
"""Most replicas that share memory: the cells of every two of them have a few MiB."""
_NAME = "polyxla-collectives"


class SharedMemory:
    """A job's shared memory, before and after the replicas have met.

    Each process offers a file of its own. If process 0 can open all of them, it decides that the job shares
    the file of process 0: the others are on the same machine, and can open it, too.

    Args:
        settings: of this process.

    Attributes:
        is_shared: whether collectives of this job go through the memory.
    """

    def __init__(self, settings: BridgeSettings) -> None:
        self.is_shared = False
        self._settings = settings
        is_possible = (
            settings.shares_memory
            and 1 < settings.replicas <= MOST_REPLICAS
            and not native.LOCKED.polyxla_is_joined()
        )
        # The files of other processes only show that they are on this machine.
        size = native.LOCKED.polyxla_shared_size(settings.replicas) if settings.process == 0 else 0
        self._file: SharedFile | None = None
        # A sandbox may forbid files in memory.
        with suppress(OSError):
            self._file = SharedFile.make(_NAME, size) if is_possible else None

    def offer(self) -> Address | None:
        """Return what the other processes need to know; None if this one cannot share."""
        return self._file.address if self._file else None

    def decide(self, offers: Sequence[Address | None]) -> Address | None:
        """Return the address of this process's file if the processes with these offers can share it."""
        for offer in offers:
            found = SharedFile.open(offer, 0) if offer else None
            if found is None:
                return None
            found.close()
        return self.offer()

    def join(self, address: Address | None, local: Sequence[int]) -> None:
        """Share a file, or none.

        Args:
            address: what process 0 decided.
            local: this process's replicas.

        Raises:
            PjrtError: this process cannot open the file.
        """
        if address is None:
            return
        size = native.LOCKED.polyxla_shared_size(self._settings.replicas)
        file = self._file if self._settings.process == 0 else SharedFile.open(address, size)
        numbers = (c_int64 * len(local))(*local)
        self.is_shared = file is not None and native.LOCKED.polyxla_join(
            file.descriptor, self._settings.replicas, numbers, len(local)
        )
        if file is not None and file is not self._file:
            file.close()
        if not self.is_shared:
            raise PjrtError(
                Code.UNAVAILABLE,
                f"process {self._settings.process} cannot open /proc/{address[0]}/fd/{address[1]}, the "
                f"memory that the replicas of this job share; set {POLYXLA_SHARED_MEMORY}=off everywhere",
            )
        for target in hlo.SHARED_TARGETS.values():
            custom_calls.register(target)

    def forget(self) -> None:
        """Close this process's own file, once all have joined."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def leave(self) -> None:
        """End the collectives of this process, and the waits of others for it."""
        self.forget()
        if self.is_shared:
            native.UNLOCKED.polyxla_leave()
            self.is_shared = False
