"""The platform that ``--platform`` and ``--plugin-option`` choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyxla import UsageError
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_xrt.config.workers import Worker
from polyxla_xrt.server.worker.platforms import tpu_host
from polyxla_xrt.server.worker.platforms.library import TPU, Library

CPU, CUDA, PLUGIN = "cpu", "cuda", "plugin"


def choose_platform(
    text: str, options: Sequence[str], environ: Mapping[str, str], workers: Sequence[Worker] = ()
) -> Library | None:
    """Return the plugin that has the cores; None for this machine's CPU.

    Args:
        text: the value of ``--platform``.
        options: the values of ``--plugin-option``.
        environ: this process's environment.
        workers: the workers of ``--slice``.

    Raises:
        UsageError: there is no such platform, no such plugin, or no TPU that can be opened here.
    """
    kind, _, path = text.partition("=")
    if kind not in (CPU, TPU, CUDA, PLUGIN) or bool(path) != (kind == PLUGIN):
        raise UsageError(
            f"{text!r} is not a platform",
            where=f"--platform {text}",
            fix="Pass --platform cpu, --platform tpu, --platform cuda, or --platform plugin=PATH with the "
            "library of a PJRT plugin.",
        )
    if workers and kind != TPU:
        raise UsageError(
            "only the workers of TPU hosts form a slice",
            where="--slice",
            fix="Pass --platform tpu, too, or omit it: CPU workers need no list.",
        )
    values = dict(map(_option, options))
    if kind == CPU:
        if options:
            raise UsageError(
                "the CPU platform has no options",
                where=f"--plugin-option {options[0]}",
                fix="Omit it, or pass --platform plugin=PATH.",
            )
        return None
    if kind == TPU:
        return tpu_host.find_library(values, environ, workers)
    if kind == CUDA:
        return Library(_cuda_library(), f"--platform {text}", values, platform=CUDA)
    if not Path(path).is_file():
        raise UsageError(
            f"there is no file {path}",
            where=f"--platform {text}",
            fix="Write the path of a PJRT plugin's library, such as /usr/lib/pjrt_c_api_gpu_plugin.so.",
        )
    return Library(Path(path), f"--platform {text}", values)


def _cuda_library() -> Path:
    from polyxla_bridge import pjrt_plugin

    if library := pjrt_plugin.cuda_library():
        return library
    raise UsageError(
        "XLA's plugin for NVIDIA GPUs is not installed",
        where=f"--platform {CUDA}",
        fix=f"Install it: pip install {pjrt_plugin.CUDA_PACKAGE!r}",
    )


def _option(text: str) -> tuple[str, Option]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise UsageError(
            f"{text!r} is not NAME=VALUE",
            where=f"--plugin-option {text}",
            fix="Write --plugin-option cpu_device_count=8, for example.",
        )
    return name, _value(value)


def _value(text: str) -> Option:
    """Return the integer, boolean or decimal number that a text is, or else the text itself."""
    if text in ("true", "false"):
        return text == "true"
    # The order matters: `float` would also accept every integer.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
