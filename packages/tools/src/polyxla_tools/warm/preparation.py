"""What a warm process has imported, whether a request fits to it, and how it is started."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyxla import PolyxlaError
from polyxla.plugin import env, fork_server, load_plugins, remove_remote_modules
from polyxla_tools.warm import imports
from polyxla_tools.warm.facts import surroundings, unreachable
from polyxla_tools.warm.sockets import Message

READY_TIMEOUT_S = 300.0
"""Longest wait for a new warm process, which imports all modules, in seconds."""
_MAIN = "from polyxla_tools.warm.server import main; main()"


class NotReadyError(PolyxlaError):
    """The warm process could not be prepared."""


@dataclass(frozen=True)
class Options:
    """What a warm process is to prepare. It is sent as JSON.

    Attributes:
        runtime: the runtime's name.
        modules: names of the modules to import, beside the plugins.
        idle_s: time without a running job after which it ends, in seconds.
        ready: descriptor to which it writes that it is ready, or why not; -1 for none.
    """

    runtime: str
    modules: tuple[str, ...]
    idle_s: float
    ready: int = -1


def spawn(options: Options, environ: Mapping[str, str], directory: str) -> subprocess.Popen[bytes]:
    """Start a warm process in a session of its own, without a terminal."""
    command = [sys.executable, "-c", _MAIN, json.dumps(asdict(options))]
    nothing = subprocess.DEVNULL
    # The descriptor is given to the child by number; without pass_fds it would be closed.
    passed = [options.ready] if options.ready >= 0 else []
    return subprocess.Popen(
        command,
        env=dict(environ),
        cwd=directory,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        pass_fds=passed,
        # It outlives the terminal, and must not receive its Ctrl-C.
        start_new_session=True,
    )


def start(options: Options, environ: Mapping[str, str]) -> int:
    """Start a warm process and wait until it is ready; return its process id.

    Raises:
        NotReadyError: it cannot be prepared, or took longer than `READY_TIMEOUT_S`.
    """
    ours, theirs = os.pipe()
    try:
        options = Options(options.runtime, options.modules, options.idle_s, theirs)
        process = spawn(options, environ, str(env.working_directory()))
    finally:
        # Only the child holds this end now: reading ends when the child does.
        os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as ready, _killed_unless_ready(process):
        if not select.select([ready], [], [], READY_TIMEOUT_S)[0]:
            raise NotReadyError(f"the warm process was not ready within {READY_TIMEOUT_S:g} s")
        answer: dict[str, Any] = json.loads(ready.read() or "{}")
        if "pid" in answer:
            # It outlives this process: with an exit code set, Popen does not warn about a running child.
            process.returncode = 0
            return process.pid
        problem = answer.get("problem", f"it ended while it imported {', '.join(options.modules)}")
        raise NotReadyError(f"no warm process could be prepared: {problem}")


@contextlib.contextmanager
def _killed_unless_ready(process: subprocess.Popen[bytes]) -> Any:
    try:
        yield
    except BaseException:
        # This includes Ctrl-C: a process that was not reported would stay until it is idle.
        process.kill()
        process.wait()
        raise


@dataclass(frozen=True)
class Preparation:
    """The state of the warm process after its imports.

    Attributes:
        runtime: the runtime's name.
        before: the environment before the imports.
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
    imported: imports.ImportedFiles

    @property
    def adapt(self) -> Callable[[dict[str, str]], dict[str, str]]:
        """The function that adds what the imports have set to a process's environment."""
        return functools.partial(fork_server.merged, self.before, self.after)

    def change(self) -> str | None:
        """Describe the first change of what was imported; None if it is all as it was."""
        return self.imported.change()

    def variables(self) -> dict[str, str]:
        """Return the variables before the imports that decide whether a request fits."""
        names = imports.relevant(self.reads, self.before)
        return {name: self.before[name] for name in sorted(names) if name in self.before}

    def misfit(self, request: Message) -> str | None:
        """Describe why a process of `request` cannot be a fork of this one; None if it can."""
        # Read again each time: others can change this process's control group, affinity or priority.
        for name, value in json.loads(json.dumps(surroundings())).items():
            if request["surroundings"].get(name) != value:
                return f"not the same {name} as the warm process"
        runtime = request["environ"].get(env.POLYXLA_RUNTIME) or self.runtime
        if runtime != self.runtime:
            return f"it is for runtime {self.runtime!r}, not {runtime!r}"
        # An import after the fork would start cold what the user expects to be warm.
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
        # `in` consumes the generator: the entries must come in this order, with others between.
        if not all(entry in wanted for entry in self.path):
            return "the module search path is not that of the warm process"
        first, *others = request["own_path"] or [""]
        for entry in [first, *(entry for entry in others if entry not in self.path)]:
            if entry and (found := imports.shadowed(os.path.join(directory, entry))):
                return f"{found} would be imported in place of a module of the warm process"
        return None


def prepare(options: Options) -> Preparation:
    """Import the modules of a runtime, and all plugins.

    Raises:
        NotReadyError: importing has started threads, which a fork would not have.
        Exception: what an import raised.
    """
    if not sys.flags.safe_path:
        # The first entry is the directory in which `polyxla warm on` ran; programs have their own there.
        del sys.path[0]
    before, path = env.snapshot(), tuple(dict.fromkeys(sys.path))
    with imports.recorded_reads() as reads:
        for name in options.modules:
            importlib.import_module(name)
        load_plugins(options.runtime)
    remove_remote_modules()
    _refuse_threads()
    imported = imports.ImportedFiles(path)
    return Preparation(options.runtime, before, env.snapshot(), reads, path, imported)


def _refuse_threads() -> None:
    """Check that nothing runs here beside this thread.

    Raises:
        NotReadyError: something does.
    """
    # Fork first: libraries such as OpenBLAS end their threads before a fork, and start them again on demand.
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
