"""The rows of ``polyxla env``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyxla import env
from polyxla.env import LaunchSettings, Setting
from polyxla.errors import PolyxlaError
from polyxla.launcher.launch import child_environment, select_devices
from polyxla.plugin_manager import load_everything, load_plugins
from polyxla.selection import discover_all, select


def variables(environ: Mapping[str, str], settings: LaunchSettings) -> list[dict[str, Any]]:
    """Return polyxla's variables, each runtime's and plugin's, and those that replicas would receive."""
    rows = [_row(name, setting, "polyxla") for name, setting in _own(environ, settings).items()]
    for candidate in discover_all(environ):
        if candidate.discovery:
            found = candidate.discovery.variables.items()
            rows += [_row(name, setting, f"runtime {candidate.name}") for name, setting in found]
    listed = {row["name"] for row in rows}
    others = sorted(set().union(*load_everything().hook.polyxla_variables()) - listed)
    rows += [_row(name, env.setting(environ, name, None), "plugins") for name in others]
    return rows + _to_be_set(environ, settings)


def _own(environ: Mapping[str, str], settings: LaunchSettings) -> dict[str, Setting]:
    text = environ.get(env.POLYXLA_COMPILE_CACHE)
    # Set but empty means off here, unlike for all other variables.
    cache = Setting("on", "default") if text is None else Setting(text or "off", "environment")
    return {
        env.POLYXLA_RUNTIME: settings.runtime,
        env.POLYXLA_DEVICES: settings.devices,
        env.POLYXLA_PRECISION: settings.precision,
        **{name: env.setting(environ, name, f"{seconds:g}") for name, seconds in env.DEFAULT_S.items()},
        env.POLYXLA_WAIT_S: settings.wait_s,
        env.POLYXLA_SECRET: env.setting(environ, env.POLYXLA_SECRET, None),
        env.POLYXLA_COMPILE_CACHE: cache,
        env.POLYXLA_RUN: env.setting(environ, env.POLYXLA_RUN, None),
        env.POLYXLA_FULL_TRACEBACK: env.setting(environ, env.POLYXLA_FULL_TRACEBACK, "0"),
    }


def _to_be_set(environ: Mapping[str, str], settings: LaunchSettings) -> list[dict[str, Any]]:
    try:
        selection = select(environ, settings.runtime)
        devices = select_devices(settings.devices, selection)
        wanted = child_environment(load_plugins(selection.runtime), environ, selection, devices)
    except PolyxlaError as error:
        # The listing is used to find such errors, so it shows the error in place of the rows.
        return [_row("(replicas)", Setting(None, f"error: {error}"), "replicas")]
    origin = f"set by runtime {selection.runtime}"
    return [_row(name, Setting(value, origin), "replicas") for name, value in sorted(wanted.items())]


def shown(name: str, value: str) -> str:
    """Return a variable's value as commands print it, whose output is pasted into bug reports."""
    return "(hidden)" if name == env.POLYXLA_SECRET else value


def _row(name: str, setting: Setting, reader: str) -> dict[str, Any]:
    value = None if setting.value is None else shown(name, str(setting.value))
    origin = "environment" if setting.origin == f"{name}={setting.value}" else setting.origin
    return {"name": name, "value": value, "origin": origin, "reader": reader}
