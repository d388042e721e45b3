"""One compilation of each program per job, and its compilation cache."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from weakref import WeakValueDictionary

from polyxla_bridge.programs.cache import ProgramCache
from polyxla_bridge.programs.compile_coordination import CompileCoordinator, Published
from polyxla_bridge.programs.executable import Executable


class CompileOnce(ABC):
    """Compiles and loads the programs of one process of a job. Any thread may call it.

    Args:
        cache: the compilation cache.
        coordinator: by which the processes of a job agree who compiles; None if this one compiles by itself.

    Attributes:
        compiles: number of programs that this process compiled.
        cache: the compilation cache, and its hits and misses.
    """

    def __init__(self, cache: ProgramCache, coordinator: CompileCoordinator | None) -> None:
        self.compiles = 0
        self.cache = cache
        self._coordinator = coordinator
        self._compile_locks: dict[str, threading.Lock] = {}
        self._compiled: WeakValueDictionary[str, Executable] = WeakValueDictionary()
        self._compiling = 0
        self._lock = threading.Lock()

    @abstractmethod
    def compile_new(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program that is not cached.

        Args:
            fingerprint: of the program and its options.
            hlo_module: a serialised HloModuleProto.
            options: a serialised CompileOptionsProto.

        Raises:
            Exception: any error of the compiler.
        """

    @abstractmethod
    def is_serializable(self, executable: Executable) -> bool:
        """Return whether a program can be stored and sent."""

    @abstractmethod
    def serialize(self, executable: Executable) -> bytes:
        """Return a program as bytes that `deserialize` reads."""

    @abstractmethod
    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process of a job with as many devices."""

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled, or loaded."""
        return self._compiling > 0

    def close(self) -> None:
        """Forget all programs."""
        self._compiled.clear()

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program once for all replicas; different programs compile at the same time."""
        fingerprint = hashlib.sha256(hlo_module + options).hexdigest()
        with self._lock:
            one_at_a_time = self._compile_locks.setdefault(fingerprint, threading.Lock())
        with one_at_a_time:
            executable = self._compiled.get(fingerprint)
            if executable is None:
                executable = self._compile_or_wait(fingerprint, hlo_module, options)
                self._compiled[fingerprint] = executable
            return executable

    def _compile_or_wait(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        coordinator = self._coordinator
        if coordinator is None:
            return self._load_or_compile(fingerprint, hlo_module, options)[0]
        if not coordinator.claim(fingerprint):
            published = coordinator.wait(fingerprint)
            if published and published.data:
                executable = self.deserialize(published.data)
                # Processes may have separate cache directories, and another one may claim it in the next job.
                self.cache.save(fingerprint, lambda: published.data, is_replaced=False)
                self.cache.count(is_hit=published.is_hit)
                return executable
            # The heartbeat of the process that claimed it stopped, or the program cannot be sent. Compiling
            # twice is better than never.
            return self._load_or_compile(fingerprint, hlo_module, options)[0]
        try:
            executable, is_hit = self._load_or_compile(fingerprint, hlo_module, options)
            data = self.serialize(executable) if self.is_serializable(executable) else b""
            coordinator.publish(fingerprint, Published(data, is_hit))
        except BaseException as error:
            coordinator.fail(fingerprint, error)
            raise
        return executable

    def _load_or_compile(
        self, fingerprint: str, hlo_module: bytes, options: bytes
    ) -> tuple[Executable, bool]:
        """Load the program from the cache or compile it; return it and whether it was cached."""
        with self._lock:
            self._compiling += 1
        try:
            cached = self.cache.load(fingerprint, self.deserialize)
            self.cache.count(is_hit=cached is not None)
            if cached is not None:
                return cached, True
            with self._lock:
                self.compiles += 1
            compiled = self.compile_new(fingerprint, hlo_module, options)
            if self.is_serializable(compiled):
                self.cache.save(fingerprint, lambda: self.serialize(compiled))
            return compiled, False
        finally:
            with self._lock:
                self._compiling -= 1
