"""debugpy, which VS Code's Python extension uses, stops in replicas with the how-to page's configurations."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "vs-code.md"
DEADLINE_S = 300.0
SCRIPT = """\
import polyxla


def train(replica):
    doubled = 2 * replica.ordinal
    return replica.all_reduce(doubled)


if __name__ == "__main__":
    print(polyxla.launch(train))
"""
LINE = 5


class Session:
    """A connection in the debug adapter protocol: to the launched process, or to a child of it.

    Source: the Debug Adapter Protocol, 1.70, and debugpy's event ``debugpyAttach``.
    """

    def __init__(
        self, reader: IO[bytes], writer: IO[bytes], messages: queue.Queue[tuple[Session, Any]]
    ) -> None:
        self._reader, self._writer, self._messages = reader, writer, messages
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def begin(self, request: str, configuration: dict[str, Any]) -> None:
        """Start to debug: ``launch`` or ``attach``."""
        self.send("initialize", adapterID="debugpy", pathFormat="path")
        self.send(request, **configuration)

    def send(self, command: str, **arguments: Any) -> None:
        """Send a request."""
        request = {"seq": next(self._numbers), "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        self._writer.flush()

    def close(self) -> None:
        """Close the connection, whose other end must be gone."""
        self._thread.join(DEADLINE_S)
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        while header := self._reader.readline():
            self._reader.readline()
            self._messages.put((self, json.loads(self._reader.read(int(header.partition(b":")[2])))))


def debug(
    adapter: subprocess.Popen[bytes], configuration: dict[str, Any], script: Path, stack: contextlib.ExitStack
) -> tuple[list[str], str]:
    """Return the ordinals of the replicas that stopped at `LINE`, and what the program printed."""
    assert adapter.stdin
    assert adapter.stdout
    messages: queue.Queue[tuple[Session, Any]] = queue.Queue()
    first = Session(adapter.stdout, adapter.stdin, messages)
    stack.callback(first.close)
    first.begin("launch", configuration)
    ordinals, printed, threads = [], "", {}
    deadline = time.monotonic() + DEADLINE_S
    while True:
        session, message = messages.get(timeout=max(0.0, deadline - time.monotonic()))
        assert message.get("success", True), message
        body = message.get("body") or {}
        match message.get("event") or message["command"]:
            case "initialized":
                session.send("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": LINE}])
                session.send("configurationDone")
            case "debugpyAttach":
                address = body["connect"]["host"], body["connect"]["port"]
                with socket.create_connection(address) as connection:
                    files = connection.makefile("rb"), connection.makefile("wb")
                attached = Session(*files, messages)
                stack.callback(attached.close)
                attached.begin("attach", body)
            case "stopped":
                threads[session] = body["threadId"]
                session.send("stackTrace", threadId=body["threadId"])
            case "stackTrace":
                frame = body["stackFrames"][0]
                assert (frame["source"]["path"], frame["line"]) == (str(script), LINE)
                session.send("evaluate", expression="replica.ordinal", frameId=frame["id"])
            case "evaluate":
                ordinals.append(body["result"])
                session.send("continue", threadId=threads[session])
            case "output" if session is first and body.get("category") == "stdout":
                printed += body["output"]
            case "terminated" if session is first:
                return sorted(ordinals), printed


@pytest.mark.parametrize(("name", "replicas"), [("polyxla: one replica", 1), ("polyxla: four replicas", 4)])
def test_a_breakpoint_stops_each_replica(
    name: str, replicas: int, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    configurations = json.loads(block.replace("${file}", str(script)))["configurations"]
    [configuration] = [candidate for candidate in configurations if candidate["name"] == name]
    # What VS Code adds: the interpreter that the user has chosen, and the folder.
    configuration |= {"python": [sys.executable], "cwd": str(tmp_path), "console": "internalConsole"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "debugpy.adapter"]
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, env=clean_environ) as adapter,
        contextlib.ExitStack() as stack,
    ):
        try:
            ordinals, printed = debug(adapter, configuration, script, stack)
        finally:
            adapter.kill()
    assert ordinals == [str(ordinal) for ordinal in range(replicas)]
    assert printed.strip() == str([sum(2 * ordinal for ordinal in range(replicas))] * replicas)
