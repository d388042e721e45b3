"""The examination: gathers the facts, runs the trial and all checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla.plugin import POLYXLA_EMULATE, LaunchSettings
from polyxla_tools.doctor import host_checks, packages, runtimes, variables
from polyxla_tools.doctor.findings import Finding, Status
from polyxla_tools.doctor.host import HostFacts, HostPaths, gather_host
from polyxla_tools.doctor.packages import PackageFacts, gather_packages
from polyxla_tools.doctor.runtimes import RuntimeFacts, gather_runtimes
from polyxla_tools.doctor.trial import TrialResult, check_trial, plan_trial, run_trial

_ORDER = (Status.OK, Status.NOTE, Status.PROBLEM)


@dataclass(frozen=True)
class Facts:
    """Everything that is known of this machine before the trial.

    Attributes:
        environ: the environment.
        packages: the installed distributions.
        host: this machine.
        runtimes: the runtimes, and the choice.
    """

    environ: Mapping[str, str]
    packages: PackageFacts
    host: HostFacts
    runtimes: RuntimeFacts

    @property
    def is_emulated(self) -> bool:
        """Whether the TPU is emulated."""
        return bool(self.environ.get(POLYXLA_EMULATE))


def gather(environ: Mapping[str, str], settings: LaunchSettings) -> Facts:
    """Gather the facts; nothing is opened or changed.

    Args:
        environ: the environment to examine.
        settings: the requested runtime and devices.
    """
    return Facts(
        environ=environ,
        packages=gather_packages(environ),
        host=gather_host(HostPaths.of(environ)),
        runtimes=gather_runtimes(environ, settings),
    )


def attempt(facts: Facts, timeout_s: float) -> TrialResult | None:
    """Run the trial; None if no runtime can be used.

    Args:
        facts: the facts.
        timeout_s: longest time, in seconds.
    """
    plan = plan_trial(facts.environ, facts.runtimes, is_emulated=facts.is_emulated)
    if plan is None:
        return None
    try:
        return run_trial(facts.environ, plan, timeout_s)
    # The machine may have no memory for a process or no space for the log. The other findings still help.
    except OSError as error:
        return TrialResult(plan, error=f"it could not be started: {error}")


def examine(facts: Facts, outcome: TrialResult | None, loader_workers: int) -> list[Finding]:
    """Run all checks.

    Args:
        facts: the facts.
        outcome: how the trial ended; None if there was none.
        loader_workers: how many workers the DataLoader of each replica has.

    Returns:
        The findings, problems last.
    """
    host, found = facts.host, facts.runtimes
    measured = outcome.replica_bytes if outcome else None
    findings = [
        *host_checks.check_system(host),
        *packages.check_python(facts.packages),
        *packages.check_frameworks(facts.packages),
        *packages.check_requirements(facts.packages),
        *packages.check_libtpu(facts.packages, is_needed=bool(host.chips)),
        *runtimes.check_choice(found),
        *runtimes.check_other_runtimes(found),
        *runtimes.check_plugins(found),
        *runtimes.check_conflicts(found),
        *runtimes.check_devices(found, host, is_emulated=facts.is_emulated),
        *variables.check_variables(facts.environ, found),
        *host_checks.check_plugin(facts.environ, host),
        *host_checks.check_chips(host),
        *host_checks.check_holders(host),
        *host_checks.check_libtpu_files(host),
        *host_checks.check_shared_memory(host),
        *host_checks.check_disks(host),
        *host_checks.check_memory(
            host, len(found.devices) or 1, loader_workers, measured or host_checks.REPLICA_BYTES
        ),
        *(check_trial(outcome) if outcome else []),
    ]
    # Problems come last, where a terminal still shows them. The sort keeps the order of the checks.
    return sorted(findings, key=lambda finding: _ORDER.index(finding.status))
