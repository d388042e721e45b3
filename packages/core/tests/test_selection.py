"""The strongest claim wins; a missing runtime that was asked for is never silently replaced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyxla import (
    BrokenPluginError,
    RuntimeNotInstalledError,
    RuntimeUnavailableError,
    UnknownRuntimeError,
    UsageError,
)
from polyxla.plugin import Claim, Device, Discovery, Setting
from polyxla.plugin_manager import RuntimeEntry, find_runtime
from polyxla.selection import Candidate, choose, discover, discover_all, select
from polyxla_testing import PluginInstaller

UNASKED = Setting(None, "default")
DEVICE = Device(0, "TOY", "toy device 0")
TPU = "tpu_worker;0;10.0.0.2:8470"
PROGRAMS = Path(__file__).parent / "programs"
RAISING = (PROGRAMS / "raising_runtime.py").read_text()


def _toy(variable: str, claim: Claim, unavailable: str | None = None) -> str:
    code = (PROGRAMS / "claiming_runtime.py").read_text()
    code = code.replace('VARIABLE = "TOY"', f"VARIABLE = {variable!r}")
    code = code.replace("CLAIM = Claim.EXPLICIT", f"CLAIM = Claim.{claim.name}")
    return code.replace("str | None = None", f"str | None = {unavailable!r}")


def _candidate(name: str, claim: Claim, reason: str = "", **fields: Any) -> Candidate:
    found = Discovery(claim, reason or f"{name} is asked for", devices=(DEVICE,), **fields)
    return Candidate(RuntimeEntry(name, ()), found)


def _broken(name: str) -> Candidate:
    return Candidate(RuntimeEntry(name, ()), error=BrokenPluginError(f"{name} is broken", fix="Repair it."))


@pytest.fixture(autouse=True)
def _alone(install_plugin: PluginInstaller) -> None:
    install_plugin.hide_others()


@pytest.mark.parametrize("stronger", [Claim.FALLBACK, Claim.ATTACHED, Claim.CONFIGURED, Claim.EXPLICIT])
def test_the_strongest_claim_wins(stronger: Claim) -> None:
    weaker = Claim(stronger - 1)
    for candidates in (
        [_candidate("strong", stronger), _candidate("weak", weaker)],
        [_candidate("weak", weaker), _candidate("strong", stronger)],
    ):
        selection = choose(candidates, {})
        assert (selection.runtime, selection.reason) == ("strong", "strong is asked for")
        assert selection.implicit is (stronger < Claim.CONFIGURED), "a choice that no setting made is printed"


def test_a_named_runtime_is_loaded_without_the_others(install_plugin: PluginInstaller) -> None:
    install_plugin("named", _toy("NAMED", Claim.EXPLICIT))
    install_plugin("other", "raise RuntimeError('imported')")
    selection = select({"OTHER": "1"}, Setting("named", "--runtime named"), "tpu")
    assert (selection.runtime, selection.reason, selection.implicit) == ("named", "--runtime named", False)
    assert selection.warnings == ()
    assert selection.discovery.kind == "tpu"


def test_a_named_runtime_that_is_unknown_is_an_error() -> None:
    with pytest.raises(UnknownRuntimeError, match=r"\(from --runtime nosuch\)"):
        select({}, Setting("nosuch", "--runtime nosuch"))


def test_a_named_runtime_that_cannot_run_is_an_error(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", _toy("TOY", Claim.NONE, unavailable="no chip is attached"))
    with pytest.raises(RuntimeUnavailableError) as caught:
        select({}, Setting("toy", "POLYXLA_RUNTIME=toy"))
    assert str(caught.value) == (
        "runtime 'toy' cannot run here: no chip is attached (from POLYXLA_RUNTIME=toy). Plug it in."
    )


def test_a_named_runtime_that_is_broken_is_an_error(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", "raise ImportError('half installed')")
    with pytest.raises(
        BrokenPluginError, match="runtime 'toy' cannot be imported: ImportError: half installed"
    ):
        select({}, Setting("toy", "--runtime toy"))


def test_the_winner_that_cannot_run_is_an_error_and_not_a_fallback() -> None:
    candidates = [
        _candidate(
            "tpu", Claim.ATTACHED, "4 chips", unavailable="their driver is missing", fix="Install it."
        ),
        _candidate("cpu", Claim.FALLBACK),
    ]
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose(candidates, {})
    assert str(caught.value) == "runtime 'tpu' cannot run here: their driver is missing. Install it."


def test_the_winner_that_cannot_run_names_the_variable_that_chose_it() -> None:
    candidates = [_candidate("xrt", Claim.CONFIGURED, "XRT=1", unavailable="not yet", fix="Wait.")]
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose(candidates, {})
    assert str(caught.value) == "runtime 'xrt' cannot run here: not yet (from XRT=1). Wait."


@pytest.mark.parametrize("claim", [Claim.FALLBACK, Claim.ATTACHED, Claim.CONFIGURED, Claim.EXPLICIT])
def test_equal_claims_are_refused(claim: Claim) -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose(
            [_candidate("a", claim, "A=1"), _candidate("b", claim, "B=1"), _candidate("c", Claim.NONE)], {}
        )
    assert str(caught.value) == (
        "runtimes 'a' (A=1) and 'b' (B=1) claim this environment equally. "
        "Name one with --runtime or POLYXLA_RUNTIME."
    )


@pytest.mark.parametrize(
    ("candidates", "text"),
    [
        pytest.param(
            [],
            "no runtime can be chosen (none is installed). "
            "Install one, such as: pip install ./packages/runtime-pjrt",
            id="none-installed",
        ),
        pytest.param(
            [_candidate("a", Claim.NONE), _candidate("b", Claim.NONE, unavailable="no chip"), _broken("c")],
            "no runtime can be chosen (a: not asked for; b: no chip; c: c is broken. Repair it.). "
            "Name one with --runtime or POLYXLA_RUNTIME.",
            id="none-claims",
        ),
    ],
)
def test_no_claim_is_an_error(candidates: list[Candidate], text: str) -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose(candidates, {})
    assert str(caught.value) == text


def test_pjrt_device_wins_over_an_xrt_configuration_and_the_warning_says_so() -> None:
    candidates = [
        _candidate("pjrt", Claim.EXPLICIT, "PJRT_DEVICE=CPU"),
        _candidate("xrt", Claim.CONFIGURED, f"XRT_TPU_CONFIG={TPU}"),
    ]
    selection = choose(candidates, {"PJRT_DEVICE": "CPU", "XRT_TPU_CONFIG": TPU})
    assert selection.runtime == "pjrt"
    (warning,) = selection.warnings
    assert warning == (
        f"XRT_TPU_CONFIG={TPU} asks for runtime 'xrt' and PJRT_DEVICE=CPU for 'pjrt': 'pjrt' wins. "
        "Unset one of them, or name a runtime with --runtime."
    )


@pytest.mark.parametrize("broken", [[], [_broken("xrt")]], ids=["not-installed", "broken"])
def test_a_conflict_is_reported_even_if_xrt_is_missing_or_broken(broken: list[Candidate]) -> None:
    environ = {"PJRT_DEVICE": "CPU", "XRT_TPU_CONFIG": TPU}
    selection = choose([_candidate("pjrt", Claim.EXPLICIT, "PJRT_DEVICE=CPU"), *broken], environ)
    assert selection.runtime == "pjrt"
    assert selection.warnings[0].startswith(
        f"XRT_TPU_CONFIG={TPU} asks for runtime 'xrt' and PJRT_DEVICE=CPU for 'pjrt': 'pjrt' wins."
    )
    assert selection.warnings[1:] == (("left out: xrt is broken. Repair it.",) if broken else ())


def test_the_stronger_of_two_claims_wins_with_a_warning(install_plugin: PluginInstaller) -> None:
    install_plugin("toy-a", _toy("TOY_A", Claim.CONFIGURED))
    install_plugin("toy-b", _toy("TOY_B", Claim.EXPLICIT))
    selection = select({"TOY_A": "1", "TOY_B": "2"}, UNASKED)
    assert selection.runtime == "toy-b"
    (warning,) = selection.warnings
    assert warning == (
        "TOY_A=1 asks for runtime 'toy-a' and TOY_B=2 for 'toy-b': 'toy-b' wins. "
        "Unset one of them, or name a runtime with --runtime."
    )


def test_a_weak_claim_is_not_a_conflict() -> None:
    assert choose([_candidate("a", Claim.EXPLICIT), _candidate("b", Claim.ATTACHED)], {}).warnings == ()


def test_notes_of_the_winner_and_of_unclaimed_runtimes_are_warnings() -> None:
    noted = _candidate("a", Claim.EXPLICIT, notes=("TPU_CORES has no effect.",))
    silent = _candidate("b", Claim.NONE, notes=("XRT_TPU_CONFG is not a variable of XRT.",))
    # The notes of a runtime that claims less are not printed.
    rival = _candidate("c", Claim.FALLBACK, notes=("not mine",))
    assert choose([noted, silent, rival], {}).warnings == (
        "TPU_CORES has no effect.",
        "XRT_TPU_CONFG is not a variable of XRT.",
    )


@pytest.mark.parametrize(
    ("others", "environ"),
    [
        pytest.param([], {"XRT_TPU_CONFIG": TPU}, id="alone"),
        pytest.param([_candidate("cpu", Claim.FALLBACK)], {"XRT_TPU_CONFIG": TPU}, id="beside-a-fallback"),
        pytest.param(
            [_candidate("pjrt", Claim.ATTACHED)], {"XRT_TPU_CONFIG": TPU}, id="beside-attached-chips"
        ),
        pytest.param([_candidate("toy", Claim.CONFIGURED)], {"XRT_TPU_CONFIG": TPU}, id="beside-a-cluster"),
    ],
)
def test_xrt_asked_for_and_missing_is_never_a_fallback(
    others: list[Candidate], environ: Mapping[str, str]
) -> None:
    with pytest.raises(RuntimeNotInstalledError) as caught:
        choose(others, environ)
    assert str(caught.value) == (
        "runtime 'xrt' is not installed (installed: none) "
        f"(from XRT_TPU_CONFIG={TPU}). "
        "Install it: pip install ./packages/bridge ./packages/runtime-xrt"
    )


def test_xrt_asked_for_and_broken_is_never_a_fallback(install_plugin: PluginInstaller) -> None:
    install_plugin("xrt", "raise ImportError('no grpc')")
    install_plugin("cpu", _toy("PATH", Claim.FALLBACK))
    with pytest.raises(BrokenPluginError, match="runtime 'xrt' cannot be imported: ImportError: no grpc"):
        select({"XRT_TPU_CONFIG": TPU, "PATH": "1"}, UNASKED)
    assert select({"XRT_TPU_CONFIG": "", "PATH": "1"}, UNASKED).runtime == "cpu", "empty is as good as unset"


def test_a_named_runtime_is_used_even_if_another_is_missing(install_plugin: PluginInstaller) -> None:
    install_plugin("cpu", _toy("CPU", Claim.FALLBACK))
    assert select({"XRT_TPU_CONFIG": TPU}, Setting("cpu", "--runtime cpu")).runtime == "cpu"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        pytest.param(
            "raise ValueError('bad day')",
            "runtime 'broken' cannot be imported: ValueError: bad day (from broken of broken). "
            "Repair or remove it: pip install --force-reinstall broken",
            id="import",
        ),
        pytest.param(
            RAISING,
            "runtime 'broken' failed to discover devices: ValueError: bad day (from broken). "
            "Report it to its authors: polyxla_discover_devices must return `unavailable`, not raise.",
            id="discovery-raises",
        ),
        pytest.param(
            "",
            "runtime 'broken' does not implement polyxla_discover_devices (from broken). Implement the hook.",
            id="no-discovery",
        ),
    ],
)
def test_one_broken_runtime_leaves_the_others_working(
    code: str, text: str, install_plugin: PluginInstaller
) -> None:
    install_plugin("broken", code)
    install_plugin("works", _toy("WORKS", Claim.EXPLICIT))
    broken, works = discover_all({"WORKS": "1"})
    assert (broken.name, broken.why_not, broken.claim) == ("broken", text, Claim.NONE)
    assert (works.name, works.why_not, works.claim) == ("works", None, Claim.EXPLICIT)
    selection = select({"WORKS": "1"}, UNASKED)
    assert selection.runtime == "works"
    assert selection.warnings == (f"left out: {text}",)


def test_discovery_receives_the_environment_and_the_accelerator(install_plugin: PluginInstaller) -> None:
    install_plugin("toy", _toy("TOY", Claim.ATTACHED))
    candidate = discover(find_runtime("toy", "test"), {"TOY": "yes"}, "tpu")
    assert candidate.discovery == Discovery(Claim.ATTACHED, "TOY=yes", "tpu", (DEVICE,), fix="Plug it in.")


def test_every_refusal_is_a_usage_error() -> None:
    for kind in (BrokenPluginError, RuntimeNotInstalledError, RuntimeUnavailableError, UnknownRuntimeError):
        assert issubclass(kind, UsageError)
        assert kind.exit_code == 2
