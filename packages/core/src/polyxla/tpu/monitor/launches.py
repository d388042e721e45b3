"""Monitoring a launch, in the launching process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from polyxla.console import INTERRUPTED
from polyxla.env import POLYXLA_SECRET, POLYXLA_STALL_TIMEOUT_S, POLYXLA_START_TIMEOUT_S, timeout_s
from polyxla.errors import PolyxlaError, UsageError
from polyxla.tpu import env
from polyxla.tpu.monitor.server import Failure, Hosts, Monitor

NOTICE_S = 2.0
"""How long a failed launch waits for notice of another host's failure, which may be its cause, in s."""


@contextlib.contextmanager
def monitored(names: Sequence[str], own: int, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Monitor what runs in the context: the launch of one host's replica processes.

    Yields the variables by which they find the monitor.

    Args:
        names: the hosts that each launch their processes, in the order of their worker ids; empty to monitor
            nothing.
        own: this host's number.
        environ: the environment with the job's secret, the timeouts and the port.

    Raises:
        ReplicaLostError: another host has failed; with that host's exit code.
        UsageError: a variable is invalid.
    """
    if not names:
        yield {}
        return
    hosts = Hosts(tuple(names), own, _port(environ))
    limits = [timeout_s(environ, name) for name in (POLYXLA_STALL_TIMEOUT_S, POLYXLA_START_TIMEOUT_S)]
    monitor = Monitor(hosts, environ[POLYXLA_SECRET], *limits)
    failure: Failure | None = None
    try:
        yield {env.POLYXLA_MONITOR: monitor.address}
    except BaseException as error:
        if cause := monitor.wait_for_failure(NOTICE_S if len(names) > 1 else 0.0):
            raise cause.error() from None
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = Failure(own, _exit_code(error), f"{hosts.named(own)} failed: {text}")
        raise
    finally:
        monitor.close(failure)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, PolyxlaError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _port(environ: Mapping[str, str]) -> int:
    text = environ.get(env.POLYXLA_MONITOR_PORT) or str(env.DEFAULT_MONITOR_PORT)
    port = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < port < 1 << 16:
        raise UsageError(
            f"{text} is not the number of a port",
            where=f"{env.POLYXLA_MONITOR_PORT}={text}",
            fix=f"Write a number such as {env.DEFAULT_MONITOR_PORT}, the same on all hosts, or unset it.",
        )
    return port
