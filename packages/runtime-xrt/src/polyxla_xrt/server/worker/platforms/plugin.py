"""The devices of a PJRT plugin, whose client is made once and kept over the jobs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from polyxla import UsageError
from polyxla.plugin import update_environ
from polyxla_bridge import env as bridge
from polyxla_bridge.engine import memory_accounting, stall_watchdog
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.futures import complete
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import plugin
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.platforms.engines import JobEngines, OnStall, Served
from polyxla_xrt.server.worker.platforms.library import Library

OPEN_S = 180.0
"""Longest wait for a plugin to make its client, in seconds. A TPU's takes 5 to 60."""
CLOSE_S = 10.0
"""`JobEngines.close_s`: longer than a step takes, since a new client takes longer still."""


class PluginEngines:
    """Serves the devices of a plugin; a `JobEngines`. Opens the plugin in this process.

    Args:
        library: the plugin.
        cores: number of devices to serve; None for all of this process.
        environ: this process's environment.
        open_s: longest wait for the plugin, in seconds.
        lost: completes, with the reason, if the devices are lost.

    Raises:
        UsageError: the plugin cannot be opened, or has fewer devices.
    """

    close_s = CLOSE_S

    def __init__(
        self,
        library: Library,
        cores: int | None,
        environ: Mapping[str, str],
        open_s: float = OPEN_S,
        lost: Future[str] | None = None,
    ) -> None:
        self.refusal = library.refusal
        self.lost = lost or Future()
        self._environ = {**environ, **library.variables}
        # A plugin reads the variables of the process itself, so they must be set before it is opened.
        update_environ(library.variables)
        self._client = _open(library, open_s, self.lost)
        # The client of a slice also has the devices of other hosts, which their own workers serve.
        here = [device for device in self._client.devices if device.is_local]
        if cores is not None and cores > len(here):
            raise UsageError(
                f"the plugin {library.path} has {len(here)} devices here, not {cores}",
                where=f"--devices {cores}",
                fix=f"Pass --devices {len(here)}, or omit it to serve all devices.",
            )
        found = [self._client.memory_stats(device) or {} for device in here[:cores]]
        limits = [stats.get("bytes_limit", 0) for stats in found]
        memory = sum(limits) if all(limits) else memory_accounting.machine_bytes()
        self.served = Served(len(found), library.platform or f"{self._client.platform} (plugin)", memory)

    def wait_until_open(self) -> None:
        """Do nothing: the plugin was opened with this object."""

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start an engine on the first devices; what it makes there ends with it."""
        return PjrtEngine(self._settings(request, on_stall), self._client.share(request.cores))

    def _settings(self, request: pb.LeaseRequest, on_stall: OnStall) -> bridge.BridgeSettings:
        """Return the settings of a job's engine."""
        timeout_s = request.stall_timeout_s or bridge.BridgeSettings.stall_timeout_s
        # There is one handler for the whole process, and only one job at a time.
        stall_watchdog.on_stall(lambda text, _: on_stall(text))
        return bridge.from_environ({**self._environ, bridge.POLYXLA_STALL_TIMEOUT_S: str(timeout_s)})


def _open(library: Library, open_s: float, lost: Future[str]) -> PluginClient:
    """Load the plugin and make its client, on a thread: a plugin that hangs must not hang the worker."""
    made: Future[PluginClient] = Future()

    def make() -> None:
        complete(made, lambda: PluginClient(plugin.load(library.path), library.options))

    threading.Thread(target=make, name="polyxla-open", daemon=True).start()
    either: list[Future[Any]] = [made, lost]
    # libtpu waits for the other hosts of its slice, and would not notice that a host is gone.
    wait(either, open_s, FIRST_COMPLETED)
    try:
        return made.result(0)
    except TimeoutError:
        problem = f"the plugin {library.path} has not made its client within {open_s:g} s"
        if lost.done():
            problem = lost.result()
    except PjrtError as error:
        problem = error.message.strip().rstrip(".")
    raise UsageError(
        problem,
        where=library.source,
        fix="See what the plugin itself has printed. If another process uses the devices, end it.",
    )


_log = logging.getLogger("polyxla.worker")


class ReopenedEngines:
    """Serves clients at once, and lets their jobs wait for the devices; a `JobEngines`.

    Clients give up after seconds if nothing listens, and a TPU is opened in up to a minute.

    Args:
        library: the plugin that has the cores.
        served: what the process before this one served.
        open_cores: opens the same cores; called at once, on a thread.
        give_up: called if that is impossible.
    """

    close_s = PluginEngines.close_s

    def __init__(
        self,
        library: Library,
        served: Served,
        open_cores: Callable[[], JobEngines],
        give_up: Callable[[], None],
    ) -> None:
        self.served = served
        self.refusal = library.refusal
        self.lost: Future[str] = Future()
        self._give_up = give_up
        self._opened: Future[JobEngines] = Future()
        self._opened.add_done_callback(self._check)
        threading.Thread(
            target=complete, args=(self._opened, open_cores), name="polyxla-reopen", daemon=True
        ).start()

    def _check(self, opened: Future[JobEngines]) -> None:
        if error := opened.exception():
            _log.warning("the cores cannot be opened again yet: %s", error)
            self._give_up()
        else:
            opened.result().lost.add_done_callback(lambda lost: self.lost.set_result(lost.result()))

    def wait_until_open(self) -> None:
        """Wait until the plugin has been opened."""
        self._opened.result()

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start the engine of a job on the open cores."""
        return self._opened.result().start(request, coordinator, on_stall)
