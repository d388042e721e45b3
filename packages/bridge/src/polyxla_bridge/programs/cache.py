"""Compiled programs in a folder, for the jobs that follow.

torch_xla has such a cache (``xr.initialize_cache``), but loads nothing that a plugin made: it warns and asks
for the program again. So the engine keeps its own files, in the same folder where there is one, else in the
person's own.

Source: https://github.com/pytorch/xla/issues/9094 (torch_xla asks a function that plugins do not have).
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

from polyxla_bridge.engine.engine import Executable
from polyxla_bridge.env import HOME, POLYXLA_COMPILE_CACHE, XDG_CACHE_HOME, Origin, Share
from polyxla_bridge.programs.cache_folder import PREFIX, CacheFolder, unfit

_log = logging.getLogger("polyxla.bridge")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)
"""What LLVM goes by when it compiles for "this machine", on x86 and on ARM.
Source: llvm/lib/TargetParser/Host.cpp; the fields, arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c
of Linux."""
DUMPS = "--xla_dump_to"
"""The option that asks for files about each compilation: a program that is not compiled has none."""


def of_job(
    share: Share, compiler: Mapping[str, str], on_lookup: Callable[[bool], None] | None = None
) -> ProgramCache:
    """Return the cache that the job's environment asks for; it does nothing if there can be none.

    Why there is none is said by the job's first process only.

    Args:
        share: of the job.
        compiler: XLA's options that the engine sets itself.
        on_lookup: told of each program whether it was there.
    """
    why = _why_none(share)
    if why and share.process == 0:
        _log.warning(
            "no compiled programs are kept for the next job: %s; %s=FOLDER names a place, "
            "%s=off leaves out this line",
            *(why, POLYXLA_COMPILE_CACHE, POLYXLA_COMPILE_CACHE),
        )
    if why or not share.cache_path or DUMPS in _flags(share.xla_flags):
        return ProgramCache("", "")
    made_of = context(share, compiler)
    return ProgramCache(share.cache_path, made_of, is_readonly=share.cache_is_readonly, on_lookup=on_lookup)


def _why_none(share: Share) -> str | None:
    if share.cache_origin is Origin.PERSON:
        return unfit(Path(share.cache_path), is_own=False)
    if share.cache_origin is not Origin.HOME:
        # A program's folder is its own affair: it may be there to be read only.
        return None
    if not share.cache_path:
        return f"neither {XDG_CACHE_HOME} nor {HOME} is set"
    if not cpu():
        return "Linux does not tell which processor this is, and another one could find them"
    return unfit(Path(share.cache_path), is_own=True)


def context(share: Share, compiler: Mapping[str, str]) -> str:
    """Return, as a digest, all but the program that a binary depends on."""
    digest = hashlib.sha256()
    # What this package makes of a program before jaxlib compiles it is up to its code.
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    job = [share.replicas, _flags(share.xla_flags), sorted(compiler.items())]
    # Loops are cut for as many threads as there are.
    machine = [share.nproc, len(os.sched_getaffinity(0)), platform.machine(), cpu()]
    digest.update(json.dumps([version("jaxlib"), job, machine]).encode())
    return digest.hexdigest()


def _flags(text: str) -> str:
    """Return XLA's flags, which the variable holds or names a file of.

    Source: SetArgvFromEnv in xla/parse_flags_from_env.cc.
    """
    name = text.strip()
    if not name or name.startswith("-"):
        return text
    try:
        return Path(name).read_text()
    except (OSError, ValueError):
        # XLA cannot read it either, and says so in its own way.
        return text


def cpu(cpuinfo: Path = _CPUINFO) -> str:
    """Return what the first processor is and has, or nothing where Linux does not tell."""
    try:
        first = cpuinfo.read_text().strip().partition("\n\n")[0]
    except OSError:
        return ""
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)


class ProgramCache:
    """Programs by fingerprint. Whatever is wrong with the folder is said once, and no job fails by it.

    Args:
        folder: made when something is to be kept; empty, nothing is kept, found or counted.
        context: what else than the program a binary is made of.
        is_readonly: keep nothing.
        on_lookup: told of each program whether it was there, in the thread that asked.

    Attributes:
        hits: programs that were there, for whichever process of the job looked.
        misses: programs that were not, or could not be used.
    """

    def __init__(
        self,
        folder: str,
        context: str,
        *,
        is_readonly: bool = False,
        on_lookup: Callable[[bool], None] | None = None,
    ) -> None:
        self.hits = self.misses = 0
        self._folder = CacheFolder(Path(folder).absolute()) if folder else None
        self._context = context
        self._is_readonly = is_readonly
        self._on_lookup = on_lookup
        self._lock = threading.Lock()
        self._complained = threading.Lock()

    def __str__(self) -> str:
        where = self._folder.path if self._folder else "none"
        return f"compilation cache: {self.hits} hits, {self.misses} misses ({where})"

    def count(self, *, is_hit: bool) -> None:
        """Count a program that this process needed."""
        if self._folder is None:
            return
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit
        if self._on_lookup is not None:
            self._on_lookup(is_hit)

    def load(self, fingerprint: str, unpack: Callable[[bytes], Executable]) -> Executable | None:
        """Return a program that was kept; None if there is none, or none that can be used.

        Args:
            fingerprint: the program's.
            unpack: makes the program of its file's bytes, or raises.
        """
        if self._folder is None:
            return None
        name = self._name(fingerprint)
        try:
            executable = unpack(self._folder.read(name, is_noted=not self._is_readonly))
        except FileNotFoundError:
            return None
        except Exception as error:
            self._complain(f"cannot use {self._folder.path / name}", error)
            return None
        if executable.fingerprint != fingerprint:
            self._complain(f"cannot use {self._folder.path / name}", ValueError("it holds another program"))
            return None
        return executable

    def save(self, fingerprint: str, pack: Callable[[], bytes], *, is_replaced: bool = True) -> None:
        """Keep a program, whole or not at all.

        Args:
            fingerprint: the program's.
            pack: returns what its file is to hold.
            is_replaced: whether a file that is there already is written anew.
        """
        if self._folder is None or self._is_readonly:
            return
        name = self._name(fingerprint)
        try:
            if is_replaced or not (self._folder.path / name).exists():
                self._folder.write(name, pack())
        except Exception as error:
            self._complain(f"cannot write {self._folder.path / name}", error)

    def _name(self, fingerprint: str) -> str:
        return f"{PREFIX}{hashlib.sha256(f'{self._context} {fingerprint}'.encode()).hexdigest()}"

    def _complain(self, what: str, error: Exception) -> None:
        # Taken and never given back.
        if self._complained.acquire(blocking=False):
            _log.warning("the cache of compiled programs %s, and the job goes on without: %s", what, error)
