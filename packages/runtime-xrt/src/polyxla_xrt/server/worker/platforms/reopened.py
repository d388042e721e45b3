"""Cores that a replaced serving process has had, while this one opens them again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.futures import complete
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.platforms.engines import JobEngines, OnStall, Served
from polyxla_xrt.server.worker.platforms.library import Library
from polyxla_xrt.server.worker.platforms.plugin import PluginEngines

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

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start the engine of a job once the cores are open; opening them has its own deadline."""
        return self._opened.result().start(request, coordinator, on_stall)
