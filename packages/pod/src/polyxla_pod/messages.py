"""Messages between the launcher and a host: one JSON object per line, in both directions.

========== =========================================================== ==============================
to a host  content                                                     answer
========== =========================================================== ==============================
job        host, lost_after_s, grace_s                                 none
check      environ, directory, ports, node                             facts
archive    directory, data (base64), last                              unpacked, after the last one
worker     command, environ, token, ready                              line, ...; ready; worker_exit
start      command, environ, directory                                 line, ...; exit; end
beat       number                                                      beat, with the host's time
stop       none                                                        exit; end
========== =========================================================== ==============================

A host sends hello before it reads anything, and error if it cannot do what it was asked for. Exit has the
command's exit code; end follows when nothing is left of what the command started. A worker serves the command
until the launcher's stop, because the other hosts' commands may still need it; worker_exit has its exit code
if it ends before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

SILENCES = 5
"""How often a heartbeat is sent before its absence counts as a lost connection."""
WORKER_STREAM = "worker"
"""The stream of a worker's lines; the command's are ``out`` and ``err``."""
_FIRST = b'{"polyxla_pod":'
"""How each message begins. Shells print other lines: greetings, and what their start-up files say."""


@dataclass(frozen=True)
class Message:
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


def decode(line: bytes) -> Message | None:
    """Return the message in a line; None if the line is not a message."""
    if not line.startswith(_FIRST):
        return None
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return Message(str(content.pop("polyxla_pod")), content)
