"""The command in processes of its own: exit codes, formats, and hints for mistaken commands."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from polyxla_testing import PluginInstaller
from polyxla_testing.processes import wait_for_end_of, wait_until

Doctor = Callable[..., subprocess.CompletedProcess[str]]


def test_a_machine_with_a_problem_has_exit_code_1(doctor: Doctor) -> None:
    done = doctor("--no-trial", POLYXLA_DEVICE="3", PJRT_DEVICE="CPU")
    assert done.returncode == 1, done.stderr
    assert re.search(r"^problem +variables +POLYXLA_DEVICE is not a variable", done.stdout, re.MULTILINE)
    assert re.search(r"^\d problems? and \d notes?: do what follows the arrows\.$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_runtime_can_be_named(doctor: Doctor) -> None:
    document = json.loads(doctor("--no-trial", "--json", "--runtime", "pjrt").stdout)
    assert document["runtime"] == {"name": "pjrt", "reason": "--runtime pjrt"}
    missing = json.loads(doctor("--json", "--runtime", "pjrtt").stdout)
    (found,) = [
        finding for finding in missing["findings"] if finding["subject"] == "runtime" and finding["fix"]
    ]
    assert found["found"].startswith("no runtime is called 'pjrtt'")
    assert found["fix"] == "Did you mean 'pjrt'?"
    assert missing["trial"] is None


def test_two_formats_at_once_are_an_error(doctor: Doctor) -> None:
    done = doctor("--paste", "--json")
    assert done.returncode == 2
    assert "(from --paste --json). Leave one of them out." in done.stderr


def test_a_trial_that_fails_is_in_the_document(doctor: Doctor, install_plugin: PluginInstaller) -> None:
    (install_plugin.directory / "polyxla_pjrt.py").write_text("raise ImportError('torn')")
    done = doctor("--json", PYTHONPATH=str(install_plugin.directory), PJRT_DEVICE="CPU")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["ok"] is False
    assert "torn" in " ".join(finding["found"] for finding in document["findings"])


@pytest.mark.slow
def test_a_worker_that_cannot_be_reached_is_a_finding(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    done = doctor("--json", XRT_TPU_CONFIG=f"tpu_worker;0;{address}")
    if "runtime 'xrt' is not installed" in done.stdout:
        pytest.skip("runtime xrt is not installed here")
    assert done.returncode == 1, done.stderr
    (found,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "problem"]
    assert found["subject"] == "devices"
    assert found["found"].startswith(f"there is no worker at {address}: Connection refused")


def test_a_deleted_working_directory_is_a_finding(doctor: Doctor) -> None:
    go = ("sh", "-c", 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$@"', "")
    done = doctor("--no-trial", "--json", before=go, PJRT_DEVICE="CPU")
    (found,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "problem"]
    assert (found["subject"], found["fix"]) == ("working directory", "Change to a directory that exists.")
    assert done.stderr == ""


def test_a_temporary_directory_that_cannot_be_used_is_a_finding(doctor: Doctor) -> None:
    # No file can grow, as on a full disk.
    done = doctor("--json", before=("prlimit", "--fsize=0"), PJRT_DEVICE="CPU")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    (found,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["subject"] == "trial"]
    assert found["status"] == "problem"


def test_a_terminal_without_the_arrow_is_no_reason_to_fail(doctor: Doctor) -> None:
    done = doctor("--no-trial", POLYXLA_DEVICE="3", PJRT_DEVICE="CPU", PYTHONIOENCODING="latin-1")
    assert "Traceback" not in done.stderr
    assert r"\u2192" in done.stdout


def test_sigterm_ends_the_trial(environ: dict[str, str], install_plugin: PluginInstaller) -> None:
    file = install_plugin.directory / "pid"
    code = f"""
        import os, time
        if "trial_process" in open("/proc/self/cmdline").read():
            with open({str(file)!r}, "w") as started:
                started.write(str(os.getpid()))
            time.sleep(1000)
    """
    install_plugin.listener("asleep", textwrap.dedent(code))
    environ |= {"PYTHONPATH": str(install_plugin.directory), "PJRT_DEVICE": "CPU"}
    command = [sys.executable, "-m", "polyxla", "doctor"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: file.exists() and file.read_text() != "", "the trial's start")
        trial = int(file.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_for_end_of([trial])
