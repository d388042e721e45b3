"""The TPU chips of this host as a part of a slice, which the workers of all its hosts open together."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla import UsageError
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Engine
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.platforms.engines import OnStall
from polyxla_xrt.server.worker.platforms.library import Library, SliceMembers
from polyxla_xrt.server.worker.platforms.plugin import PluginEngines
from polyxla_xrt.server.worker.platforms.slice_link import SliceLink, SliceProgress
from polyxla_xrt.server.worker.security import Security


class SliceEngines(PluginEngines):
    """Serves the chips of this host to jobs that have the whole slice; a `JobEngines`.

    Waits for the other workers first: libtpu itself would wait for them without a word.

    Args:
        library: libtpu, with the variables of the slice.
        members: the workers of the slice.
        cores: number of cores to serve; None for all, which it must be.
        environ: this process's environment.
        security: the credentials of all workers.

    Raises:
        UsageError: a worker has not come in time, libtpu cannot be opened, or the workers are in another
            order than libtpu's.
    """

    def __init__(
        self,
        library: Library,
        members: SliceMembers,
        cores: int | None,
        environ: Mapping[str, str],
        security: Security,
    ) -> None:
        # The link comes before libtpu, and its loss also ends the wait for libtpu.
        self._link = SliceLink(members, security, environ)
        super().__init__(library, cores, environ, lost=self._link.lost)
        here = sum(device.is_local for device in self._client.devices)
        if self.served.cores != here:
            raise UsageError(
                f"a worker of a slice serves all {here} cores of its host",
                where=f"--devices {cores}",
                fix="Omit it.",
            )
        # Replicas are numbered by the list of workers, and devices by libtpu. Both must mean the same host.
        if self._client.process_index != members.own:
            raise UsageError(
                f"libtpu counts this host as number {self._client.process_index}, the list of workers as "
                f"{members.own}",
                where="--slice",
                fix="List the workers in the order of TPU_WORKER_ID.",
            )

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start an engine that knows the devices of all hosts, and drives those of this one."""
        progress = self._link.progress(coordinator)
        return _SliceEngine(self._settings(request, on_stall), self._client.share(), progress, self._link)


class _SliceEngine(PjrtEngine):
    """A job's engine on this host's part of the slice.

    Args:
        settings: of the job.
        client: the slice's.
        progress: exchanged with the other workers.
        link: the link to the other workers.
    """

    def __init__(
        self, settings: BridgeSettings, client: PluginClient, progress: SliceProgress, link: SliceLink
    ) -> None:
        super().__init__(settings, client, progress=progress)
        self._link = link

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Finish the queued work; on the first worker, wait until the others have finished theirs, too.

        The next job begins at the first worker. If it came while another worker still ran a program of the
        last job, the two programs would meet.
        """
        super().close(timeout_s, others_s)
        # The watchdog has ended, and with it the exchanges: the others must learn what has returned since.
        self._progress.exchange(is_full=False)
        self._link.wait_for_release()
