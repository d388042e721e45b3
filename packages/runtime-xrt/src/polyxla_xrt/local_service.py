"""The worker of this very host, ``localservice``, which is started when none answers."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration
from polyxla_xrt.errors import WorkerConnectError

START_S = 60.0
"""Longest wait for a worker that was started here, in seconds."""
IDLE_S = 5.0
"""How long it stays after its last job, in seconds."""
_started: list[subprocess.Popen[bytes]] = []
_LOOK_S = 0.2
_TAIL_CHARS = 2000


def ensure_service(
    configuration: Configuration, environ: Mapping[str, str], tell: Callable[[str], None]
) -> None:
    """Start this host's worker if it is one that may be started, and none answers.

    Args:
        configuration: the job's.
        environ: the environment to connect with, and to start it with.
        tell: told what was started.

    Raises:
        WorkerConnectError: the worker that was started does not come up.
    """
    if not configuration.starts_service:
        return
    address = configuration.workers[configuration.host_index].address
    if _listens(address):
        return
    log = Path(tempfile.gettempdir()) / f"polyxla-worker-{address.rpartition(':')[2]}.log"
    cores = configuration.devices_per_worker
    command = [sys.executable, "-m", "polyxla", "worker", "--address", address, "--devices", str(cores)]
    command += ["--exit-when-idle", f"{IDLE_S:g}"]
    if token := environ.get(env.POLYXLA_XRT_TOKEN_FILE):
        command += ["--token-file", token]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # It serves the jobs that come after this one, too.
            start_new_session=True,
        )
    # It outlives this process, which is no mistake of this process's.
    _started.append(process)
    tell(f"started a worker of {cores} cores at {address} (pid {process.pid}); it ends after its last job")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        # Another job may have been quicker, and this one's worker has found the port taken.
        if _listens(address):
            return
        if process.poll() is not None:
            break
        time.sleep(_LOOK_S)
    said = log.read_text(errors="replace")[-_TAIL_CHARS:]
    raise WorkerConnectError(
        f"the worker that was started at {address} does not answer: {said.strip() or 'it said nothing'}",
        where=configuration.source,
        fix=f"See {log}; or start one by hand: polyxla worker --address {address}",
    )


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        # Whatever is there, it is found out when the cores are asked for.
        return True
