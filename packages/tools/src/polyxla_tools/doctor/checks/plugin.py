"""The PJRT plugin on whose devices the bridge computes, and the GPUs for that of CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from polyxla.plugin import POLYXLA_PJRT_PLUGIN
from polyxla_tools.doctor.facts.host import HostFacts
from polyxla_tools.doctor.findings import Finding, counted, ok, problem

LIBTPU, CUDA = "libtpu", "cuda"
"""Names of plugins. Source: ``polyxla_bridge.pjrt_plugin``, which need not be installed to look for them."""
_SUBJECT = "plugin"


def check_plugin(environ: Mapping[str, str], host: HostFacts) -> list[Finding]:
    """Check that the plugin that the environment names can be opened; nothing if it names none."""
    named = environ.get(POLYXLA_PJRT_PLUGIN)
    where = f"{POLYXLA_PJRT_PLUGIN}={named}"
    if not named:
        return []
    if importlib.util.find_spec("polyxla_bridge") is None:
        return [problem(_SUBJECT, f"{where} needs polyxla-bridge, which is not installed", "Install it.")]
    if named == CUDA:
        return [_check_gpus(where, host)]
    if named != LIBTPU and not Path(named).is_file():
        fix = f"Write the path of a PJRT plugin's library, {CUDA} or {LIBTPU}."
        return [problem(_SUBJECT, f"{where} is no file", fix)]
    return [ok(_SUBJECT, where)]


def _check_gpus(where: str, host: HostFacts) -> Finding:
    from polyxla_bridge import pjrt_plugin

    library = pjrt_plugin.cuda_library()
    if library is None:
        fix = f"Install it: pip install {pjrt_plugin.CUDA_PACKAGE!r}"
        return problem(_SUBJECT, f"{where}, and XLA's plugin for NVIDIA GPUs is not installed", fix)
    if not host.gpus:
        fix = "Install NVIDIA's driver; in a container, pass --gpus all."
        return problem(_SUBJECT, f"{where}, and NVIDIA's driver lists no GPU", fix)
    kinds = ", ".join(sorted(set(host.gpus)))
    gpus = f"{counted(len(host.gpus), 'GPU')} ({kinds}), driver {host.nvidia_driver}"
    return ok(_SUBJECT, f"{where}: {library.parent.name}, {gpus}")
