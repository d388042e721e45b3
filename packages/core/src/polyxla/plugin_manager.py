"""Finding and loading plugins: each runtime separately by its name, all other plugins together.

A runtime is loaded into a manager of its own, so that a broken runtime is reported and the others keep
working.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pluggy

from polyxla import callsite, env, hookspecs
from polyxla.console import say_once
from polyxla.entry_points import entry_points
from polyxla.errors import BrokenPluginError, RuntimeNotInstalledError, UnknownRuntimeError, pip_install

RUNTIMES = "polyxla.runtimes"
"""Entry-point group of runtimes: the entry's name is the runtime's name."""
PLUGINS = "polyxla"
"""Entry-point group of all other plugins."""
HOOKSPECS = "polyxla.hookspecs"
"""Entry-point group of modules with further hook specs; such a module must not import heavy modules."""


KNOWN_RUNTIMES = {"pjrt": "polyxla-runtime-pjrt", "xrt": "polyxla-runtime-xrt"}
"""The distributions of this project's runtimes, for errors about one that is not installed. A third party's
runtime is found by its entry point and needs no row here."""
ASKING = {"PJRT_DEVICE": "pjrt", "XRT_TPU_CONFIG": "xrt"}
"""Variables that ask for one of them. If one is set and the runtime is missing, that is an error."""


PREFIX = "POLYXLA_"
"""Prefix of polyxla's variables. Plugins that use it declare their names by the hook `polyxla_variables`."""


@dataclass(frozen=True)
class RuntimeEntry:
    """An installed runtime, not yet imported."""

    name: str
    points: tuple[importlib.metadata.EntryPoint, ...]

    @property
    def distribution(self) -> str:
        """The distribution that provides it; if there are several, which is an error on use, all of them."""
        return ", ".join(sorted(_distribution(point) for point in self.points))

    @property
    def version(self) -> str | None:
        """The version of its (first) distribution; None if unknown."""
        return self.points[0].dist.version if self.points[0].dist else None

    def load(self) -> Any:
        """Import the runtime's plugin module.

        Raises:
            BrokenPluginError: the import fails, or several distributions provide the runtime.
        """
        if len(self.points) > 1:
            raise BrokenPluginError(
                f"runtime {self.name!r} is provided by more than one distribution: {self.distribution}",
                where=f"entry-point group {RUNTIMES}",
                fix="Uninstall all but one of them.",
            )
        return _import(self.points[0], f"runtime {self.name!r}")


def runtime_entries() -> dict[str, RuntimeEntry]:
    """Return the installed runtimes by name, without importing any."""
    points: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in _entry_points(RUNTIMES):
        points.setdefault(point.name, []).append(point)
    return {name: RuntimeEntry(name, tuple(found)) for name, found in points.items()}


def find_runtime(name: str, origin: str) -> RuntimeEntry:
    """Return the installed runtime called `name`.

    Raises:
        RuntimeNotInstalledError: the runtime is known but not installed.
        UnknownRuntimeError: the runtime is neither installed nor known.
    """
    entries = runtime_entries()
    if name in entries:
        return entries[name]
    installed = ", ".join(entries) or "none"
    if distribution := KNOWN_RUNTIMES.get(name):
        raise RuntimeNotInstalledError(
            f"runtime {name!r} is not installed (installed: {installed})",
            where=origin,
            fix=f"Install it: {pip_install(distribution)}",
        )
    near = difflib.get_close_matches(name.lower(), [*entries, *KNOWN_RUNTIMES], n=1)
    raise UnknownRuntimeError(
        f"no runtime is called {name!r} (installed: {installed})",
        where=origin,
        fix=f"Did you mean {near[0]!r}?" if near else "`polyxla runtimes` lists the installed runtimes.",
    )


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with every installed hook spec. It refuses a plugin that does not match them.

    Raises:
        BrokenPluginError: an installed module of hook specs is broken.
    """

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        # All specs come before the first plugin: each is checked against them when it is registered.
        for point in _entry_points(HOOKSPECS):
            self._add_installed_hookspecs(point)

    def _add_installed_hookspecs(self, point: importlib.metadata.EntryPoint) -> None:
        what = f"the module of hook specs {point.name!r}"
        module = _import(point, what)
        try:
            self.add_hookspecs(module)
        except ValueError as error:
            raise BrokenPluginError(
                f"{what} cannot be used: {error}",
                where=f"{point.value} of {_distribution(point)}",
                fix="Declare at least one hook there, under a name that no other package uses.",
            ) from error

    def register(self, plugin: object, name: str | None = None, where: str | None = None) -> str | None:
        """Register a plugin or a listener and check it against the hook specs.

        A plugin that is refused is not registered.

        Args:
            plugin: a module or an object with hook implementations.
            name: shown in errors, such as ``runtime 'pjrt'``; default: a listener, named by its class.
            where: its origin, shown in errors; default: the module of its class.

        Raises:
            BrokenPluginError: the plugin is registered already, misspells a hook, or takes an argument that
                the hook does not have.
        """
        kind = type(plugin)
        what = name or f"listener {kind.__name__!r}"
        where = where or kind.__module__
        try:
            registered = super().register(plugin, name)
            # Checked with each plugin, so that the error names the one that is wrong.
            self.check_pending()
        except ValueError as error:
            raise BrokenPluginError(
                f"{what} is registered already",
                where=where,
                fix="If two plugins have this name, uninstall one; add each listener only once.",
            ) from error
        except pluggy.PluginValidationError as error:
            # Unregister it, because check_pending would blame every later plugin for its unknown hook.
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise BrokenPluginError(
                f"{what} does not match polyxla's hooks: {_summary(error)}",
                where=where,
                fix=_nearest_hooks(plugin, self._known_hooks()),
            ) from error
        return registered

    def _known_hooks(self) -> list[str]:
        return [name for name, caller in vars(self.hook).items() if caller.has_spec()]


def load_runtime(entry: RuntimeEntry) -> PluginManager:
    """Return a manager with this runtime as its only plugin.

    Raises:
        BrokenPluginError: the runtime, or an installed module of hook specs, is broken.
    """
    manager = PluginManager()
    manager.register(entry.load(), f"runtime {entry.name!r}", entry.distribution)
    return manager


def load_plugins(runtime: str, origin: str = "default") -> PluginManager:
    """Return a manager with the chosen runtime and every installed plugin that is not a runtime.

    A plugin that fails to import is left out and reported once.

    Raises:
        UsageError: the runtime cannot be loaded, or a plugin does not match the hook specs.
    """
    entry = find_runtime(runtime, origin)
    manager = load_runtime(entry)
    # A third party's runtime is not one of our distributions, but its frames are not the user's either.
    callsite.add_runtime(entry.points[0].module)
    for point in _entry_points(PLUGINS):
        what = f"plugin {point.name!r}"
        try:
            plugin = _import(point, what)
        except BrokenPluginError as error:
            # Said once: every replica of this process loads the plugins.
            say_once(f"left out: {error}")
            continue
        manager.register(plugin, what, _distribution(point))
    return manager


def load_everything() -> PluginManager:
    """Return a manager with every plugin that loads, including all runtimes, for the command line.

    Broken plugins are left out silently; ``polyxla runtimes``, or the command that needs one, reports them.

    Raises:
        BrokenPluginError: an installed module of hook specs is broken.
    """
    manager = PluginManager()
    runtimes = runtime_entries().values()
    loads = [(f"runtime {entry.name!r}", entry.distribution, entry.load) for entry in runtimes]
    loads += [
        (f"plugin {point.name!r}", _distribution(point), point.load) for point in _entry_points(PLUGINS)
    ]
    for what, distribution, load in loads:
        # A third-party module may raise anything when it is imported.
        with contextlib.suppress(Exception):
            manager.register(load(), what, distribution)
    return manager


def plugin_problems() -> list[str]:
    """Return one error text for each broken plugin that is not a runtime."""
    try:
        manager = PluginManager()
    except BrokenPluginError as error:
        return [str(error)]
    problems = []
    for point in _entry_points(PLUGINS):
        what = f"plugin {point.name!r}"
        try:
            manager.register(_import(point, what), what, _distribution(point))
        except BrokenPluginError as error:
            problems.append(str(error))
    return problems


def _entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return a group's entry points, sorted. A distribution found twice on the path counts once."""
    # An editable installation may be on the path twice.
    unique = {(point.name, point.value, _distribution(point)): point for point in entry_points(group)}
    return tuple(unique[key] for key in sorted(unique))


def _import(point: importlib.metadata.EntryPoint, what: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise BrokenPluginError(
            f"{what} cannot be imported: {type(error).__name__}: {error}",
            where=f"{point.value} of {_distribution(point)}",
            fix=f"Repair or remove it: pip install --force-reinstall {_distribution(point)}",
        ) from error


def _summary(error: Exception) -> str:
    # The first line of pluggy's text names the hook, the last one the argument.
    first, *rest = str(error).strip().splitlines()
    return f"{first}: {rest[-1]}" if rest else first


def _nearest_hooks(plugin: object, known: Sequence[str]) -> str:
    for name in dir(plugin):
        marked = getattr(getattr(plugin, name, None), f"{hookspecs.PROJECT}_impl", None)
        if marked and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            return f"Did you mean {near[0]!r}?" if near else f"The hooks are: {', '.join(known)}."
    return "Take only arguments that the hook spec has."


@functools.cache
def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown distribution"


def constants(*modules: ModuleType) -> frozenset[str]:
    """Return the names with the prefix that modules define: each constant is spelt as its variable."""
    return frozenset(name for module in modules for name in vars(module) if name.startswith(PREFIX))


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable with the prefix that neither the core nor a plugin declares."""
    known = set(constants(env))
    # A name in lower case is a mistake too: variables are case-sensitive.
    found = {name for name in environ if name.upper().startswith(PREFIX)}
    # Plugins are loaded only if something is left to explain: loading takes time at every start.
    if not found <= known:
        known.update(*load_everything().hook.polyxla_variables())
    return tuple(_warning(name, known) for name in sorted(found - known))


def _warning(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.75)
    advice = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is not a variable of polyxla and has no effect.{advice}"
