"""Which environment variables a process must share with the warm process: those that imports read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyxla.plugin import env as core

# fmt: off
READ_BY_LIBRARIES = (
    "ACC_", "AS_SECURE_", "ATEN_", "CASK_", "COVERAGE_", "COV_CORE_", "CUBLAS", "CUDA_", "DNNL_", "GCS_",
    "GFORTRAN_", "GLIBC_", "GOMP_", "GOTO_", "GRPC_", "INTEL_", "I_MPI_", "JAX_", "KINETO_", "KMP_", "LANG",
    "LC_", "LD_", "LIBNVVM_", "LLVM_", "LOCALTIME", "MALLOC_", "MKL", "MPI", "NCCL_", "NPY_", "NUMPY_",
    "NVRTC_", "NV_", "OMP_", "ONEDNN_", "OPENBLAS_", "OPENSSL_", "PYTHON", "PYTORCH", "TF_", "TORCH",
    "TRITON_", "TZ", "XLA_", "XRT_",
)
# fmt: on
"""Prefixes of the variables that Python, the C library and the libraries of torch, torch_xla, JAX and NumPy
read in C while they start or are imported; and those by which another runtime would be chosen.

Source: a list of their calls of getenv, made with torch 2.9.1, torch_xla 2.9.0 and jax 0.10.2; LD_, GLIBC_
and MALLOC_ are the C library's own.
"""
READ_LATER = frozenset(["XLA_THREAD_POOL_SIZE"])
"""Variables with such a prefix that are read when a device is opened; launches set them for replicas."""


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
        # Copies of all variables read each by its name. In a fork, `polyxla_forked` acts on polyxla's.
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
        for name in super().__iter__():
            self._listed = name
            yield name
        self._listed = None


@contextlib.contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Record which variables Python code reads from `os.environ` meanwhile."""
    environ: Any = os.environ
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
        before: the environment in which the warm process was started.
        after: the same after its imports, which set variables themselves.
        reads: what Python code read meanwhile.
        wanted: the environment of the process to start.
    """
    for name in sorted(relevant(reads, {**before, **wanted})):
        value = wanted.get(name)
        if value not in (before.get(name), after.get(name)):
            return f"{_setting(name, value)} here, {_setting(name, before.get(name))} there"
    for name in sorted(reads.presence):
        if (name in wanted) not in (name in before, name in after):
            return f"{name} is set in one environment, and not in the warm process's"
    return None


def relevant(reads: Reads, environ: Mapping[str, str]) -> set[str]:
    """Return whose values matter: those that were read, and those in `environ` that libraries read."""
    in_c = {name for name in environ if name.startswith(READ_BY_LIBRARIES) and name not in READ_LATER}
    return reads.values | in_c


def _setting(name: str, value: str | None) -> str:
    return f"{name} is not set" if value is None else f"{name}={value}"
