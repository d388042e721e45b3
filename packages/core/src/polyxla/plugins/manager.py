"""Finding and loading plugins: runtimes one by one by name, all others together.

A runtime's module is imported only when it is looked at, and alone, so that a broken one can be
reported and the others keep working.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from polyxla import hookspecs
from polyxla.console import say_once
from polyxla.errors import BrokenPluginError, RuntimeNotInstalledError, UnknownRuntimeError

RUNTIMES = "polyxla.runtimes"
"""Entry-point group of runtimes: the entry's name is the runtime's name."""
PLUGINS = "polyxla"
"""Entry-point group of all other plugins."""
HOOKSPECS = "polyxla.hookspecs"
"""Entry-point group of modules with further hook specs; importing one imports nothing heavy."""


@dataclass(frozen=True)
class KnownRuntime:
    """A runtime that may be missing, for the errors of the case that it is.

    Attributes:
        distribution: what to install.
        variables: the variables that ask for it; one of them set and the runtime missing is an error.
    """

    distribution: str
    variables: tuple[str, ...]


KNOWN_RUNTIMES: Mapping[str, KnownRuntime] = {
    "pjrt": KnownRuntime("polyxla-runtime-pjrt", ("PJRT_DEVICE",)),
    "xrt": KnownRuntime("polyxla-runtime-xrt", ("XRT_TPU_CONFIG",)),
}
"""The runtimes of this project. Selection raises if one of their variables is set and the runtime is missing.
Third-party runtimes are found by their entry points and need no row here."""


@dataclass(frozen=True)
class RuntimeEntry:
    """One installed runtime, not yet imported."""

    name: str
    points: tuple[importlib.metadata.EntryPoint, ...]

    @property
    def distribution(self) -> str:
        """The distributions that provide it; more than one is an error on use."""
        return ", ".join(sorted(_distribution(point) for point in self.points))

    @property
    def version(self) -> str | None:
        """The version of the (first) distribution that provides it."""
        return self.points[0].dist.version if self.points[0].dist else None

    def load(self) -> Any:
        """Import the runtime's plugin module.

        Raises:
            BrokenPluginError: the import fails, or several distributions claim the name.
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
    points: dict[str, set[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=RUNTIMES):
        points.setdefault(point.name, set()).add(point)
    return {name: RuntimeEntry(name, _distinct(found)) for name, found in sorted(points.items())}


def find_runtime(name: str, origin: str) -> RuntimeEntry:
    """Return the installed runtime called `name`.

    Raises:
        RuntimeNotInstalledError: it is a known one that is not installed.
        UnknownRuntimeError: nobody knows it.
    """
    entries = runtime_entries()
    if name in entries:
        return entries[name]
    installed = ", ".join(entries) or "none"
    if known := KNOWN_RUNTIMES.get(name):
        raise RuntimeNotInstalledError(
            f"runtime {name!r} is not installed (installed: {installed})",
            where=origin,
            fix=f"Install it: pip install {known.distribution}",
        )
    near = difflib.get_close_matches(name.lower(), [*entries, *KNOWN_RUNTIMES], n=1)
    raise UnknownRuntimeError(
        f"no runtime is called {name!r} (installed: {installed})",
        where=origin,
        fix=f"Did you mean {near[0]!r}?" if near else "`polyxla runtimes` lists those that exist.",
    )


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with polyxla's hook specs; a plugin that does not fit them is an error at once."""

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        for point in _distinct(importlib.metadata.entry_points(group=HOOKSPECS)):
            self.add_hookspecs(_import(point, f"hook specs {point.name!r}"))

    def register(self, plugin: object, name: str | None = None, where: str | None = None) -> str | None:
        """Register a plugin or a listener and check it against the hook specs.

        Args:
            plugin: a module or an object with hook implementations.
            name: shown in errors, such as ``runtime 'pjrt'``; default: a listener, named by its class.
            where: where it comes from, shown in errors; default: the module of its class.

        Raises:
            BrokenPluginError: it is registered already, misspells a hook, or asks for an argument that the
                hook does not have.
        """
        kind = type(plugin)
        what = name or f"listener {kind.__name__!r}"
        where = where or kind.__module__
        try:
            registered = super().register(plugin, name)
            self.check_pending()
        except ValueError as error:
            raise BrokenPluginError(
                f"{what} is registered already",
                where=where,
                fix="Of two plugins with one name, uninstall one; add a listener once only.",
            ) from error
        except pluggy.PluginValidationError as error:
            raise BrokenPluginError(
                f"{what} does not match polyxla's hooks: {_essence(error)}",
                where=where,
                fix=_nearest_hooks(plugin, self._known_hooks()),
            ) from error
        return registered

    def _known_hooks(self) -> list[str]:
        return [name for name, caller in vars(self.hook).items() if caller.has_spec()]


def load_runtime(entry: RuntimeEntry) -> PluginManager:
    """Return a manager with this runtime and nothing else, to ask it questions."""
    manager = PluginManager()
    manager.register(entry.load(), f"runtime {entry.name!r}", entry.distribution)
    return manager


def load_plugins(runtime: str, origin: str = "default") -> PluginManager:
    """Return a manager with the chosen runtime and every installed plugin that is not a runtime.

    Raises:
        UsageError: the runtime cannot be loaded, or a plugin misspells a hook.
    """
    manager = load_runtime(find_runtime(runtime, origin))
    _register_others(manager)
    return manager


def load_everything() -> PluginManager:
    """Return a manager with every plugin that loads, all runtimes too, for the command line.

    Broken ones are passed over in silence: ``polyxla runtimes``, or the command that needs one, tells.
    """
    manager = PluginManager()
    runtimes = runtime_entries().values()
    loads = [(f"runtime {entry.name!r}", entry.distribution, entry.load) for entry in runtimes]
    loads += [(f"plugin {point.name!r}", _distribution(point), point.load) for point in _plugin_points()]
    for what, distribution, load in loads:
        # Whatever importing a stranger's module may raise.
        with contextlib.suppress(Exception):
            manager.register(load(), what, distribution)
    return manager


def plugin_problems() -> list[str]:
    """Return why each installed plugin that is not a runtime and does not work does not."""
    manager, problems = PluginManager(), []
    for point in _plugin_points():
        what = f"plugin {point.name!r}"
        try:
            manager.register(_import(point, what), what, _distribution(point))
        except BrokenPluginError as error:
            problems.append(str(error))
            # The old one would blame every later plugin for this one's pending hook.
            manager = PluginManager()
    return problems


def _register_others(manager: PluginManager) -> None:
    """Register the plugins that are not runtimes; one that cannot be imported is left out, and said."""
    for point in _plugin_points():
        what = f"plugin {point.name!r}"
        try:
            plugin = _import(point, what)
        except BrokenPluginError as error:
            # Once, because every replica loads the plugins for itself.
            say_once(f"left out: {error}")
            continue
        manager.register(plugin, what, _distribution(point))


def _plugin_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return _distinct(importlib.metadata.entry_points(group=PLUGINS))


def _import(point: importlib.metadata.EntryPoint, what: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise BrokenPluginError(
            f"{what} cannot be imported: {type(error).__name__}: {error}",
            where=f"{point.value} of {_distribution(point)}",
            fix=f"Repair or remove it: pip install --force-reinstall {_distribution(point)}",
        ) from error


def _essence(error: Exception) -> str:
    # Of pluggy's several lines, the first names the hook and the last the argument.
    first, *rest = str(error).strip().splitlines()
    return f"{first}: {rest[-1]}" if rest else first


def _nearest_hooks(plugin: object, known: Sequence[str]) -> str:
    for name in dir(plugin):
        marked = getattr(getattr(plugin, name, None), f"{hookspecs.PROJECT}_impl", None)
        if marked and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            return f"Did you mean {near[0]!r}?" if near else f"The hooks are: {', '.join(known)}."
    return "Its arguments must be among those of the hook's spec."


def _distinct(
    points: Iterable[importlib.metadata.EntryPoint],
) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Drop repeats: a distribution found twice on the path lists its entry points twice."""
    unique = {(point.name, point.value, _distribution(point)): point for point in points}
    return tuple(unique[key] for key in sorted(unique))


@functools.cache
def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown distribution"
