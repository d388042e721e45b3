"""The transports' commands, with a recorded gcloud; and a third party's transport."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla import UsageError
from polyxla_pod.transports import GcloudTransport, SshTransport, Target

if TYPE_CHECKING:
    from conftest import Pod
    from polyxla_testing import PluginInstaller

PROGRAM = ["/opt/my env/bin/python", "-m", "polyxla_pod.host"]
# What `gcloud compute tpus tpu-vm describe` prints of a v4-16, shortened to what is read and its neighbours.
DESCRIPTION = {
    "acceleratorType": "v4-16",
    "name": "projects/p/locations/us-central2-b/nodes/my-tpu",
    "networkEndpoints": [
        {"ipAddress": "10.130.0.12", "port": 8470},
        {"ipAddress": "10.130.0.13", "port": 8470},
    ],
    "state": "READY",
}
GCLOUD = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$4" in
  describe) {describe};;
  ssh) for last; do case "$last" in --command=*) exec sh -c "${{last#--command=}}";; esac; done;;
esac
"""


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gcloud that records its arguments; its ssh runs the command here."""
    directory = tmp_path / "gcloud"
    directory.mkdir()
    write_gcloud(directory, f"cat <<'END'\n{json.dumps(DESCRIPTION)}\nEND\n")
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    return directory / "log"


def write_gcloud(directory: Path, describe: str) -> None:
    path = directory / "gcloud"
    path.write_text(GCLOUD.format(log=directory / "log", describe=describe))
    path.chmod(0o755)


def test_the_ssh_command_asks_no_question_and_quotes_the_program() -> None:
    transport = SshTransport(Target(hosts=("a", "me@10.0.0.2"), options=("-J", "jump")))
    command = transport.command(1, PROGRAM)
    assert command[:-1] == ["ssh", "-T", "-o", "BatchMode=yes", "-J", "jump", "me@10.0.0.2"]
    assert shlex.split(command[-1]) == PROGRAM
    assert transport.check_by_hand(1) == "ssh -J jump me@10.0.0.2 true"
    assert transport.addresses == ("a", "10.0.0.2")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_ssh_gets_an_ipv6_address_without_the_brackets_of_a_url() -> None:
    transport = SshTransport(Target(hosts=("me@[fd00::1]", "[fd00::2]")))
    # With -G, ssh prints what it would connect to.
    for host, address in enumerate(("fd00::1", "fd00::2")):
        _, *options, _ = transport.command(host, PROGRAM)
        done = subprocess.run(["ssh", "-G", *options], capture_output=True, text=True, timeout=60, check=True)
        assert f"hostname {address}\n" in done.stdout
    assert transport.addresses == ("fd00::1", "fd00::2")


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ((), "no hosts are given (from polyxla pod run). Write --hosts a,b or --tpu."),
        (("a", "b", "a"), "host a is named twice (from --hosts a,b,a). Name each host once."),
        (("-oProxyCommand=x",), "'-oProxyCommand=x' is not the name of a host"),
        (("a b",), "'a b' is not the name of a host"),
    ],
)
def test_wrong_hosts_are_an_error(hosts: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        SshTransport(Target(hosts=hosts))
    assert text in str(caught.value)


def test_gcloud_is_asked_for_the_workers_and_reaches_each(gcloud: Path) -> None:
    transport = GcloudTransport(
        Target(tpu="my-tpu", zone="us-central2-b", project="p", options=("--internal-ip",))
    )
    assert transport.hosts == ("my-tpu:0", "my-tpu:1")
    assert transport.addresses == ("10.130.0.12", "10.130.0.13")
    where = "my-tpu --zone us-central2-b --project p"
    assert gcloud.read_text() == f"compute tpus tpu-vm describe {where} --format=json\n"
    assert transport.command(1, PROGRAM) == [
        *f"gcloud compute tpus tpu-vm ssh {where} --quiet --worker=1".split(),
        "--command='/opt/my env/bin/python' -m polyxla_pod.host",
        "--internal-ip",
    ]


def test_a_command_runs_on_all_workers_through_gcloud(gcloud: Path, stand_in: Pod) -> None:
    where = ["--tpu", "my-tpu", "--zone", "us-central2-b"]
    done = stand_in.call("run", *where, *stand_in.options, "--", "echo", "hello")
    assert done.returncode == 0, done.stderr
    assert stand_in.unfolded(done.stdout) == {"w0": ["hello"], "w1": ["hello"]}
    workers = [line.split("--worker=")[1][0] for line in gcloud.read_text().splitlines() if " ssh " in line]
    assert sorted(workers) == ["0", "1"]


@pytest.mark.parametrize(
    ("describe", "text"),
    [
        (
            "echo 'ERROR: NOT_FOUND: my-tpu' >&2; exit 1",
            "gcloud cannot describe the TPU: ERROR: NOT_FOUND: my-tpu",
        ),
        ("exit 1", "gcloud cannot describe the TPU: it printed no reason"),
        ("echo '{}'", "gcloud describes the TPU without workers"),
    ],
)
def test_a_tpu_that_gcloud_does_not_know_is_an_error(gcloud: Path, describe: str, text: str) -> None:
    write_gcloud(gcloud.parent, describe)
    with pytest.raises(UsageError) as caught:
        GcloudTransport(Target(tpu="my-tpu", zone="z"))
    assert text in str(caught.value)


def test_gcloud_needs_a_name_and_a_zone_and_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="needs a TPU's name and its zone"):
        GcloudTransport(Target(tpu="my-tpu"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="gcloud is not installed on this machine"):
        GcloudTransport(Target(tpu="my-tpu", zone="z"))


LOCAL_ENGINE = """
import polyxla
from polyxla_pod.transports import Transport


class Local(Transport):
    hosts = ("here", "there")

    def command(self, host, program):
        return list(program)

    def check_by_hand(self, host):
        return "true"


@polyxla.hookimpl
def polyxla_pod(transport, target):
    return Local() if transport == "local" else None
"""


def test_a_third_partys_engine_is_found_by_its_name(install_plugin: PluginInstaller, stand_in: Pod) -> None:
    install_plugin.listener("local-engine", LOCAL_ENGINE)
    stand_in.environ["PYTHONPATH"] = str(install_plugin.directory)
    done = stand_in.call("run", "--engine", "local", *stand_in.options, "--", "echo", "hello")
    assert done.returncode == 0, done.stderr
    assert stand_in.unfolded(done.stdout) == {"w0": ["hello"], "w1": ["hello"]}


def test_an_engine_that_nothing_provides_is_an_error(stand_in: Pod) -> None:
    done = stand_in.call("run", "--engine", "moon", "--hosts", "a", "--", "true")
    assert done.returncode == 2
    assert "no installed plugin has a transport called 'moon' (from --engine moon)." in done.stderr


@pytest.mark.parametrize("missing", ["ray", "cloudpickle"])
@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("from polyxla.__main__ import main; sys.exit(main())", "--engine ray"),
        ("import polyxla; polyxla.launch(print, pod='ray')", 'pod="ray"'),
    ],
)
def test_ray_that_is_not_installed_is_named_with_the_pip_line(code: str, where: str, missing: str) -> None:
    hidden = f"import sys; sys.modules[{missing!r}] = None; {code}"
    command = [sys.executable, "-c", hidden, "pod", "run", "--engine", "ray", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert f"found with Ray, and {missing} is not installed (from {where})" in done.stderr
    assert "pip install './packages/pod[ray]'" in done.stderr
    assert done.returncode == (2 if "main" in code else 1)
