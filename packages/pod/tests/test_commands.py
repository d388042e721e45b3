"""The command line: dry runs, JSON, many hosts, and jobs that are listed, read and ended."""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import wait_for_end_of, wait_until

if TYPE_CHECKING:
    from conftest import Pod


def test_a_dry_run_prints_the_commands_of_each_host(stand_in: Pod) -> None:
    how = ["--runtime", "pjrt", "--env", "A=b c", "--directory", "/data", "--dry-run"]
    done = stand_in.run("one,two", *how, "--", "python", "train.py", "--name", "x y")
    assert done.returncode == 0
    first, start, second, _ = done.stdout.splitlines()
    program = f"'{sys.executable} -m polyxla_pod.host'"
    assert first == f"[w0] ssh -T -o BatchMode=yes one {program}"
    assert second == f"[w1] ssh -T -o BatchMode=yes two {program}"
    assert start == "[w0]   in /data: env POLYXLA_RUNTIME=pjrt 'A=b c' python train.py --name 'x y'"


def test_a_dry_run_of_1024_hosts_takes_less_than_a_second_of_the_processor(stand_in: Pod) -> None:
    hosts = ",".join(f"host-{number}" for number in range(1024))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = stand_in.run(hosts, "--dry-run", "--json", "--", "python", "train.py")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [host["name"] for host in json.loads(done.stdout)["hosts"]] == hosts.split(",")
    # The wall clock would also count what else this machine does.
    assert after.ru_utime - before.ru_utime < 1.0


def test_json_is_one_document_and_the_output_is_on_standard_error(stand_in: Pod) -> None:
    done = stand_in.run("one,two", "--json", "--", "sh", "-c", "echo step 3 loss 0.5; exit 4")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["attempts"]) == (4, 4, 1)
    assert document["failures"][0].endswith("the command ended with exit code 4")
    assert [host["name"] for host in document["hosts"]] == ["one", "two"]
    assert "step 3 loss 0.5" in done.stderr


@pytest.mark.parametrize("text", ["A", "=b", "1A=b", "A-B=c"])
def test_a_variable_without_name_or_value_is_an_error(stand_in: Pod, text: str) -> None:
    done = stand_in.run("one", "--env", text, "--", "true")
    assert done.returncode == 2
    assert f"'{text}' is not a variable with a value (from --env {text})" in done.stderr


def test_a_directory_that_does_not_exist_is_not_copied(stand_in: Pod) -> None:
    done = stand_in.run("one", "--sync", "/no/such", "--", "true")
    assert done.returncode == 2
    assert "there is no directory /no/such (from --sync /no/such)" in done.stderr


def test_the_job_ends_when_nothing_reads_its_output(stand_in: Pod) -> None:
    code = "import time\nwhile True: print('line', flush=True); time.sleep(0.1)"
    process = stand_in.start_run("one,two", "--", sys.executable, "-c", code)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 128 + signal.SIGPIPE


@pytest.mark.slow
def test_a_pager_that_reads_nothing_for_a_while_does_not_end_the_job(stand_in: Pod) -> None:
    code = "import time\nfor n in range(8000): print('x' * 40, n)\ntime.sleep(4)"
    process = stand_in.start_run("one", "--lost-after", "1", "--", sys.executable, "-c", code)
    # The pipe is full long before.
    time.sleep(4)
    done = stand_in.finish(process)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8000


def test_a_pager_that_reads_nothing_does_not_keep_the_other_hosts_from_being_ended(stand_in: Pod) -> None:
    process = stand_in.start_run("one,two", *stand_in.program("chatter.py"))
    wait_for_end_of(stand_in.pids(1))
    assert stand_in.finish(process).returncode == 3


@pytest.mark.slow
def test_a_running_job_is_listed_read_and_ended(stand_in: Pod) -> None:
    process = stand_in.start_run("one,two", *stand_in.program("sleeper.py"))
    pids = stand_in.pids(4)

    def states() -> list[str]:
        jobs = json.loads(stand_in.call("ps", "--json").stdout)["jobs"]
        return [host["state"] for job in jobs for host in job["hosts"] if job["running"]]

    wait_until(lambda: states() == ["running"] * 2, "the hosts' states")
    (job,) = json.loads(stand_in.call("ps", "--json").stdout)["jobs"]
    assert "running" in stand_in.call("ps").stdout
    wait_until(lambda: len(stand_in.unfolded(stand_in.call("logs", job["id"]).stdout)) == 2, "the log")
    rows = stand_in.call("ps", job["id"]).stdout.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [["w0", "one", "running"], ["w1", "two", "running"]]
    ended = stand_in.call("kill", job["id"], "--json")
    assert json.loads(ended.stdout) == {"job": job["id"], "ended": True}
    assert stand_in.finish(process).returncode == 128 + signal.SIGTERM
    wait_for_end_of(pids)
    assert "exit code 143" in stand_in.call("ps").stdout


@pytest.mark.slow
def test_a_log_has_every_hosts_lines_also_hidden_tracebacks(stand_in: Pod) -> None:
    done = stand_in.run("one,two", "--", sys.executable, "-c", "print('hello'); raise ValueError('boom')")
    assert done.stderr.count("Traceback") == 1
    (first,) = re.findall(r"polyxla: error: w(\d)", done.stderr)[:1]
    lines = [json.loads(line) for line in stand_in.call("logs", "--json").stdout.splitlines()]
    assert {"ValueError: boom", "hello"} <= {line["text"] for line in lines if int(first) in line["hosts"]}
    only = stand_in.call("logs", "--host", first).stdout
    assert f"[w{first}] ValueError: boom\n" in only
    assert f"[w{1 - int(first)}]" not in only


def test_a_log_can_be_followed_to_the_jobs_end(stand_in: Pod) -> None:
    process = stand_in.start_run("one,two", *stand_in.program("steps.py", "2"))
    # The log is there before the first host is connected.
    wait_until(lambda: bool(list(stand_in.directory.glob("state/polyxla/pod/*/job.json"))), "the job")
    followed = stand_in.call("logs", "--follow")
    assert stand_in.finish(process).returncode == 0
    steps = [f"step {n}, loss 0.5" for n in range(3)]
    assert stand_in.unfolded(followed.stdout) == {"w0": steps, "w1": steps}


def test_the_launchers_death_is_in_the_list(stand_in: Pod) -> None:
    process = stand_in.start_run("one,two", *stand_in.program("sleeper.py"))
    pids = stand_in.pids(4)
    process.kill()
    process.wait()
    wait_for_end_of(pids)
    assert "launcher was killed" in stand_in.call("ps").stdout


def test_a_job_that_does_not_exist_is_an_error(stand_in: Pod) -> None:
    for command in ("logs", "kill", "ps"):
        done = stand_in.call(command, "1234")
        assert done.returncode == 2
        assert "there is no job 1234. `polyxla pod ps` lists the jobs" in done.stderr


def test_the_first_failure_is_that_which_explains_the_others(stand_in: Pod) -> None:
    # Host 0 fails at once because of host 1, whose own error comes later.
    script = (
        "import os, time\nclass ReplicaLostError(Exception): pass\n"
        "if os.environ['N'] == '0': raise ReplicaLostError('host 1 failed')\n"
        "time.sleep(0.7); raise ValueError('the cause')"
    )
    done = stand_in.run("one,two", "--env", "N={host}", "--", sys.executable, "-c", script)
    assert done.stderr.count("Traceback") == 1
    assert "[w1] ValueError: the cause\n" in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("polyxla: error")]
    assert errors[0] == "polyxla: error: w1 (two): the command ended with exit code 1"


def many_hosts(pod: Pod, count: int) -> tuple[float, float]:
    """Run a command on many hosts; return the first line's time and the launcher's peak memory in MB."""
    hosts = ",".join(f"host-{number}" for number in range(count))
    begin = time.monotonic()
    process = pod.start_run(hosts, "--connect-timeout", "60", *pod.program("steps.py", str(count)))
    assert process.stdout
    first = process.stdout.readline()
    first_s = time.monotonic() - begin
    status = Path(f"/proc/{process.pid}/status").read_text()
    done = pod.finish(process)
    assert done.returncode == 0
    lines = (first + done.stdout).splitlines()
    # Under load a host may be late, which makes another line.
    assert [line for line in lines if line.startswith(f"[w0-w{count - 1}] ")]
    assert {line.rpartition("] ")[2] for line in lines} == {f"step {n}, loss 0.5" for n in range(3)}
    return first_s, int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.slow
def test_lines_of_twelve_hosts_are_folded(stand_in: Pod) -> None:
    many_hosts(stand_in, 12)


@pytest.mark.long
def test_64_hosts_are_folded_quickly_in_little_memory(stand_in: Pod) -> None:
    first_s, peak_mb = many_hosts(stand_in, 64)
    assert first_s < 10
    assert peak_mb < 300
