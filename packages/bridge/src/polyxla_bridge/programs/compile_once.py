"""One compilation of each program per job: claims, results and heartbeats in a key-value store.

The store is that of jaxlib's distributed runtime; process 0 serves it. Whoever reaches its port can write
there, so every value is sealed with the job's secret, and values without its seal are ignored.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_bridge.programs.cache import ProgramCache
from polyxla_bridge.programs.executable import Executable
from polyxla_bridge.sealing import sealed, unsealed

CHUNK_BYTES = 64 << 20
"""Largest value that is stored under one key, in bytes; a protocol buffer is limited to 2 GiB."""
HEARTBEAT_TIMEOUT_S = 30.0
"""Longest wait for the next heartbeat of a process that compiles for others, in seconds."""
_POLL_S = 1.0
_HEARTBEATS = "polyxla/heartbeats/"
_RETIRED = "polyxla/retired/"
_ARRIVED = "polyxla/arrived/"


@dataclass(frozen=True)
class Published:
    """A program that one process publishes for all.

    Attributes:
        data: the serialised program.
        is_hit: whether it came from the compilation cache.
    """

    data: bytes
    is_hit: bool


class CompileCoordinator:
    """Decides which process compiles a program, and distributes the result.

    The process that claims a program first compiles it, then stores either its chunks followed by an end
    record, or an end record with the error. The others poll for the end record.

    Args:
        link: jaxlib's connection to the store; keys live as long as the job.
        process: index of this process.
        secret: the job's.
    """

    def __init__(self, link: Any, process: int, secret: str) -> None:
        self._link = link
        self._process = process
        self._secret = secret
        self._beats = 0

    def claim(self, fingerprint: str) -> bool:
        """Claim a program for this process to compile; return False if another process already has."""
        # The store refuses a second value, so exactly one process gets the claim.
        try:
            self._set(_key(fingerprint, "claim"), str(self._process).encode(), may_replace=False)
        except Exception as error:
            # jaxlib has one type of exception for every status, which begins the text.
            if str(error).startswith("ALREADY_EXISTS"):
                return False
            raise
        return True

    def publish(self, fingerprint: str, program: Published) -> None:
        """Publish a claimed program to the processes that wait for it."""
        data = program.data
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._set(_key(fingerprint, str(number)), chunk)
        # The end record comes last, because a reader takes the chunks as complete once it exists.
        self._end(fingerprint, {"chunks": len(chunks), "is_hit": program.is_hit})

    def fail(self, fingerprint: str, error: BaseException) -> None:
        """Publish the error of a claimed program to the processes that wait for it."""
        failure = as_pjrt_error(error)
        self._end(fingerprint, {"code": failure.code, "message": failure.message})

    def _end(self, fingerprint: str, end: dict[str, Any]) -> None:
        self._set(_key(fingerprint, "end"), json.dumps(end).encode())

    def wait(self, fingerprint: str) -> Published | None:
        """Wait for a program that another process compiles.

        Returns:
            The program; None if the heartbeat of the compiling process stopped, or if what was claimed or
            published is not from a process of this job.

        Raises:
            PjrtError: the program could not be compiled.
        """
        compiling = self._read(_key(fingerprint, "claim"))
        if compiling is None:
            # The claim lacks the job's seal: no process of the job would ever publish the program.
            return None
        # A compilation may take any time, so the wait has no deadline. Each short wait for the end record is
        # followed by a look at the heartbeat.
        beat, seen = None, time.monotonic()
        while (end := self._wait_for(_key(fingerprint, "end"), _POLL_S)) is None:
            now = time.monotonic()
            if (latest := self.heartbeats().get(compiling.decode())) != beat:
                beat, seen = latest, now
            if now - seen > HEARTBEAT_TIMEOUT_S:
                return None
        if "message" in end:
            raise PjrtError(end["code"], end["message"])
        chunks = [self._read(_key(fingerprint, str(number))) for number in range(end["chunks"])]
        return None if None in chunks else Published(b"".join(filter(None, chunks)), end["is_hit"])

    def _wait_for(self, key: str, timeout_s: float) -> dict[str, Any] | None:
        try:
            data = self._link.blocking_key_value_get_bytes(key, int(timeout_s * 1000))
        except Exception as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                return None
            raise
        if (end := self._opened(key, data)) is None:
            # A value without the job's seal is returned at once, until the compiling process replaces it.
            time.sleep(timeout_s)
            return None
        found: dict[str, Any] = json.loads(end)
        return found

    def _set(self, key: str, value: bytes, *, may_replace: bool = True) -> None:
        # By default a value is replaced: a third party may have written one under the key.
        self._link.key_value_set_bytes(key, sealed(self._secret, key, value), allow_overwrite=may_replace)

    def _read(self, key: str) -> bytes | None:
        """Return a value that this job has written; None if it has written nothing under the key."""
        try:
            return self._opened(key, self._link.key_value_try_get_bytes(key))
        except Exception as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise

    def _read_all(self, directory: str) -> dict[str, bytes]:
        """Return the values of this job whose keys begin with `directory`, by the rest of their keys."""
        found = self._link.key_value_dir_get_bytes(directory)
        opened = {key.removeprefix(directory): self._opened(key, value) for key, value in found}
        return {name: value for name, value in opened.items() if value is not None}

    def _opened(self, key: str, value: bytes) -> bytes | None:
        try:
            return unsealed(self._secret, key, value)
        except ValueError:
            return None

    def beat(self) -> None:
        """Publish a heartbeat: this process compiles or computes, so waiting for it is not a stall."""
        self._beats += 1
        self._set(f"{_HEARTBEATS}{self._process}", str(self._beats).encode())

    def heartbeats(self) -> dict[str, str]:
        """Return the last heartbeat of each process, by its index; a process at work changes its own."""
        return {process: value.decode() for process, value in self._read_all(_HEARTBEATS).items()}

    def retire(self, replica: int) -> None:
        """Publish that a replica will run no more programs."""
        self._set(f"{_RETIRED}{replica}", b"")

    def retired(self) -> frozenset[int]:
        """Return the replicas that will run no more programs."""
        return frozenset(map(int, self._read_all(_RETIRED)))

    def arrive(self, group: frozenset[int], replica: int) -> None:
        """Publish that a replica is about to meet a group of replicas for the first time."""
        self._set(f"{_place(group)}{replica}", b"{}")

    def await_arrivals(self, group: frozenset[int]) -> None:
        """Wait until every replica of a group has arrived; the stall watchdog limits the wait."""
        place = _place(group)
        for replica in sorted(group - set(map(int, self._read_all(place)))):
            while self._wait_for(f"{place}{replica}", _POLL_S) is None:
                pass


def _place(group: frozenset[int]) -> str:
    members = ",".join(map(str, sorted(group)))
    return f"{_ARRIVED}{hashlib.sha256(members.encode()).hexdigest()}/"


def _key(fingerprint: str, name: str) -> str:
    return f"polyxla/programs/{fingerprint}/{name}"


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
        # Weak references, so that a program is freed when the framework destroys it.
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
        # `_lock` is held only to find the program's own lock: other programs compile at the same time.
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
                # Processes may have separate cache directories, and in the next job this one may get the
                # claim.
                self.cache.save(fingerprint, lambda: published.data, is_replaced=False)
                self.cache.count(is_hit=published.is_hit)
                return executable
            # The heartbeat of the process with the claim stopped, or the program cannot be sent. Compiling it
            # twice is better than waiting for ever.
            return self._load_or_compile(fingerprint, hlo_module, options)[0]
        try:
            executable, is_hit = self._load_or_compile(fingerprint, hlo_module, options)
            # A program that cannot be sent is published without data, so that the others stop waiting.
            data = self.serialize(executable) if self.is_serializable(executable) else b""
            coordinator.publish(fingerprint, Published(data, is_hit))
        except BaseException as error:
            # Without the error, the others would wait as long as this process has a heartbeat.
            coordinator.fail(fingerprint, error)
            raise
        return executable

    def _load_or_compile(
        self, fingerprint: str, hlo_module: bytes, options: bytes
    ) -> tuple[Executable, bool]:
        """Load the program from the cache or compile it; return it and whether it was cached."""
        # While this number is above 0, the stall watchdog sends the heartbeats for which the others wait.
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
            # A file that exists could not be loaded, so it is replaced.
            if self.is_serializable(compiled):
                self.cache.save(fingerprint, lambda: self.serialize(compiled))
            return compiled, False
        finally:
            with self._lock:
                self._compiling -= 1
