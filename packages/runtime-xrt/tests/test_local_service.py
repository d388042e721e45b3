"""The worker `localservice`, which a job starts on its own host."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.plugin import free_ports, snapshot
from polyxla_xrt import env, local_service
from polyxla_xrt.client.channel import ask
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.configuration import read_configuration
from polyxla_xrt.errors import WorkerRefusedError
from polyxla_xrt.plan import configured_plan

PATIENCE_S = 20.0


@pytest.mark.slow
def test_it_has_the_jobs_token_serves_later_jobs_and_exits_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    (tmp_path / "token").write_text("0123456789abcdef")
    address = f"127.0.0.1:{port}"
    node = {env.XRT_TPU_CONFIG: f"localservice;0;{address}", env.TPU_NUM_DEVICES: "1"}
    environ = {**snapshot(), **node, env.POLYXLA_XRT_TOKEN_FILE: str(tmp_path / "token")}
    environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    configuration = read_configuration(environ)
    assert configuration is not None
    assert local_service.IDLE_S == 5
    monkeypatch.setattr(local_service, "IDLE_S", 3.0)
    said: list[str] = []
    local_service.ensure_service(configuration, environ, said.append)
    process = local_service._started.pop()
    try:
        assert said == [
            f"started a worker of 1 CPU cores at {address} (pid {process.pid}); it ends after its last job"
        ]
        with pytest.raises(WorkerRefusedError, match="requires a token"):
            ask(address, "Status", snapshot())
        for _ in range(2):
            local_service.ensure_service(configuration, environ, said.append)
            with closing(Lease(address, 1, environ, wait_s=PATIENCE_S)) as lease:
                assert lease.job
        assert len(said) == 1, "the second job found the worker of the first"
        assert process.wait(PATIENCE_S) == 0
        (log,) = (tmp_path / "state").rglob("*.log")
        assert "exiting: no job for 3 s" in log.read_text()
        assert (log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    finally:
        process.kill()
        process.wait()


def test_one_of_which_only_the_number_of_cores_is_known_gets_a_port(tmp_path: Path) -> None:
    environ = {**snapshot(), env.TPU_NUM_DEVICES: "1", "XDG_STATE_HOME": str(tmp_path)}
    plan = configured_plan(environ)
    assert plan.worker.port, "nobody could connect to port 0"
    said: list[str] = []
    local_service.ensure_service(plan.configuration, environ, said.append)
    process = local_service._started.pop()
    try:
        assert f"at localhost:{plan.worker.port} " in said[0]
        with closing(Lease(plan.worker.address, 1, environ, wait_s=PATIENCE_S)) as lease:
            assert lease.job
    finally:
        process.kill()
        process.wait()


def test_a_port_at_which_another_user_listens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        address = f"127.0.0.1:{squatter.getsockname()[1]}"
        environ = {env.XRT_TPU_CONFIG: f"localservice;0;{address}", "XDG_STATE_HOME": str(tmp_path)}
        configuration = read_configuration(environ)
        assert configuration is not None
        local_service.ensure_service(configuration, environ, pytest.fail)
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(
            UsageError, match=f"user {own} of this machine listens at {address}.*another port"
        ):
            local_service.ensure_service(configuration, environ, pytest.fail)
