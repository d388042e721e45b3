"""The worker ``localservice`` on this host, which is started if none answers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from polyxla.plugin import host_chips, private_directory, write_private
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration
from polyxla_xrt.config.credentials import refuse_another_users
from polyxla_xrt.errors import WorkerConnectError

START_S = 60.0
"""Longest wait for the started worker to listen, in seconds."""
START_TPU_S = 180.0
"""The same for a worker that must first open TPU chips."""
IDLE_S = 5.0
"""How long the started worker stays after its last job, in seconds."""
_started: list[subprocess.Popen[bytes]] = []
_POLL_S = 0.2
_TAIL_CHARS = 2000


def ensure_service(
    configuration: Configuration, environ: Mapping[str, str], report: Callable[[str], None]
) -> None:
    """Start this host's worker if the configuration allows it and no worker answers.

    On a host with TPU chips, the worker serves them; otherwise it serves CPU cores.

    Args:
        configuration: the job's.
        environ: the environment to connect with, and of the started worker.
        report: receives a message about the started worker.

    Raises:
        UsageError: there is no such TPU to emulate, another user listens at the address, or the user has no
            private directory for the log.
        WorkerConnectError: the started worker does not come up.
    """
    if not configuration.starts_service:
        return
    address = configuration.workers[configuration.host_index].address
    # The client will send its token there, which only a worker of the same user may get.
    if _listens(address):
        refuse_another_users(address)
        return
    log = private_directory(environ) / f"worker-{socket.gethostname()}-{address.rpartition(':')[2]}.log"
    on_tpu = bool(host_chips(environ))
    served = "this host's TPU cores" if on_tpu else f"{configuration.devices_per_worker} CPU cores"
    cores = ["--platform", "tpu"] if on_tpu else ["--devices", str(configuration.devices_per_worker)]
    command = [sys.executable, "-m", "polyxla", "worker", "--address", address, *cores]
    command += ["--exit-when-idle", f"{IDLE_S:g}"]
    if token := environ.get(env.POLYXLA_XRT_TOKEN_FILE):
        command += ["--token-file", token]
    # This replaces the file: another worker may still write to the old one, which must not be truncated.
    write_private(log, b"")
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # It serves later jobs, too, and must not get this terminal's Ctrl-C.
            start_new_session=True,
        )
    # The reference stays for as long as this process lives: Popen warns about a dropped child that still
    # runs.
    _started.append(process)
    report(f"started a worker of {served} at {address} (pid {process.pid}); it ends after its last job")
    deadline = time.monotonic() + (START_TPU_S if on_tpu else START_S)
    while time.monotonic() < deadline:
        # This comes first: another job may have been faster, so that this worker found the port taken and
        # ended.
        if _listens(address):
            return
        if process.poll() is not None:
            break
        time.sleep(_POLL_S)
    tail = log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    raise WorkerConnectError(
        f"the worker that was started at {address} does not answer: {tail or 'its log is empty'}",
        where=configuration.source,
        fix=f"See {log}, or start a worker by hand: polyxla worker --address {address}",
    )


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        # Something is there, or the host is unreachable: the lease request will report which.
        return True
