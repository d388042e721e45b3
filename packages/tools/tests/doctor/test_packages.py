"""Versions that do not fit are named, from real metadata on the path."""

from __future__ import annotations

import pytest

from polyxla_testing import PluginInstaller
from polyxla_tools.doctor.findings import Finding, Status
from polyxla_tools.doctor.packages import (
    PackageFacts,
    check_frameworks,
    check_libtpu,
    check_python,
    check_requirements,
    gather_packages,
)


def one_problem(findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.status is Status.PROBLEM]
    return found


def test_the_installed_versions_fit(environ: dict[str, str]) -> None:
    facts = gather_packages(environ)
    findings = [*check_python(facts), *check_frameworks(facts), *check_requirements(facts)]
    assert [finding.status for finding in findings] == [Status.OK] * 3
    assert "torch_xla 2.9.0" in findings[1].found


def test_a_framework_of_another_release_is_named(
    environ: dict[str, str], install_plugin: PluginInstaller
) -> None:
    install_plugin.metadata("torch_xla", version="2.8.0")
    found = one_problem(check_requirements(gather_packages(environ)))
    assert "polyxla-runtime-pjrt 0.1.0" in found.found
    assert found.found.endswith(": torch-xla==2.9.* is required, and torch-xla 2.8.0 is installed")
    assert found.fix == "Install it: pip install 'torch-xla==2.9.*'"


def test_a_missing_distribution_and_one_of_ours_are_named() -> None:
    facts = PackageFacts(
        python="3.11.1",
        requires_python=">=3.11",
        installed={"polyxla-bridge": "0.1.0", "polyxla-core": "0.2.0"},
        requirements={
            "polyxla-bridge": ("jaxlib==0.10.2", "grpcio>=1; extra == 'no'", "polyxla-core==0.1.0")
        },
        libtpu=None,
    )
    assert [(finding.found, finding.fix) for finding in check_requirements(facts)] == [
        (
            "polyxla-bridge 0.1.0: jaxlib==0.10.2 is required, and it is not installed",
            "Install it: pip install jaxlib==0.10.2",
        ),
        (
            "polyxla-bridge 0.1.0: polyxla-core==0.1.0 is required, and polyxla-core 0.2.0 is installed",
            "Install it: pip install ./packages/core",
        ),
    ]


@pytest.mark.parametrize(("is_needed", "status"), [(True, Status.PROBLEM), (False, Status.NOTE)])
def test_another_libtpu_is_a_problem_beside_chips(
    environ: dict[str, str], install_plugin: PluginInstaller, is_needed: bool, status: Status
) -> None:
    install_plugin.metadata("libtpu", version="0.0.52")
    (found,) = check_libtpu(gather_packages(environ), is_needed=is_needed)
    assert found.status is status
    assert "libtpu 0.0.52 does not fit torch_xla 2.9.0" in found.found
    assert gather_packages(environ | {"TPU_LIBRARY_PATH": "/some/libtpu.so"}).libtpu is None


def test_a_libtpu_that_fits_is_named(environ: dict[str, str], install_plugin: PluginInstaller) -> None:
    install_plugin.metadata("libtpu", version="0.0.21")
    (found,) = check_libtpu(gather_packages(environ), is_needed=True)
    assert (found.status, found.found) == (Status.OK, "libtpu 0.0.21 fits the framework")


def test_an_old_python_is_named() -> None:
    facts = PackageFacts("3.9.2", ">=3.11,<3.14", {}, {}, None)
    found = one_problem(check_python(facts))
    assert found.found == "Python 3.9.2 does not fit polyxla, which needs >=3.11,<3.14"


def test_a_machine_without_a_framework_is_named() -> None:
    facts = PackageFacts("3.11.1", "", {"numpy": "2.0"}, {}, None)
    assert one_problem(check_frameworks(facts)).fix.endswith("./packages/runtime-pjrt")


def test_a_directory_that_a_broken_pip_left_is_ignored(
    environ: dict[str, str], install_plugin: PluginInstaller
) -> None:
    (install_plugin.directory / "half-1.0.dist-info").mkdir()
    assert "half" not in gather_packages(environ).installed
