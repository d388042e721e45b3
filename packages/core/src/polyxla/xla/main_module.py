"""Calling a script's function in another process, by multiprocessing's rules, as torch_xla's launch does."""

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
    """A call of a function of the main module, in a replica's process.

    The process imports the main module again under another name, so that what it makes when it is
    imported (locks, settings, random seeds) is made in every process. A notebook's functions go by value.

    Attributes:
        call: function, arguments and named arguments; pickled where there is a main module to import.
        main: what multiprocessing imports that module by.
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
        """Be a replica: make the call, for which every place is alike."""
        # The first of a process's replicas imports for all.
        with _here.lock:
            if _here.call is None:
                _here.call = self._loaded()
        function, args, kwargs = _here.call
        return function(*args, **kwargs)

    def _loaded(self) -> Any:
        if self.main is None:
            return self.call
        _here.is_importing = True
        multiprocessing.spawn.prepare(self.main)
        _here.is_importing = False
        return pickle.loads(self.call)


def refuse_while_importing(launcher: str) -> None:
    """Refuse to launch while a replica's process imports the script: it would launch without end.

    Raises:
        UsageError: that is so.
    """
    if _here.is_importing:
        raise UsageError(
            "a replica's process imports the script again, and the script launches replicas again",
            where=launcher,
            fix="Put the launch under: if __name__ == '__main__':",
        )


@dataclass
class _Here:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_importing: bool = False
    call: Any = None


_here = _Here()
