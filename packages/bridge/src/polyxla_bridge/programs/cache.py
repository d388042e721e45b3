"""The compilation cache: compiled programs in a directory, for later jobs.

torch_xla has such a cache (``xr.initialize_cache``), but cannot load programs of a plugin: it warns, and
compiles again. So the engine writes its own files: to torch_xla's directory if there is one, else to the
user's cache directory. Any number of threads, processes and jobs may use one directory at the same time.

Source: https://github.com/pytorch/xla/issues/9094 (torch_xla calls a function that plugins do not have).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from polyxla_bridge.env import HOME, POLYXLA_COMPILE_CACHE, XDG_CACHE_HOME, BridgeSettings, CacheOrigin
from polyxla_bridge.programs import executable
from polyxla_bridge.programs.executable import Executable

LIMIT_BYTES = 2 << 30
"""Maximum size of the cache, in bytes: about a thousand programs of small networks, or a hundred of large."""
SWEEP_BYTES = 64 << 20
"""Bytes that a process writes between two checks of the size."""
ABANDONED_S = 3600.0
"""Age from which an unfinished file counts as left behind by a killed writer, in seconds."""
PREFIX = "polyxla-"
"""Name prefix of the cache's files; torch_xla writes others to the same directory."""


def why_unusable(directory: Path, *, is_private: bool) -> str | None:
    """Make a directory if it does not exist; return why it cannot be used, or None.

    Args:
        directory: its path.
        is_private: whether other users must not be able to write there, since cached code is run.
    """
    # The directory may exist with another owner or mode, which `mkdir` accepts, so both are checked below.
    try:
        directory.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return str(error)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    if is_private and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        return f"other users may write to {directory}"
    return None


class CacheDirectory:
    """Files by name; a reader never sees a partly written file.

    Args:
        path: the directory, made at the first write.
        limit_bytes: maximum size; the least recently used files are evicted.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        # The first write of a process checks the size: the directory may have grown since the last job.
        self._written_bytes = SWEEP_BYTES
        self._lock = threading.Lock()

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file, then evict others if the cache is too large.

        The data is not flushed to disk, which would take longer than compiling a small program: a file that
        a crash of the machine damages fails its checksum.

        Raises:
            OSError: the file cannot be written; nothing remains of it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # `tempfile` would make a file that other users of a shared directory cannot read.
        temporary = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
            # A rename is atomic: a reader finds the old file or the whole new one.
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        if self._is_sweep_due(len(data)):
            self.sweep()

    def _is_sweep_due(self, size_bytes: int) -> bool:
        # The number restarts under the lock, so that only one of several threads sweeps.
        with self._lock:
            self._written_bytes += size_bytes
            if self._written_bytes < SWEEP_BYTES:
                return False
            self._written_bytes = 0
            return True

    def read(self, name: str, *, is_use: bool) -> bytes:
        """Return the content of a file.

        Args:
            name: of the file.
            is_use: whether the file becomes the most recently used one.

        Raises:
            OSError: the file does not exist or cannot be read; or everyone may write to the directory, and
                another user has written the file, whose code would be run.
        """
        # Without O_NONBLOCK, opening a pipe that another user has put there might never return.
        with os.fdopen(os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            # The open file is checked, not its path, under which another user could put another file later.
            found = os.fstat(file.fileno())
            is_everyones = bool(self.path.stat().st_mode & stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or (is_everyones and found.st_uid not in (0, os.geteuid())):
                raise PermissionError(f"user {found.st_uid} has put it where everyone may write")
            if is_use:
                # `sweep` takes the time of modification for that of the last use. Another user's file can be
                # read, but its times cannot be set.
                with contextlib.suppress(PermissionError):
                    os.utime(file.fileno())
            return file.read()

    def sweep(self) -> None:
        """Evict the least recently used programs, and delete what killed writers left behind.

        Files that cannot be deleted, such as another user's in a shared directory, stay.
        """
        programs = []
        for path, status in self._files():
            if path.name.startswith("."):
                if time.time() - status.st_mtime > ABANDONED_S:
                    _delete(path)
            else:
                programs.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in programs) - self._limit_bytes
        for _, size, path in sorted(programs):
            if excess <= 0:
                return
            # A file that is gone counts, too: another process that sweeps now deletes the same files in the
            # same order, and together they delete no more than needed.
            _delete(path)
            excess -= size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.startswith((PREFIX, f".{PREFIX}")):
                    try:
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        # Another process has evicted it, or has renamed it because it is complete.
                        continue
        return found


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        path.unlink()


_log = logging.getLogger("polyxla.bridge")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)
"""Fields by which LLVM chooses instructions for the host's processor, on x86 and on ARM.
Source: llvm/lib/TargetParser/Host.cpp; the fields, arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c
of Linux."""
DUMPS = "--xla_dump_to"
"""XLA option that writes files about each compilation; a cached program would write none."""


def for_job(
    settings: BridgeSettings,
    compiler: Mapping[str, str | bool],
    on_lookup: Callable[[bool], None] | None = None,
) -> ProgramCache:
    """Return the cache that the job's environment asks for; it stores nothing if there can be none.

    If the chosen directory cannot be used, the first process of the job warns.

    Args:
        settings: of this process.
        compiler: XLA options that the engine sets.
        on_lookup: called for each program with whether the cache had it.
    """
    problem = _problem(settings)
    if problem and settings.process == 0:
        _log.warning(
            "no compiled programs are cached for later jobs: %s; set %s=DIRECTORY to use another directory, "
            "or %s=off to turn the cache off",
            *(problem, POLYXLA_COMPILE_CACHE, POLYXLA_COMPILE_CACHE),
        )
    if problem or not settings.cache_path or DUMPS in flags(settings.xla_flags):
        return ProgramCache("", "")
    digest = context(settings, compiler)
    return ProgramCache(
        settings.cache_path, digest, is_readonly=settings.cache_is_readonly, on_lookup=on_lookup
    )


def _problem(settings: BridgeSettings) -> str | None:
    """Return why the cache directory cannot be used; None if it can, or if there is to be no cache."""
    if settings.cache_origin is CacheOrigin.USER:
        return why_unusable(Path(settings.cache_path), is_private=False)
    if settings.cache_origin is not CacheOrigin.DEFAULT:
        # The program that chose a directory is responsible for it; it may be read-only on purpose.
        return None
    if not settings.cache_path:
        return f"neither {XDG_CACHE_HOME} nor {HOME} is set"
    if not cpu():
        return "Linux does not report the model of this processor, and the programs might run on another one"
    return why_unusable(Path(settings.cache_path), is_private=True)


def context(settings: BridgeSettings, compiler: Mapping[str, str | bool]) -> str:
    """Return a digest of everything but the program that determines the compiled code."""
    # Settings that do not change the code, such as the platform's name and timeouts, are left out.
    rewriting = [settings.has_tpu_numerics, settings.has_torch_kernels]
    job = [settings.replicas, rewriting, flags(settings.xla_flags), sorted(compiler.items())]
    # XLA divides loops by the number of threads.
    machine = [settings.nproc, len(os.sched_getaffinity(0)), platform.machine(), cpu()]
    whole = json.dumps([executable.code_digest(), version("jaxlib"), job, machine])
    return hashlib.sha256(whole.encode()).hexdigest()


def flags(text: str) -> str:
    """Return XLA's flags: the variable's text, or the content of the file that it names.

    Source: SetArgvFromEnv in xla/parse_flags_from_env.cc.
    """
    name = text.strip()
    if not name or name.startswith("-"):
        return text
    try:
        return Path(name).read_text()
    except (OSError, ValueError):
        # XLA cannot read the file either, and reports it.
        return text


def cpu(cpuinfo: Path = _CPUINFO) -> str:
    """Return model and features of the first processor; empty if Linux does not report them."""
    try:
        first = cpuinfo.read_text().strip().partition("\n\n")[0]
    except OSError:
        return ""
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)


class ProgramCache:
    """Compiled programs by fingerprint. An error of the directory is logged once, and fails no job.

    Args:
        directory: made at the first write; if empty, the cache stores, finds and counts nothing.
        context: digest of everything but the program that determines the compiled code.
        is_readonly: whether to write nothing.
        on_lookup: called for each program with whether it was cached, in the thread that asked.

    Attributes:
        hits: programs that were cached, including those that another process of the job looked up.
        misses: programs that were not cached, or could not be used.
    """

    def __init__(
        self,
        directory: str,
        context: str,
        *,
        is_readonly: bool = False,
        on_lookup: Callable[[bool], None] | None = None,
    ) -> None:
        self.hits = self.misses = 0
        # A program may change its working directory later.
        self._directory = CacheDirectory(Path(directory).absolute()) if directory else None
        self._context = context
        self._is_readonly = is_readonly
        self._on_lookup = on_lookup
        self._lock = threading.Lock()
        self._warned = threading.Lock()

    def __str__(self) -> str:
        where = self._directory.path if self._directory else "none"
        return f"compilation cache: {self.hits} hits, {self.misses} misses ({where})"

    def count(self, *, is_hit: bool) -> None:
        """Count a program that this process needed."""
        if self._directory is None:
            return
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit
        if self._on_lookup is not None:
            self._on_lookup(is_hit)

    def load(self, fingerprint: str, unpack: Callable[[bytes], Executable]) -> Executable | None:
        """Return a cached program; None if there is none that can be used.

        Args:
            fingerprint: of the program.
            unpack: makes the program from the content of its file, or raises.
        """
        if self._directory is None:
            return None
        name = self._name(fingerprint)
        try:
            executable = unpack(self._directory.read(name, is_use=not self._is_readonly))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._warn(f"cannot use {self._directory.path / name}", error)
            return None
        # A file that was copied or renamed holds another program than its name says.
        if executable.fingerprint != fingerprint:
            self._warn(f"cannot use {self._directory.path / name}", ValueError("it holds another program"))
            return None
        return executable

    def save(self, fingerprint: str, pack: Callable[[], bytes], *, is_replaced: bool = True) -> None:
        """Cache a program; its file appears complete or not at all.

        Args:
            fingerprint: of the program.
            pack: returns the content of the file.
            is_replaced: whether an existing file is written again.
        """
        if self._directory is None or self._is_readonly:
            return
        name = self._name(fingerprint)
        try:
            if is_replaced or not (self._directory.path / name).exists():
                self._directory.write(name, pack())
        except Exception as error:
            self._warn(f"cannot write {self._directory.path / name}", error)

    def _name(self, fingerprint: str) -> str:
        return f"{PREFIX}{hashlib.sha256(f'{self._context} {fingerprint}'.encode()).hexdigest()}"

    def _warn(self, what: str, error: Exception) -> None:
        # The lock serves as a flag: it is never released, so exactly one thread warns.
        if self._warned.acquire(blocking=False):
            _log.warning("the compilation cache %s; the job continues without it: %s", what, error)
