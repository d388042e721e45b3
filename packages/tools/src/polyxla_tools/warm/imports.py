"""What the warm process has imported: the files, and the variables that imports read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyxla.plugin import TPU_LIBRARY_PATH
from polyxla.plugin import env as core

# fmt: off
READ_BY_LIBRARIES = (
    "ACC_", "AS_SECURE_", "ATEN_", "CASK_", "COVERAGE_", "COV_CORE_", "CUBLAS", "CUDA_", "DNNL_", "GCS_",
    "GFORTRAN_", "GLIBC_", "GOMP_", "GOTO_", "GRPC_", "INTEL_", "I_MPI_", "JAX_", "KINETO_", "KMP_", "LANG",
    "LC_", "LD_", "LIBNVVM_", "LLVM_", "LOCALTIME", "MALLOC_", "MKL", "MPI", "NCCL_", "NPY_", "NUMPY_",
    "NVRTC_", "NV_", "OMP_", "ONEDNN_", "OPENBLAS_", "OPENSSL_", "PYTHON", "PYTORCH", "TF_", "TORCH",
    "TRITON_", "TZ", "XLA_",
)
# fmt: on
"""Prefixes of the variables that Python, the C library and the libraries of torch, torch_xla, JAX and NumPy
read in C while they start or are imported.

Source: a list of their calls of getenv, made with torch 2.9.1, torch_xla 2.9.0 and jax 0.10.2; LD_, GLIBC_
and MALLOC_ are the C library's own.
"""
# fmt: off
READ_LATER = (
    "TORCH_TPU_BASE_PORT", "TORCH_TPU_DEVICES_PER_HOST", "TORCH_TPU_INTERNAL_HANDSHAKE_PORT",
    "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID",
    "XLA_DENSE_GATHER_FACTOR", "XLA_DENSE_SCATTER_FACTOR", "XLA_THREAD_POOL_SIZE",
)
# fmt: on
"""Variables that count when a device is opened, and not before. TorchTPU's import reads others, such
as TORCH_TPU_LAUNCH_BLOCKING.

polyxla sets them for programs and replicas. `Reads` still finds what Python code reads during the imports.
"""
SET_BY_PROGRAMS = frozenset(["KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTORCH_NVML_BASED_CUDA_CHECK"])
"""Variables that scikit-learn and Lightning set when a program imports them, before it launches replicas.

The first two are for Intel's OpenMP, which none of the imports loads; the third is for `torch.cuda`.
"""
_IMPORTABLE = (".py", ".so", ".pth", ".egg-link")
_METADATA = (".dist-info", ".egg-info")
Stamp = tuple[int, int, int]
"""A file's time of modification in nanoseconds, size and inode; an upgrade by a link changes the last."""


@dataclass
class Reads:
    """Names of the variables that Python code has read: their values, or only whether they are set."""

    values: set[str] = field(default_factory=set)
    presence: set[str] = field(default_factory=set)


class _Recorder(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001
    """`os.environ` that records which variables are read by name, and not by a copy of all."""

    reads: Reads
    _listed: str | None

    def __getitem__(self, name: str) -> str:
        # A copy of the environment reads each variable by name, but decides nothing. polyxla's own reads are
        # made again in a fork, by the hook `polyxla_forked`.
        is_copy = sys._getframe(1).f_globals is vars(core) or sys._getframe(2).f_globals is vars(core)
        if name != self._listed and not is_copy:
            self.reads.values.add(name)
        self._listed = None
        value: str = super().__getitem__(name)
        return value

    def __contains__(self, name: object) -> bool:
        self.reads.presence.add(str(name))
        return self.encodekey(name) in self._data  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        # Copies such as `dict(os.environ)` read each name right after it is listed, which decides nothing.
        for name in super().__iter__():
            self._listed = name
            yield name
        self._listed = None


@contextlib.contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Record which variables Python code reads from `os.environ` in the block."""
    environ: Any = os.environ  # noqa: TID251
    # Modules have bound `os.environ` itself, so replacing the object would miss their reads.
    plain, environ.__class__ = environ.__class__, _Recorder
    environ.reads, environ._listed = Reads(), None  # noqa: SLF001
    try:
        yield environ.reads
    finally:
        environ.__class__ = plain
        del environ.reads, environ._listed  # noqa: SLF001


def difference(
    before: Mapping[str, str], after: Mapping[str, str], reads: Reads, wanted: Mapping[str, str]
) -> str | None:
    """Describe the first variable in which `wanted` differs from the warm process's; None if none does.

    Args:
        before: the environment before the warm process's imports.
        after: the environment after its imports, which set variables themselves.
        reads: what Python code read during the imports.
        wanted: the environment of the process to start.
    """
    for name in sorted(relevant(reads, {**before, **wanted})):
        value = wanted.get(name)
        if value not in (before.get(name), after.get(name)):
            return f"{_setting(name, value)} here, {_setting(name, before.get(name))} there"
    for name in sorted(reads.presence - _opened_later()):
        # Imports may have set the variable themselves: both states are those of a warm process.
        if (name in wanted) not in (name in before, name in after):
            return f"{name} is set in one environment, and not in the warm process's"
    return None


def relevant(reads: Reads, environ: Mapping[str, str]) -> set[str]:
    """Return the variables that matter: Python code has read them, or libraries may read them."""
    in_c = {
        name for name in environ if name.startswith(READ_BY_LIBRARIES) and not name.startswith(READ_LATER)
    }
    return (reads.values | in_c) - SET_BY_PROGRAMS - _opened_later()


def _opened_later() -> set[str]:
    """Return the variable of the TPU's library, unless TorchTPU has opened the library by its import.

    torch_xla opens it with a device. Its import only asks whether the variable is set, which the hook
    `polyxla_forked` repeats.
    """
    return set() if "torch_tpu" in sys.modules else {TPU_LIBRARY_PATH}


def _setting(name: str, value: str | None) -> str:
    return f"{name} is not set" if value is None else f"{name}={value}"


class ImportedFiles:
    """The files of everything that this process has imported or mapped, as they were.

    Args:
        path: the entries of `sys.path` that every program has; a package installed there makes it stale.
    """

    def __init__(self, path: Sequence[str]) -> None:
        found = {*_module_files(), *_mapped_files(), *_interpreter_files()}
        # torch imports a generated module from a temporary directory, which the first program to end removes.
        written = {entry for entry in sys.path if entry not in path}
        self._files = {name: _stamp(name) for name in found if os.path.dirname(name) not in written}
        self._directories = {name: (_stamp(name), _listing(name)) for name in path}

    def change(self) -> str | None:
        """Describe the first change; None if there is none. Takes some 20 ms for torch and torch_xla."""
        for name, stamp in self._files.items():
            if _stamp(name) != stamp:
                return f"{name} has changed"
        for name, (stamp, listing) in self._directories.items():
            # A directory's time also changes with files that are not modules.
            if _stamp(name) != stamp and _listing(name) != listing:
                return f"what is installed in {name} has changed"
        return None


def shadowed(directory: str) -> str | None:
    """Return a module that a program in `directory` would import from there, but was imported elsewhere."""
    # sys.modules may have a link's path, and the program's directory another link's.
    here = os.path.realpath(directory)
    tops = {name: module for name, module in list(sys.modules.items()) if "." not in name}
    for found in _listing(here):
        name = found[0].partition(".")[0]
        file = getattr(tops.get(name), "__file__", None)
        if file and name != "__main__" and not os.path.realpath(file).startswith(os.path.join(here, name)):
            return os.path.join(here, found[0])
    return None


def _module_files() -> Iterable[str]:
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [os.path.abspath(name) for name in found if isinstance(name, str)]


def _mapped_files() -> Iterable[str]:
    """Return the shared libraries, which only the kernel knows."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    names = (parts[5] for parts in fields if len(parts) == 6)
    return [name for name in names if name.startswith("/") and not name.endswith(" (deleted)")]


def _interpreter_files() -> Iterable[str]:
    return [os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")]


def _stamp(name: str) -> Stamp | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _listing(directory: str) -> list[tuple[str, int]]:
    """Return what can be imported from a directory, and the installed distributions with their times."""
    try:
        with os.scandir(directory) as entries:
            return sorted(found for entry in entries if (found := _importable(entry)))
    except OSError:
        return []


def _importable(entry: os.DirEntry[str]) -> tuple[str, int] | None:
    if entry.name.endswith(_METADATA) or entry.name.endswith(".pth"):
        return entry.name, entry.stat().st_mtime_ns
    # A directory without `__init__.py` is most likely data, although Python could import it as a namespace.
    is_package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
    return (entry.name, 0) if is_package or entry.name.endswith(_IMPORTABLE) else None
