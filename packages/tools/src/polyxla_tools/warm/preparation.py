"""What a warm process has imported, and whether a request fits to it."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyxla.plugin import env, fork_server, load_plugins, remove_remote_modules
from polyxla_tools.warm import env as imports
from polyxla_tools.warm import files
from polyxla_tools.warm.facts import surroundings, unreachable
from polyxla_tools.warm.messages import Message
from polyxla_tools.warm.starting import NotReadyError, Options


@dataclass(frozen=True)
class Preparation:
    """The state of the warm process after its imports.

    Attributes:
        runtime: the runtime's name.
        before: the environment in which it was started.
        after: the environment after the imports.
        reads: the variables that Python code read during the imports.
        path: entries of `sys.path` that every program has.
        imported: the files that were imported.
    """

    runtime: str
    before: dict[str, str]
    after: dict[str, str]
    reads: imports.Reads
    path: tuple[str, ...]
    imported: files.ImportedFiles

    @property
    def adapt(self) -> Callable[[dict[str, str]], dict[str, str]]:
        """The function that adds what the imports have set to a process's environment."""
        return functools.partial(fork_server.merged, self.before, self.after)

    def change(self) -> str | None:
        """Describe the first change of what was imported; None if it is all as it was."""
        return self.imported.change()

    def variables(self) -> dict[str, str]:
        """Return those variables, of the environment in which it was started, that matter."""
        names = imports.relevant(self.reads, self.before)
        return {name: self.before[name] for name in sorted(names) if name in self.before}

    def misfit(self, request: Message) -> str | None:
        """Describe why a process of `request` cannot be a fork of this one; None if it can."""
        # They can be changed from outside: another control group, affinity or priority.
        for name, value in json.loads(json.dumps(surroundings())).items():
            if request["surroundings"].get(name) != value:
                return f"not the same {name} as the warm process"
        runtime = request["environ"].get(env.POLYXLA_RUNTIME) or self.runtime
        if runtime != self.runtime:
            return f"it is for runtime {self.runtime!r}, not {runtime!r}"
        if missing := [name for name in request["preload"] if name not in sys.modules]:
            return f"it has not imported {', '.join(missing)}"
        return (
            imports.difference(self.before, self.after, self.reads, request["environ"])
            or unreachable(request["state"])
            or self._other_path(request)
        )

    def _other_path(self, request: Message) -> str | None:
        directory = request["state"]["directory"]
        wanted = (os.path.join(directory, entry) for entry in request["path"])
        # In this order, with others between.
        if not all(entry in wanted for entry in self.path):
            return "the module search path is not that of the warm process"
        first, *others = request["own_path"] or [""]
        for entry in [first, *(entry for entry in others if entry not in self.path)]:
            if entry and (found := files.shadowed(os.path.join(directory, entry))):
                return f"{found} would be imported in place of a module of the warm process"
        return None


def prepare(options: Options) -> Preparation:
    """Import the modules of a runtime, and all plugins.

    Raises:
        NotReadyError: importing has started threads, which a fork would not have.
        Exception: what an import raised.
    """
    if not sys.flags.safe_path:
        # The directory in which it was started is not every program's.
        del sys.path[0]
    before, path = env.snapshot(), tuple(dict.fromkeys(sys.path))
    with imports.recorded_reads() as reads:
        for name in options.modules:
            importlib.import_module(name)
        load_plugins(options.runtime)
    remove_remote_modules()
    _refuse_threads()
    imported = files.ImportedFiles(path)
    return Preparation(options.runtime, before, env.snapshot(), reads, path, imported)


def _refuse_threads() -> None:
    """Check that nothing runs here beside this thread.

    Raises:
        NotReadyError: something does.
    """
    # Libraries such as OpenBLAS end their threads before a fork, and start them again when they need them.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = [path for path in Path("/proc/self/task").iterdir() if path.name != str(os.getpid())]
    if tasks:
        names = ", ".join(sorted((path / "comm").read_text().strip() for path in tasks))
        raise NotReadyError(
            f"importing has started {len(tasks)} thread(s) ({names}), which a fork would not have; "
            "launches start cold"
        )
