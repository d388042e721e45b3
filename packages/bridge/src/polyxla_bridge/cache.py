"""Compiled programs in a folder, for the jobs that follow.

torch_xla has such a cache (``xr.initialize_cache``), but loads nothing that a plugin made: it warns and asks
for the program again. So the engine keeps its own files in the same folder. Any number of threads,
processes and jobs may share it.

Source: https://github.com/pytorch/xla/issues/9094 (torch_xla asks a function that plugins do not have).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from polyxla_bridge.engine import Executable
from polyxla_bridge.env import Share

_log = logging.getLogger("polyxla.bridge")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)
"""What LLVM goes by when it compiles for "this machine", on x86 and on ARM.
Source: llvm/lib/TargetParser/Host.cpp; the fields, arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c
of Linux."""


def of_job(share: Share, compiler: Mapping[str, str]) -> ProgramCache:
    """Return the cache that the job's environment asks for; it does nothing if that asks for none.

    Args:
        share: of the job.
        compiler: XLA's options that the engine sets itself.
    """
    made_of = context(share, compiler) if share.cache_path else ""
    return ProgramCache(share.cache_path, made_of, is_readonly=share.cache_is_readonly)


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
    is_file = text.strip() and not text.strip().startswith("-") and Path(text.strip()).is_file()
    return Path(text.strip()).read_text() if is_file else text


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
        folder: made when something is to be kept; empty, nothing is kept or found.
        context: what else than the program a binary is made of.
        is_readonly: keep nothing.
    """

    def __init__(self, folder: str, context: str, *, is_readonly: bool = False) -> None:
        self._folder = Path(folder).absolute() if folder else None
        self._context = context
        self._is_readonly = is_readonly
        self._complained = threading.Lock()

    def load(self, fingerprint: str, unpack: Callable[[bytes], Executable]) -> Executable | None:
        """Return a program that was kept; None if there is none, or none that can be used.

        Args:
            fingerprint: the program's.
            unpack: makes the program of its file's bytes, or raises.
        """
        if self._folder is None:
            return None
        path = self._path(self._folder, fingerprint)
        try:
            executable = unpack(path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            self._complain(f"cannot use {path}", error)
            return None
        if executable.fingerprint != fingerprint:
            self._complain(f"cannot use {path}", ValueError("it holds another program"))
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
        path = self._path(self._folder, fingerprint)
        try:
            if is_replaced or not path.exists():
                _write(path, pack())
        except Exception as error:
            self._complain(f"cannot write {path}", error)

    def _path(self, folder: Path, fingerprint: str) -> Path:
        return folder / f"polyxla-{hashlib.sha256(f'{self._context} {fingerprint}'.encode()).hexdigest()}"

    def _complain(self, what: str, error: Exception) -> None:
        # Taken and never given back.
        if self._complained.acquire(blocking=False):
            _log.warning("the cache of compiled programs %s, and the job goes on without: %s", what, error)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not of `tempfile`, whose files nobody else may read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
