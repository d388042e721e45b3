"""The trial, with real replicas, and each way in which it can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyxla.plugin import from_environ
from polyxla_testing import PluginInstaller
from polyxla_testing.processes import wait_until
from polyxla_tools.doctor import trial
from polyxla_tools.doctor.findings import Status
from polyxla_tools.doctor.runtimes import RuntimeFacts, gather_runtimes
from polyxla_tools.doctor.trial import TrialPlan, TrialResult, check_trial, plan_trial, run_trial
from polyxla_tools.doctor.trial_process import Measured

TIMEOUT_S = 100.0
HOOKS = """
import os, signal, sys, time
from polyxla import hookimpl

@hookimpl
def polyxla_replica_started(replica):
    if replica.ordinal == 1:
        {}
    elif {}:
        time.sleep(1000)
"""


@pytest.fixture
def cpu(environ: dict[str, str]) -> dict[str, str]:
    return environ | {"PJRT_DEVICE": "CPU"}


def gathered(environ: dict[str, str]) -> RuntimeFacts:
    return gather_runtimes(environ, from_environ(environ))


def plan_of(environ: dict[str, str]) -> TrialPlan:
    plan = plan_trial(environ, gathered(environ), is_emulated="POLYXLA_EMULATE" in environ)
    assert plan
    return plan


def processes_of(directory: Path) -> list[str]:
    marks = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() in (process / "environ").read_bytes():
                marks.append(process.name)
        except OSError:
            continue
    return [pid for pid in marks if int(pid) != os.getpid()]


@pytest.mark.slow
def test_two_replicas_on_the_cpu_add_up(cpu: dict[str, str]) -> None:
    outcome = run_trial(cpu, plan_of(cpu), TIMEOUT_S)
    (found,) = check_trial(outcome)
    assert found.status is Status.OK, found
    assert found.found.startswith("an all-reduce on 2 replicas of pjrt: first result after ")
    assert [replica["total"] for replica in outcome.replicas] == [3.0, 3.0]
    assert all(0 < replica["step_s"] < replica["first_s"] < TIMEOUT_S for replica in outcome.replicas)
    assert outcome.replica_bytes
    assert outcome.replica_bytes > 100 << 20


@pytest.mark.slow
def test_the_chips_of_an_emulated_tpu_add_up(environ: dict[str, str]) -> None:
    environ |= {"POLYXLA_EMULATE": "v2-8"}
    plan = plan_of(environ)
    assert plan.devices == tuple(range(8))
    (found,) = check_trial(run_trial(environ, plan, TIMEOUT_S))
    assert found.status is Status.OK, found


def test_a_runtime_with_one_device_is_tried_on_it(cpu: dict[str, str]) -> None:
    cpu |= {"CPU_NUM_DEVICES": "1"}
    plan = plan_of(cpu)
    assert plan == TrialPlan("pjrt", (0,), "the runtime has one")
    replica: Measured = {"total": 1.0, "first_s": 1.0, "step_s": 0.1, "process": 1, "peak_bytes": 1}
    (found,) = check_trial(TrialResult(plan, (replica,)))
    assert found.found.startswith("an all-reduce on 1 replica of pjrt")
    assert found.found.endswith("; the runtime has one")


def test_where_two_replicas_cannot_run_one_is_tried(cpu: dict[str, str]) -> None:
    plan = plan_of(cpu | {"POLYXLA_PJRT_PROCESSES": "3"})
    assert plan.devices == (0,)
    assert plan.why.startswith("several cannot be used: ")
    assert "POLYXLA_PJRT_PROCESSES=3" in plan.why


def test_a_host_of_several_tries_a_device_of_its_own(environ: dict[str, str]) -> None:
    environ |= {"POLYXLA_EMULATE": "v4-16", "POLYXLA_EMULATE_HOST": "0"}
    plan = plan_trial(environ, gathered(environ), is_emulated=False)
    assert plan
    assert plan.devices == (0,)
    assert "polyxla pod run" in plan.why


def test_a_large_emulated_tpu_is_tried_in_part_or_on_one_device(environ: dict[str, str]) -> None:
    environ |= {"POLYXLA_EMULATE": "v4-64"}
    assert len(plan_of(environ).devices) in (1, 8)


def test_without_a_runtime_there_is_no_trial(environ: dict[str, str]) -> None:
    environ |= {"PJRT_DEVICE": "GPU"}
    assert plan_trial(environ, gathered(environ), is_emulated=False) is None


@pytest.mark.slow
def test_a_replica_that_fails_is_a_problem(cpu: dict[str, str], install_plugin: PluginInstaller) -> None:
    install_plugin.listener("faulty", HOOKS.format("raise ValueError('the model has gone')", False))
    (found,) = check_trial(run_trial(with_plugins(cpu, install_plugin), plan_of(cpu), TIMEOUT_S))
    assert found.status is Status.PROBLEM
    assert found.found == "an all-reduce on 2 replicas of pjrt failed: ValueError: the model has gone"
    assert "polyxla_tools.doctor.trial_process pjrt '[0, 1]' 0 answer.json" in found.fix


@pytest.mark.slow
def test_a_trial_that_hangs_ends_at_its_deadline_with_all_its_processes(
    cpu: dict[str, str], install_plugin: PluginInstaller
) -> None:
    install_plugin.listener(
        "asleep", HOOKS.format("print('going to sleep', flush=True); time.sleep(1000)", True)
    )
    environ = with_plugins(cpu, install_plugin)
    # Replicas must start before it, on a busy machine too.
    outcome = run_trial(environ, plan_of(cpu), 30)
    assert outcome.error == "it did not end within 30 s; its last line was: going to sleep"
    wait_until(lambda: not processes_of(install_plugin.directory), "the end of all processes")


def test_a_process_that_crashes_before_python_answers_is_a_problem(
    cpu: dict[str, str], install_plugin: PluginInstaller
) -> None:
    (install_plugin.directory / "polyxla_pjrt.py").write_text("import os; os.abort()")
    outcome = run_trial(with_plugins(cpu, install_plugin), TrialPlan("pjrt", (0, 1)), TIMEOUT_S)
    assert outcome.error
    assert outcome.error.startswith("its process was ended by SIGABRT")


def test_a_disk_that_is_full_is_the_trials_reason(tmp_path: Path) -> None:
    # A trial that finds no space leaves a file without content.
    answer, log = tmp_path / "answer", tmp_path / "log"
    answer.touch()
    log.write_text("OSError: [Errno 28] No space left on device\n")
    assert trial._outcome(TrialPlan("pjrt", (0,)), answer, log, 1).error == log.read_text().strip()


def test_a_wrong_sum_is_a_problem() -> None:
    replica: Measured = {"total": 1.0, "first_s": 1.0, "step_s": 0.1, "process": 1, "peak_bytes": 1}
    (found,) = check_trial(TrialResult(TrialPlan("pjrt", (0, 1)), (replica, replica)))
    assert found.status is Status.PROBLEM
    assert "resulted in [1.0, 1.0] instead of 3" in found.found


def test_threads_of_one_process_share_its_memory() -> None:
    replica: Measured = {"total": 3.0, "first_s": 1.0, "step_s": 0.1, "process": 1, "peak_bytes": 100}
    assert TrialResult(TrialPlan("pjrt", (0, 1)), (replica, replica)).replica_bytes == 50


def with_plugins(environ: dict[str, str], install_plugin: PluginInstaller) -> dict[str, str]:
    return environ | {"PYTHONPATH": str(install_plugin.directory)}
