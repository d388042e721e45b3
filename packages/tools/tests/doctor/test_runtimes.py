"""The choice of the runtime and of its devices, by the core's own rules."""

from __future__ import annotations

from dataclasses import replace

from polyxla.plugin import PLUGINS, AttachedChip, Candidate, Claim, Device, Discovery, Setting, from_environ
from polyxla.plugin_manager import RuntimeEntry
from polyxla.selection import choose
from polyxla_testing import PluginInstaller
from polyxla_tools.doctor import runtimes
from polyxla_tools.doctor.findings import Finding, Status, problem
from polyxla_tools.doctor.host import HostPaths, gather_host
from polyxla_tools.doctor.runtimes import RuntimeFacts, gather_runtimes

CPUS = tuple(Device(index, "CPU", f"CPU {index}") for index in range(2))


def gathered(environ: dict[str, str], **asked: Setting) -> RuntimeFacts:
    return gather_runtimes(environ, from_environ(environ, **asked))


def chosen(*discoveries: Discovery) -> RuntimeFacts:
    """Return the facts where runtimes a, b ... answered these."""
    names = "abc"[: len(discoveries)]
    candidates = [
        Candidate(RuntimeEntry(name, ()), one) for name, one in zip(names, discoveries, strict=True)
    ]
    selection = choose(candidates, {})
    return RuntimeFacts(tuple(candidates), selection, None, (0,), (), ())


def test_the_chosen_runtime_is_named_with_its_reason(environ: dict[str, str]) -> None:
    (found,) = runtimes.check_choice(gathered(environ | {"PJRT_DEVICE": "CPU"}))
    assert (found.status, found.found) == (Status.OK, "pjrt: PJRT_DEVICE=CPU")


def test_a_missing_configuration_is_a_problem(
    environ: dict[str, str], install_plugin: PluginInstaller
) -> None:
    install_plugin.hide_others(keep=["polyxla-tools"])
    facts = gathered(environ)
    (found,) = runtimes.check_choice(facts)
    assert found.status is Status.PROBLEM
    assert found.found == "no runtime can be chosen (none is installed)"
    assert "./packages/runtime-pjrt" in found.fix
    host = gather_host(HostPaths())
    assert runtimes.check_devices(facts, host, is_emulated=False) == []


def test_a_runtime_that_is_not_installed_is_named_with_the_variable(
    environ: dict[str, str], install_plugin: PluginInstaller
) -> None:
    install_plugin.metadata("polyxla-runtime-xrt", version="0")
    facts = gathered(environ | {"XRT_TPU_CONFIG": "tpu_worker;0;localhost:8470"})
    (found,) = runtimes.check_choice(facts)
    assert "runtime 'xrt' is not installed" in found.found
    assert "XRT_TPU_CONFIG=tpu_worker;0;localhost:8470" in found.found


def test_a_broken_runtime_and_a_broken_plugin_are_problems(
    environ: dict[str, str], install_plugin: PluginInstaller
) -> None:
    install_plugin("broken", "raise ImportError('half of it is missing')")
    install_plugin("bent", "import no_such_module", group=PLUGINS)
    facts = gathered(environ)
    found = [*runtimes.check_other_runtimes(facts), *runtimes.check_plugins(facts)]
    problems = [finding for finding in found if finding.status is Status.PROBLEM]
    assert [finding.subject for finding in problems] == ["runtime", "plugins"]
    assert "half of it is missing" in problems[0].found
    assert problems[0].fix == "Repair or remove it: pip install --force-reinstall broken"
    assert "no_such_module" in problems[1].found
    assert runtimes.check_conflicts(facts) == []


def test_variables_that_ask_for_two_runtimes_are_a_problem() -> None:
    facts = chosen(
        Discovery(Claim.EXPLICIT, "A=1", "CPU", CPUS), Discovery(Claim.CONFIGURED, "B=1", "CPU", CPUS)
    )
    assert runtimes.check_conflicts(facts) == [
        problem(
            "variables",
            "B=1 asks for runtime 'b' and A=1 for 'a': 'a' wins",
            "Unset one of them, or name a runtime with --runtime.",
        )
    ]


def test_a_runtimes_own_note_is_a_note() -> None:
    facts = chosen(Discovery(Claim.FALLBACK, "the CPU", "CPU", CPUS, notes=("X=1 is not read: unset it",)))
    assert runtimes.check_conflicts(facts) == [Finding(Status.NOTE, "variables", "X=1 is not read: unset it")]


def test_a_runtime_that_cannot_run_matters_only_if_it_is_asked_for() -> None:
    facts = chosen(
        Discovery(Claim.EXPLICIT, "A=1", "CPU", CPUS),
        Discovery(Claim.NONE, "", unavailable="it has no devices", fix="Attach one."),
        Discovery(Claim.FALLBACK, "anything", unavailable="it has no devices", fix="Attach one."),
    )
    ignored, asked_for = runtimes.check_other_runtimes(facts)
    assert (ignored.status, ignored.fix) == (Status.OK, "")
    assert (asked_for.status, asked_for.fix) == (Status.NOTE, "Attach one.")
    assert asked_for.found == "c cannot run here: it has no devices"


class TestDevices:
    def test_an_emulated_tpu_has_all_of_its_devices(self, environ: dict[str, str]) -> None:
        facts = gathered(environ | {"POLYXLA_EMULATE": "v4-16"})
        (found,) = runtimes.check_devices(facts, gather_host(HostPaths()), is_emulated=True)
        assert found.found == "8 TPU devices of a v4-16, with 2 hosts; a launch uses 8"

    def test_more_devices_than_there_are_is_a_problem(self, environ: dict[str, str]) -> None:
        facts = gathered(environ | {"CPU_NUM_DEVICES": "2", "POLYXLA_DEVICES": "3", "PJRT_DEVICE": "CPU"})
        (found,) = runtimes.check_devices(facts, gather_host(HostPaths()), is_emulated=False)
        assert found.status is Status.PROBLEM
        assert found.found.endswith("(from POLYXLA_DEVICES=3)")
        assert facts.devices == ()

    def test_a_tpu_beside_a_variable_for_the_cpu_is_noted(self, environ: dict[str, str]) -> None:
        facts = gathered(environ | {"PJRT_DEVICE": "CPU"})
        host = replace(gather_host(HostPaths()), chips=(AttachedChip("v4", "0000:00:05.0"),) * 4)
        _, found = runtimes.check_devices(facts, host, is_emulated=False)
        assert found.status is Status.NOTE
        assert found.found == "runtime pjrt does not use the TPU chips of this machine"

    def test_one_visible_chip_of_several_is_noted(self) -> None:
        one = (Device(0, "TPU", "v4 chip 0 core 0"),)
        facts = chosen(Discovery(Claim.ATTACHED, "4 TPU chips attached", "TPU", one))
        host = replace(gather_host(HostPaths()), chips=(AttachedChip("v4", "0000:00:05.0"),) * 4)
        _, found = runtimes.check_devices(facts, host, is_emulated=False)
        assert found.found == "4 TPU chips are attached, and programs see 1 device"
        assert "TPU_VISIBLE_CHIPS" in found.fix
