"""Tracebacks without the frames of polyxla, its plugins and torch_xla's launch: the user's frames remain."""

from __future__ import annotations

import signal
import socket
from types import FrameType, TracebackType
from typing import NoReturn

from polyxla import env
from polyxla.callsite import is_polyxlas, raised_at
from polyxla.errors import PolyxlaError, ReplicaLostError

_LAUNCH_MODULES = frozenset({"torch_xla._internal.pjrt", "torch_xla.distributed.xla_multiprocessing"})
_LAUNCH = ("torch_xla.torch_xla", "launch")
HINT = f"{env.POLYXLA_FULL_TRACEBACK}=1 shows polyxla's frames too"
"""Says how to see the frames that are left out."""


class Folded:
    """A context that folds the traceback of an exception that leaves it; callers' frames follow later."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Fold the traceback."""
        if error is not None:
            fold(error)


def is_full() -> bool:
    """Return whether the user wants whole tracebacks."""
    return env.snapshot().get(env.POLYXLA_FULL_TRACEBACK, "") not in ("", "0")


def fold(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of those behind it, unless `is_full`."""
    if is_full():
        return
    seen: list[BaseException] = []
    behind: list[BaseException | None] = [error]
    while behind:
        current = behind.pop()
        # Compared by identity: exceptions may define equality, and causes and contexts may form a circle.
        if current is None or any(current is other for other in seen):
            continue
        seen.append(current)
        folded = _folded(current.__traceback__)
        # An error without a frame of the user's and without a cause is a defect of ours: show every frame.
        if folded or current.__cause__ or isinstance(current, PolyxlaError):
            current.__traceback__ = folded
        behind += [current.__cause__, current.__context__]


def leave_replica(error: BaseException, who: str) -> NoReturn:
    """Raise what leaves a replica for an exception that left its function, in the handler of that exception.

    It has a note: which replica raised it, on which host, and how to see all frames.
    """
    left = as_error(error, who)
    hint = "" if is_full() else f"; {HINT}"
    left.add_note(f"raised in {who} on {socket.gethostname()}{hint}")
    raise left


def as_error(error: BaseException, who: str) -> BaseException:
    """Return an exception that ended a replica, or the error that stands for it.

    The launching program would take SystemExit, KeyboardInterrupt and the like for its own: ``sys.exit(0)``
    in one replica would end the whole job with success.

    Args:
        error: what the replica raised.
        who: names the replica.
    """
    # Where Python's own handler is installed, the interrupt is the user's Ctrl-C. Replica processes have
    # another handler.
    is_ctrl_c = (
        isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if isinstance(error, Exception) or is_ctrl_c:
        return error
    line = raised_at(error.__traceback__)
    at = f" at {line}" if line else ""
    if not isinstance(error, SystemExit):
        text = f": {error}" if str(error) else ""
        lost = ReplicaLostError(f"{who} raised {type(error).__name__}{at}{text}")
    else:
        # pytest's code is a member of an enumeration.
        number = int(error.code) if isinstance(error.code, int) else error.code
        code = "" if number is None else repr(number)
        advice = "" if error.code else "; to end a replica, return from its function"
        lost = ReplicaLostError(f"{who} called sys.exit({code}){at}{advice}")
        lost.exit_code = number if number and isinstance(number, int) else 1
    lost.__cause__ = error
    return lost


def _folded(trace: TracebackType | None) -> TracebackType | None:
    # The links of a traceback run from the outermost frame inwards, so the kept ones are relinked from the
    # end.
    kept = []
    while trace is not None:
        if not _is_ours(trace.tb_frame):
            kept.append(trace)
        trace = trace.tb_next
    folded = None
    for entry in reversed(kept):
        folded = TracebackType(folded, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return folded


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return (
        is_polyxlas(frame)
        or name.partition(".")[0] == "pluggy"
        or name in _LAUNCH_MODULES
        or (name, frame.f_code.co_name) == _LAUNCH
        # Replica processes are started with `python -c`.
        or frame.f_code.co_filename == "<string>"
    )
