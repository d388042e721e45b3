"""`polyxla run --each`: the program runs in every replica, and a failure is reported as by a launch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.cli.run import _run_program
from polyxla.plugin import POLYXLA_SECRET, Job, Setting, free_ports, tpu_env
from polyxla_testing import PluginInstaller
from polyxla_testing.processes import wait_for_end_of, wait_for_files

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
SCRIPT = str(PROGRAMS / "each_script.py")


@pytest.fixture(autouse=True)
def _bare_runtime(install_plugin: PluginInstaller) -> None:
    """A runtime without torch, with a process for each of up to four replicas."""
    install_plugin.hide_others()
    install_plugin("bare", (PROGRAMS / "bare_runtime.py").read_text())


def _each(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "polyxla", "run", "--each", *arguments],
        input="typed",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("way", ["return", pytest.param("exit-0", marks=pytest.mark.long)])
def test_the_program_runs_in_every_replica_with_torchruns_variables(way: str) -> None:
    done = _each("--devices", "2", SCRIPT, way, "--each")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = sorted(
        (json.loads(line) for line in done.stdout.splitlines()), key=lambda report: report[2][0]
    )
    port = first[2][-1]
    assert port.isdecimal()
    for rank, (name, arguments, seen, joined, typed) in enumerate([first, second]):
        assert (name, arguments) == ("__main__", [SCRIPT, way, "--each"])
        assert typed == "", "standard input is empty"
        assert seen == [str(rank), str(rank), "2", "2", "127.0.0.1", port]
        # A launch joins the replicas: each process runs its own part, and gets its own result.
        assert joined == [["joined", rank, 2, True]]


@pytest.mark.parametrize(
    ("way", "code", "text"),
    [
        pytest.param(
            "raise",
            1,
            'each_script.py", line 32, in *ValueError: the reason\nraised in the replica with ordinal 1 ',
            id="exception",
        ),
        pytest.param(
            "exit-3",
            3,
            "polyxla: error: the replica with ordinal 1 called sys.exit(3) at *each_script.py:34\n",
            id="exit",
        ),
        pytest.param(
            "exit-text",
            1,
            "polyxla: error: the replica with ordinal 1 called sys.exit('the text') at ",
            id="text",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "killed",
            1,
            "polyxla: error: process 1 (replica 1; pid *was ended by SIGKILL",
            id="killed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other-number",
            2,
            "this process is one of 2 replicas on runtime 'bare', which a launch for 1 on 'bare' cannot join "
            "(from polyxla run --each). Leave runtime and devices out of the launch, or leave --each out.",
            id="other-number",
        ),
    ],
)
def test_a_failing_replica_is_named_and_ends_the_others(way: str, code: int, text: str) -> None:
    begin = time.monotonic()
    done = _each("--devices", "2", SCRIPT, way)
    assert time.monotonic() - begin < TIMEOUT_S / 2, "the other replica sleeps longer"
    assert done.returncode == code
    assert all(part in done.stderr for part in text.split("*")), done.stderr
    assert "processes.py" not in done.stderr, "the launching process's own traceback is not printed"
    assert done.stderr.count("ValueError: the reason") == (way == "raise"), "nor its copy of the error"


BOTH_FINALLY = ["0-finally", "1-finally"]
FULL = "polyxla: Ctrl-C cannot be handled by the program, and interrupts it: no space left\n"
BOTH_SAVED = ["0-finally", "0-saved", "1-finally", "1-saved"]


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["command", "group"])
@pytest.mark.parametrize(
    ("number", "savers", "code", "text", "left"),
    [
        pytest.param(signal.SIGINT, "", 130, "polyxla: interrupted\n", BOTH_FINALLY, id="interrupt"),
        pytest.param(signal.SIGINT, "01", 130, "polyxla: interrupted\n", BOTH_SAVED, id="interrupt-saves"),
        pytest.param(
            signal.SIGINT, "full", 130, f"{FULL}{FULL}polyxla: interrupted\n", BOTH_FINALLY, id="full"
        ),
        pytest.param(signal.SIGTERM, "", -signal.SIGTERM, "", [], id="terminate"),
        pytest.param(signal.SIGTERM, "01", -signal.SIGTERM, "", BOTH_SAVED, id="both-save"),
        pytest.param(signal.SIGTERM, "0", -signal.SIGTERM, "", BOTH_SAVED[:2], id="one-saves"),
        pytest.param(signal.SIGHUP, "01", -signal.SIGHUP, "", BOTH_SAVED, id="hang-up"),
    ],
)
def test_a_signal_to_the_command_or_its_group_reaches_each_replica_once(
    send: Callable[[int, int], None],
    number: signal.Signals,
    savers: str,
    code: int,
    text: str,
    left: list[str],
    tmp_path: Path,
    install_plugin: PluginInstaller,
) -> None:
    code_of_runtime = (PROGRAMS / "bare_runtime.py").read_text()
    # Its fork server is in the group, too.
    install_plugin("forking", code_of_runtime.replace(" environs)", " environs, method='forkserver')"))
    command = [sys.executable, "-m", "polyxla", "run", "--runtime", "forking", "--each", "--devices", "2"]
    process = subprocess.Popen(
        [*command, str(PROGRAMS / "each_signalled.py"), savers],
        env={**os.environ, "FOLDER": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [tmp_path / "0.pid", tmp_path / "1.pid"]
        wait_for_files(*pids)
        send(process.pid, number)
        _, said = process.communicate(timeout=TIMEOUT_S)
        wait_for_end_of(int(pid.read_text()) for pid in pids)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, said) == (code, text)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == left


MONITORED = """
    from polyxla.tpu.monitor.server import monitored

    with monitored(["127.0.0.1", "127.0.0.2"], int(job.environ["HOST"]), job.environ) as found:
        return run_processes(job, range(len(job.devices)), [{**own, **found} for own in environs])
"""
WATCHED = """
    from os import environ
    from time import monotonic_ns

    from polyxla.tpu.monitor.replica_watch import watch_replicas

    # Its programs end all the time, so that it never waits.
    watch_replicas(environ, type("Probe", (), {"ended": lambda _: monotonic_ns(), "wait": lambda _: None}))
"""


def test_a_host_saves_although_another_has_ended_by_the_same_signal(
    tmp_path: Path, install_plugin: PluginInstaller
) -> None:
    code = (PROGRAMS / "bare_runtime.py").read_text()
    code = code.replace("    return run_processes(job, range(len(job.devices)), environs)\n", MONITORED)
    install_plugin("hosts", code.replace("    bare = Bare()\n", f"    bare = Bare()\n{WATCHED}"))
    command = [sys.executable, "-m", "polyxla", "run", "--runtime", "hosts", "--each", "--devices", "1"]
    shared = {**os.environ, POLYXLA_SECRET: "of one job", tpu_env.POLYXLA_MONITOR_PORT: str(free_ports(1)[0])}
    folders = [tmp_path / "0", tmp_path / "1"]
    hosts: list[subprocess.Popen[str]] = []
    try:
        for number, folder in enumerate(folders):
            folder.mkdir()
            script = [str(PROGRAMS / "each_signalled.py"), "0" if number == 0 else ""]
            environ = {**shared, "HOST": str(number), "FOLDER": str(folder)}
            hosts.append(
                subprocess.Popen([*command, *script], env=environ, stderr=subprocess.PIPE, text=True)
            )
        wait_for_files(*(folder / "0.pid" for folder in folders))
        for host in hosts:
            host.send_signal(signal.SIGTERM)
        said = [host.communicate(timeout=TIMEOUT_S)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [-signal.SIGTERM] * 2, said
    assert (folders[0] / "0-saved").exists()


def test_on_several_hosts_the_user_says_where_the_store_is(install_plugin: PluginInstaller) -> None:
    code = (PROGRAMS / "bare_runtime.py").read_text()
    install_plugin("pod", code.replace('"BARE", devices)', '"BARE", devices, host_count=2)'))
    done = _each("--runtime", "pod", "--devices", "1", SCRIPT, "return")
    assert done.returncode == 1
    assert "KeyError: 'MASTER_ADDR'" in done.stderr


def test_the_plan_says_that_the_program_runs_in_each_replica(tmp_path: Path) -> None:
    done = _each("--devices", "2", "--dry-run", "--json", SCRIPT)
    plan = json.loads(done.stdout)
    assert (plan["each"], plan["devices"]) == (True, [0, 1])
    done = _each("--devices", "1", "--json", SCRIPT, "return")
    assert json.loads(done.stderr)["each"] is True
    assert json.loads(done.stdout)[2][:4] == ["0", "0", "1", "1"]


def test_replicas_that_share_a_process_are_refused() -> None:
    job = Job(print, (), "bare", (0, 1), {}, Setting(None, "default"), main=_run_program, own_processes=True)
    errors: list[BaseException] = []

    def replica() -> None:
        try:
            job.run(1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replica)
    thread.start()
    thread.join(TIMEOUT_S)
    (error,) = errors
    assert isinstance(error, UsageError)
    assert "puts several replicas into a process" in str(error)


def test_devices_are_discovered_once_by_the_command_and_once_in_the_program(
    install_plugin: PluginInstaller, tmp_path: Path
) -> None:
    looks = 'open("looks", "a").write(f"{os.getpid()} ")\n    '
    code = (PROGRAMS / "bare_runtime.py").read_text()
    code = code.replace("    devices = tuple(", f"    {looks}devices = tuple(").replace(
        "from typing", "import os\nfrom typing", 1
    )
    install_plugin("counted", code)
    (tmp_path / "script.py").write_text(
        "from polyxla import launch\n"
        "print(launch(lambda replica: replica.ordinal), launch(lambda replica: 'again', devices=1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "polyxla", "run", "--runtime", "counted", "--devices", "2", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[0, 1] ['again']\n", "")
    # The second launch looks again: the devices may have changed.
    assert len((tmp_path / "looks").read_text().split()) == 3
