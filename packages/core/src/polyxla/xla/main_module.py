"""Calling a script's function in another process by multiprocessing's rules, as torch_xla's launch does."""

from __future__ import annotations

import linecache
import multiprocessing.spawn
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyxla.errors import UsageError

_MAIN = ("init_main_from_path", "init_main_from_name")


@dataclass(frozen=True)
class MainModuleCall:
    """A call of a function of the main module, made in a replica process.

    The process imports the main module again under another name, so that objects created at import (locks,
    settings, random seeds) exist in every process. It does so when it unpickles the call, before it opens a
    device, because the module may register plugins.

    Attributes:
        call: the call.
        pickled: the same, pickled for a process that has imported the main module.
        main: multiprocessing's preparation data, by which the process imports the main module.
        replicas: number of replicas of the launch, which the main module may ask for.
    """

    call: Callable[[], Any]
    pickled: bytes
    main: dict[str, Any]
    replicas: int

    def __call__(self) -> Any:
        """Make the call."""
        return self.call()

    def __reduce__(self) -> tuple[Any, ...]:
        """Import the main module where the call is unpickled, which is then the call alone."""
        return _loaded, (self.pickled, self.main, self.replicas)


def for_new_process(call: Callable[[], Any], replicas: int) -> Callable[[], Any]:
    """Prepare a call for a process that shares nothing with this one.

    A notebook has no main module to import: its functions are pickled by value.
    """
    data = multiprocessing.spawn.get_preparation_data("polyxla")
    if not data.keys() & set(_MAIN):
        return call
    names = (*_MAIN, "sys_argv", "dir", "orig_dir")
    main = {name: data[name] for name in names if name in data}
    return MainModuleCall(call, pickle.dumps(call), main, replicas)


def _loaded(pickled: bytes, main: dict[str, Any], replicas: int) -> Any:
    # While it is set, a launch in the script is refused, and world sizes are those of the launch.
    importing.append(replicas)
    try:
        multiprocessing.spawn.prepare(main)
        return pickle.loads(pickled)
    finally:
        importing.clear()


def refuse_while_importing(launcher: str) -> None:
    """Refuse to launch while a replica process imports the script, which would launch recursively.

    Raises:
        UsageError: this process is importing the script.
    """
    if importing:
        raise UsageError(
            "a replica's process imports the script again, and the script launches replicas again",
            where=launcher,
            fix="Put the launch under: if __name__ == '__main__':",
        )


def may_launch() -> bool:
    """Return whether the script has the call of a launch; True if there is no script, as in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is None or bool(re.search(r"\b(launch|spawn|Trainer)\(", "".join(linecache.getlines(path))))


importing: list[int] = []
"""The number of replicas while this process imports the script; empty at other times."""
