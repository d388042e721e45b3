"""Calling a script's function in another process by multiprocessing's rules, as torch_xla's launch does."""

from __future__ import annotations

import multiprocessing.spawn
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

from polyxla.errors import UsageError

_MAIN = ("init_main_from_path", "init_main_from_name")


@dataclass(frozen=True)
class Call:
    """A call of a function of the main module, made in a replica process.

    The process imports the main module again under another name, so that objects created at import (locks,
    settings, random seeds) exist in every process. Functions of a notebook are pickled by value.

    Attributes:
        call: function, arguments and keyword arguments; pickled if there is a main module to import.
        main: multiprocessing's preparation data, by which the process imports the main module.
    """

    call: Any
    main: dict[str, Any] | None = None

    @classmethod
    def for_new_process(cls, *call: Any) -> Call:
        """Prepare a call for a process that shares nothing with this one."""
        data = multiprocessing.spawn.get_preparation_data("polyxla")
        if not data.keys() & set(_MAIN):
            return cls(call)
        names = (*_MAIN, "sys_argv", "dir", "orig_dir")
        return cls(pickle.dumps(call), {name: data[name] for name in names if name in data})

    def __call__(self, place: Any) -> Any:
        """Make the call in a replica; `place` is ignored."""
        # The first replica of a process imports the main module for all of them.
        with _own.lock:
            if _own.call is None:
                _own.call = self._loaded()
        function, args, kwargs = _own.call
        return function(*args, **kwargs)

    def _loaded(self) -> Any:
        if self.main is None:
            return self.call
        _own.is_importing = True
        multiprocessing.spawn.prepare(self.main)
        _own.is_importing = False
        return pickle.loads(self.call)


def refuse_while_importing(launcher: str) -> None:
    """Refuse to launch while a replica process imports the script, which would launch recursively.

    Raises:
        UsageError: this process is importing the script.
    """
    if _own.is_importing:
        raise UsageError(
            "a replica's process imports the script again, and the script launches replicas again",
            where=launcher,
            fix="Put the launch under: if __name__ == '__main__':",
        )


@dataclass
class _ProcessState:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_importing: bool = False
    call: Any = None


_own = _ProcessState()
