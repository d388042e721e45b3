"""``python -m polyxla.cli.script``: run a program as python would, but print polyxla's errors plainly.

A `polyxla.PolyxlaError` ends the program with the error's text, the script's line and the error's exit code,
Ctrl-C with one line. For any other exception, the program's own frames are printed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, NoReturn

from polyxla import env, xla
from polyxla.console import end_interrupted, say, say_once
from polyxla.errors import PolyxlaError, UsageError
from polyxla.launcher.launch import select_devices
from polyxla.launcher.messages import RemoteTraceback
from polyxla.plugin_manager import find_runtime, load_runtime
from polyxla.selection import Selection, prepare_selection, select
from polyxla.tracebacks import fold


def main() -> None:
    """Run the script or ``-m`` module that the arguments name, as the module ``__main__``."""
    own = sys.modules["__main__"]
    try:
        # `polyxla run` blocked Ctrl-C, because only from here on it is reported in one line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        asked = _prepare()
        try:
            run(sys.argv[1:])
        except SystemExit as end:
            # A program that ends with sys.exit(0) may still have forgotten to launch, so it reaches the check
            # below.
            if end.code:
                raise
        if asked > 1 and not xla.has_run():
            say(
                f"{asked} replicas were asked for, but the program ended without launching any. Launch them "
                "in it (polyxla.launch, torch_xla.launch), or run the program in each: polyxla run --each."
            )
    except KeyboardInterrupt:
        end_interrupted()
    except Exception as error:
        program = sys.modules["__main__"]
        fail(error, None if program is own else getattr(program, "__file__", None))


def fail(error: Exception, path: str | None = None) -> NoReturn:
    """End the program after an exception: print polyxla's own on one line, with its line in `path`."""
    if isinstance(error, PolyxlaError):
        say(f"error: {error}{_line_of(error, path)}")
        sys.exit(error.exit_code)
    # This module is called __main__ in this process, as the program is.
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    fold(error)
    if sys.excepthook is sys.__excepthook__ and isinstance(error.__cause__, RemoteTraceback):
        # This process has only waited: the replica's traceback is the one that explains.
        sys.stderr.write(str(error.__cause__).lstrip())
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def run(program: Sequence[str]) -> None:
    """Run a script, or ``-m`` and a module, with its arguments, as this process's module ``__main__``."""
    sys.argv[:] = program
    module = ModuleType("__main__")
    # It stays there after the program's end: threads and spawned workers look up their functions in it.
    sys.modules["__main__"] = module
    code = _module(module) if sys.argv[0] == "-m" else _script(module, sys.argv[0])
    # exec, not runpy: runpy removes the module from sys.modules when the program ends.
    exec(code, module.__dict__)


def _prepare() -> int:
    """Prepare launches, and return how many replicas the user asked for."""
    environ = env.snapshot()
    if runtime := environ.get(env.POLYXLA_RUNTIME):
        selection = _prepare_launch(environ, runtime)
        # `polyxla run` has printed these warnings. Say them to nobody, so that the launch does not repeat
        # them.
        with contextlib.redirect_stderr(io.StringIO()):
            for warning in selection.warnings:
                say_once(warning)
    # `polyxla run` writes every request as indices. Without a request, one device may be meant.
    asked = environ.get(env.POLYXLA_DEVICES, "")
    return len(json.loads(asked)) if asked.startswith("[") else 0


def _prepare_launch(environ: Mapping[str, str], runtime: str) -> Selection:
    """Let the runtime prepare a launch in the background, and keep its discovery for the first one."""
    settings = env.from_environ(environ)
    selection = select(environ, settings.runtime)
    prepare_selection(environ, selection)
    load_runtime(find_runtime(runtime, "default")).hook.polyxla_prepare(
        environ=environ,
        discovery=selection.discovery,
        devices=select_devices(settings.devices, selection),
    )
    return selection


def _replace_first_path(folder: str) -> None:
    """Replace the path entry that ``python -m polyxla.cli.script`` added; under safe_path it added none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _script(module: ModuleType, path: str) -> CodeType:
    # Absolute, as python makes it: the script may change the working directory.
    path = os.path.abspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    module.__file__ = path
    # Compiled from bytes, so that an encoding declaration counts.
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return loader.source_to_code(loader.get_data(path), path)


def _module(module: ModuleType) -> CodeType:
    del sys.argv[0]
    name = sys.argv[0]
    _replace_first_path(str(env.working_directory()))
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec(name)
    loader: Any = spec.loader if spec else None
    code: CodeType | None = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise UsageError(
            f"there is no module {name!r} that can be run",
            where="polyxla run -m",
            fix="Write the name of a module, or of a package that has a __main__.py.",
        )
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
    module.__loader__ = spec.loader
    sys.argv[0] = spec.origin or name
    return code


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The parent is missing or not a package. An import that fails inside the parent is another error.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _line_of(error: BaseException, path: str | None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"\n  at {path}:{lines[-1]}" if lines else ""


if __name__ == "__main__":
    main()
