"""The launcher's helper process, which waits for the worker."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from polyxla.plugin import LOCALHOST, POLYXLA_SECRET
from polyxla_testing.processes import wait_until
from polyxla_xrt import env
from polyxla_xrt.errors import WorkerLostError
from polyxla_xrt.lease_holder import LeaseHolder
from polyxla_xrt.plan import configured_plan


def _helper() -> int | None:
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    return next((pid for pid, command in commands.items() if b"lease_holder" in command), None)


def test_a_stopped_helper_is_named_long_before_the_worker_would_be_given_up() -> None:
    # The socket accepts connections and never answers, like a worker that is starting.
    with closing(socket.create_server((LOCALHOST, 0))) as silent:
        config = f"tpu_worker;0;{LOCALHOST}:{silent.getsockname()[1]}"
        variables = {env.XRT_TPU_CONFIG: config, "POLYXLA_STALL_TIMEOUT_S": "2", POLYXLA_SECRET: "secret"}
        environ = {**os.environ, **variables}
        errors: list[WorkerLostError] = []

        def hold() -> None:
            with pytest.raises(WorkerLostError) as raised:
                LeaseHolder(configured_plan(environ), environ)
            errors.append(raised.value)

        launch = threading.Thread(target=hold, daemon=True)
        launch.start()
        wait_until(lambda: _helper() is not None, "the helper process")
        helper = _helper()
        assert helper
        os.kill(helper, signal.SIGSTOP)
        launch.join(60)
    assert "the helper process that holds the worker for this job has been stopped for 2 s" in str(errors[0])
    assert _helper() is None
