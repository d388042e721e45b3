"""The compilation cache: compiled programs in a directory, for later jobs.

torch_xla has such a cache (``xr.initialize_cache``), but cannot load programs of a plugin: it warns, and
compiles again. So the engine writes its own files: to torch_xla's directory if there is one, else to the
user's cache directory.

Source: https://github.com/pytorch/xla/issues/9094 (torch_xla calls a function that plugins do not have).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from polyxla_bridge.env import HOME, POLYXLA_COMPILE_CACHE, XDG_CACHE_HOME, BridgeSettings, CacheOrigin
from polyxla_bridge.programs import program_file
from polyxla_bridge.programs.cache_directory import PREFIX, CacheDirectory, why_unusable
from polyxla_bridge.programs.executable import Executable

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
    if problem or not settings.cache_path or DUMPS in _flags(settings.xla_flags):
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
    job = [settings.replicas, _flags(settings.xla_flags), sorted(compiler.items())]
    # XLA divides loops by the number of threads.
    machine = [settings.nproc, len(os.sched_getaffinity(0)), platform.machine(), cpu()]
    whole = json.dumps([program_file.code_digest(), version("jaxlib"), job, machine])
    return hashlib.sha256(whole.encode()).hexdigest()


def _flags(text: str) -> str:
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
        hits: programs that were cached, also if another process of the job looked them up.
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
        # The lock is a flag that several threads can set, and one of them first: it is never released.
        if self._warned.acquire(blocking=False):
            _log.warning("the compilation cache %s; the job continues without it: %s", what, error)
