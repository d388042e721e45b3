"""Messages between the launcher and a host: one JSON object per line, in both directions.

========== =========================================================== ==============================
to a host  content                                                     answer
========== =========================================================== ==============================
job        host, lost_after_s, grace_s                                 none
check      environ, directory, ports, node                             facts
archive    directory, data (base64), last                              taken; unpacked, after the last
worker     command, environ, token, ready                              line, ...; ready; worker_exit
start      command, environ, directory                                 line, ...; exit; end
beat       number                                                      beat, with the host's time
stop       none                                                        exit; end
========== =========================================================== ==============================

A host sends hello before it reads anything, and error if it cannot do what it was asked for. Exit has the
command's exit code; end follows when no process is left that the command started. Taken reports that another
part of an archive has been written: the launcher sends no more than `UNTAKEN_PARTS` ahead, because heartbeats
wait behind them. A worker serves the command until the launcher's stop, because the other hosts' commands may
still need it; worker_exit has its exit code if it ends before.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

SILENCES = 5
"""How often a heartbeat is sent before its absence counts as a lost connection."""
UNTAKEN_PARTS = 64
"""How many parts of an archive may be on their way to a host."""
WORKER_STREAM = "worker"
"""The stream of a worker's lines; the command's are ``out`` and ``err``."""
_FIRST = b'{"polyxla_pod":'
"""How each message begins. Shells print other lines, such as greetings and the output of start-up files."""


@dataclass(frozen=True)
class HostMessage:
    """A message.

    Attributes:
        kind: what it is about, from the table above.
        content: its values by name.
    """

    kind: str
    content: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the message as a line, with its end."""
        return json.dumps({"polyxla_pod": self.kind, **self.content}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> HostMessage | None:
    """Return the message in a line; None if the line is not a message."""
    # This runs for every line of every host, so it avoids parsing what cannot be a message.
    if not line.startswith(_FIRST):
        return None
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        # A line with thousands of brackets raises RecursionError.
        return None
    return HostMessage(str(content.pop("polyxla_pod")), content)


_CODE = range(-64, 256)
_WORKER = ({"error": str}, {"id": int, "hosts": int, "type": str})
_FACTS = {
    "versions": {str: str},
    "holders": [str],
    "worker": (None, *_WORKER),
    "node": (None, {"address": (None, str), "worker": (None, str)}),
    "used_ports": [int],
    "free_bytes": {str: int},
}
_FROM_HOST: dict[str, dict[str, Any]] = {
    "hello": {},
    "facts": {"facts": _FACTS},
    "taken": {},
    "unpacked": {},
    "ready": {},
    "line": {"stream": str, "text": str},
    "worker_exit": {"code": _CODE},
    "exit": {"code": _CODE},
    "end": {},
    "error": {"text": str, "code": (None, _CODE)},
    "beat": {"number": int, "time": float},
}
"""What the launcher reads of a host's messages. A shape is a type, a range of numbers, `[of the items]`,
`{str: of the values}`, `{name: of its value}`, or a tuple of shapes of which one fits.
"""


def find_misfit(message: HostMessage) -> str | None:
    """Describe what is wrong with a message from a host; None if the launcher can read it.

    A host may run another version of this package, or another program.
    """
    if message.kind not in _FROM_HOST:
        return f"an unknown message {message.kind[:20]!r}"
    if not _fits(message.content, _FROM_HOST[message.kind]):
        return f"a message {message.kind!r} with other content than this version expects"
    return None


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, tuple):
        return any(_fits(value, choice) for choice in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and _items_fit(value, shape)
    return _is(value, shape)


def _items_fit(values: dict[str, Any], shape: dict[Any, Any]) -> bool:
    if str in shape:
        return all(_fits(item, shape[str]) for item in values.values())
    # Further items are allowed: a newer host may send more than this launcher reads.
    return all(name in values and _fits(values[name], of) for name, of in shape.items())


def _is(value: Any, shape: Any) -> bool:
    # A bool is an int for Python, and would pass for a number.
    if value is None or shape is None or isinstance(value, bool):
        return value is shape
    if isinstance(shape, range):
        return isinstance(value, int) and value in shape
    if shape is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, shape)
