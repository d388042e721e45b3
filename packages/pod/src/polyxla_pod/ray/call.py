"""One host's part of a launch: read the call, launch here, and write the results or the error."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polyxla
from polyxla import Replica, UsageError
from polyxla.plugin import Raised, RemoteTraceback, Returned, dumps, pack, snapshot
from polyxla_pod.ray import env


@dataclass(frozen=True)
class HostCall:
    """What to launch on each host.

    Attributes:
        function: the user's function.
        options: the other arguments of `polyxla.launch` by name.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any]

    def pickled(self) -> bytes:
        """Return the call as bytes: functions and classes of a script or notebook by value.

        Raises:
            UsageError: a part of it cannot be pickled.
        """
        try:
            return dumps(self)
        except Exception as error:
            raise UsageError(
                f"the function or its arguments cannot be sent to the hosts: {error}",
                where="launch",
                fix="Create files, locks and connections inside the function.",
            ) from error


def main() -> None:
    """Run the call, write its outcome, and exit as a program that raised would."""
    environ = snapshot()
    outcome = _run(Path(environ[env.POLYXLA_RAY_CALL]))
    Path(environ[env.POLYXLA_RAY_OUTCOME]).write_bytes(pack(outcome))
    # The exit code makes the launcher see a failure.
    sys.exit(isinstance(outcome, Raised))


def numbered(replica: Replica, function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Return the function's result with the replica's ordinal, which the driver needs to sort all results."""
    return replica.ordinal, function(replica, *args)


def _run(file: Path) -> Returned | Raised:
    try:
        call = _load(file)
        options = {**call.options, "args": (call.function, *call.options["args"])}
        return Returned(polyxla.launch(numbered, **options))
    except Exception as error:
        # The launcher reads the traceback to find the host whose failure explains the others.
        traceback.print_exception(error, chain=False)
        cause = error.__cause__
        text = cause.args[0] if isinstance(cause, RemoteTraceback) else traceback.format_exc()
        return Raised(error, text)


def _load(file: Path) -> HostCall:
    with file.open("rb") as opened:
        # The function's modules are found by the driver's path, so the path is set before the call is
        # unpickled.
        sys.path[:], data = pickle.load(opened)
    try:
        call: HostCall = pickle.loads(data)
    except ImportError as error:
        raise UsageError(
            f"the function cannot be loaded on this host: {error}",
            where="launch",
            fix='Bring its module along: ray.init(runtime_env={"working_dir": "."}) before the launch.',
        ) from error
    return call
