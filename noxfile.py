#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5"]
# ///
"""The monorepo's work. A bare ``nox`` checks everything; ``nox -l`` lists the rest.

What a session installs stands in [dependency-groups] of pyproject.toml and in the packages' own metadata;
which versions, in constraints.txt.
"""

from __future__ import annotations

import configparser
import re
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
# On xrt the integration suite is a job of its own in .github/workflows: all together take over half an hour
# on two cores.
nox.options.sessions = ["lint", "types", "tests", "integration(runtime='pjrt')", "build"]

ROOT = Path(__file__).parent
CONSTRAINTS = "constraints.txt"
JUNIT = ROOT / ".cache" / "junit"
GROUPS: dict[str, Any] = nox.project.load_toml("pyproject.toml")["dependency-groups"]
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: nox.project.load_toml(path)["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# The first is tested with all of integration/, the others with what a runtime can make a difference to.
RUNTIMES = ["pjrt", "xrt"]
# Their oldest allowed dependencies are tested: they promise a range. The others follow one torch_xla release.
WITH_A_RANGE = ["core", "sampler", "precision"]


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of one dependency group."""
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)


def with_siblings(packages: Iterable[str]) -> list[str]:
    """Return the packages and those of ours that they need, which must be installed along with them."""
    found: dict[str, None] = {}
    waiting = list(packages)
    while waiting:
        package = waiting.pop()
        if package not in found:
            found[package] = None
            needs = (re.match(r"polyxla-([a-z-]+)", one) for one in PROJECTS[package]["dependencies"])
            waiting += [match[1] for match in needs if match]
    return sorted(found)


def optional_siblings(package: str) -> list[str]:
    """Return the packages of ours that one of its extras brings; its tests need them."""
    extras = PROJECTS[package].get("optional-dependencies", {}).values()
    needs = (re.match(r"polyxla-([a-z-]+)==", one) for extra in extras for one in extra)
    return [match[1] for match in needs if match]


def install(
    session: nox.Session,
    packages: Iterable[str] = (),
    requirements: Sequence[str] = (),
    *,
    extras: dict[str, str] | None = None,
    editable: bool = False,
    options: Sequence[str] = ("-c", CONSTRAINTS),
) -> None:
    """Install our packages from their folders, with what they need, and other requirements, at once."""
    arguments = [*options, *requirements]
    as_built = not editable and session.venv_backend == "uv"
    if as_built:
        # To uv, a sibling found in the workspace is an editable one.
        arguments.append("--no-sources")
    for package in with_siblings(packages):
        # A reused environment may hold the same version of yesterday's sources.
        if as_built:
            arguments.append(f"--reinstall-package=polyxla-{package}")
        folder = f"./packages/{package}{(extras or {}).get(package, '')}"
        arguments += ["-e", folder] if editable else [folder]
    session.install(*arguments)


def junit(name: str) -> str:
    """Return the option that makes pytest write what .ci/run adds up."""
    JUNIT.mkdir(parents=True, exist_ok=True)
    return f"--junitxml={JUNIT / name}.xml"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, layers, spelling, changelog fragments, and that nothing of one machine is committed."""
    install(session, requirements=group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("towncrier", "build", "--draft", "--version", "next", silent=True)
    session.run("python", ".ci/tracked.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly, one package at a time: tests of two packages may share a name."""
    install(session, PROJECTS, group("types"), editable=True)
    for package in PROJECTS:
        folder = Path("packages") / package
        tests = [str(folder / "tests")] if any((ROOT / folder / "tests").glob("*.py")) else []
        session.run("mypy", str(folder / "src"), *tests)
    session.run("mypy", "integration", "noxfile.py", ".ci/tracked.py", ".ci/tally.py")


@nox.session
@nox.parametrize("package", list(PROJECTS))
def tests(session: nox.Session, package: str) -> None:
    """Test one package in an environment that holds its own requirements, its extras', and no others."""
    folder = with_package(session, package)
    session.run("pytest", "-n", "2", f"{folder}/tests", junit(f"tests-{package}"), *session.posargs)


@nox.session
@nox.parametrize("package", list(PROJECTS))
def coverage(session: nox.Session, package: str) -> None:
    """Test one package and say which of its lines no test runs, which takes longer."""
    folder = with_package(session, package)
    data = ROOT / ".cache" / "coverage" / package
    data.mkdir(parents=True, exist_ok=True)
    environ = {"COVERAGE_FILE": str(data / "data")}
    session.run("coverage", "erase", env=environ)
    pytest = ["-m", "pytest", "-n", "2", f"{folder}/tests"]
    session.run("coverage", "run", *pytest, *session.posargs, env=environ)
    session.run("coverage", "combine", "--quiet", env=environ)
    session.run("coverage", "report", f"--include={folder}/src/*", env=environ)


def with_package(session: nox.Session, package: str) -> str:
    """Install one package with what its tests need; return its folder."""
    folder = f"packages/{package}"
    if not any((ROOT / folder / "tests").glob("test_*.py")):
        session.skip(f"{folder}/tests has no tests yet")
    name = f"test-{package}"
    install(
        session,
        [package, *optional_siblings(package)],
        group(name if name in GROUPS else "test"),
        editable=True,
    )
    return folder


@nox.session
@nox.parametrize("runtime", RUNTIMES)
def integration(session: nox.Session, runtime: str) -> None:
    """Test all packages together, installed as a person installs them, on one runtime."""
    install(session, PROJECTS, group("integration"))
    options = [
        "-n",
        "2",
        "--dist",
        "worksteal",
        "--durations=10",
        "--polyxla-runtime",
        runtime,
        junit(f"integration-{runtime}"),
    ]
    session.run("pytest", "integration", *options, *session.posargs)


@nox.session(venv_backend="uv", reuse_venv=False)
def minimums(session: nox.Session) -> None:
    """Test the packages that promise a range of versions with the oldest they allow."""
    extras = {"core": "[tensorboard,testing]"}
    needs = [one for package in WITH_A_RANGE for one in PROJECTS[package]["dependencies"]]
    needs += [one for extra in PROJECTS["core"]["optional-dependencies"].values() for one in extra]
    free = {re.split(r"[^\w.-]", one)[0].lower() for one in needs}
    kept = [
        line for line in Path(CONSTRAINTS).read_text().splitlines() if line.split("==")[0].lower() not in free
    ]
    constraints = Path(session.create_tmp()) / CONSTRAINTS
    constraints.write_text("\n".join(kept))
    options = ["--resolution", "lowest-direct", "-c", str(constraints)]
    install(session, WITH_A_RANGE, group("test-core"), extras=extras, options=options)
    # The help is put together by typer and click, which have not always agreed.
    session.run("polyxla", "run", "--help", silent=True)
    folders = [f"packages/{package}/tests" for package in WITH_A_RANGE]
    folders = [folder for folder in folders if any((ROOT / folder).glob("test_*.py"))]
    session.run("pytest", "-n", "2", *folders, junit("minimums"), *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build every package into dist/, look into the wheels, and find them from a bare environment."""
    install(session, requirements=group("build"))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PROJECTS:
        # By way of the source distribution, which is complete only if the wheel is.
        how = ["--no-isolation", f"--outdir={dist}"]
        session.run("python", "-m", "build", *how, f"packages/{package}", silent=True)
    wheels = {package: next(dist.glob(f"{file_name(package)}-*.whl")) for package in PROJECTS}
    problems = [text for package, wheel in wheels.items() for text in look_into(wheel, package)]
    if problems:
        session.error("\n".join(problems))
    bare = Path(session.create_tmp()) / "bare"
    session.run("python", "-m", "venv", "--clear", str(bare))
    python = str(bare / "bin" / "python")
    offline = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    pair = [str(wheels["core"]), str(wheels["runtime-pjrt"])]
    session.run(python, "-m", "pip", "install", *offline, *pair, external=True)
    session.run(python, "-c", SEE_ENTRY_POINTS, external=True)


SEE_ENTRY_POINTS = """
from importlib.metadata import entry_points
runtimes = [(one.name, one.dist.name) for one in entry_points(group="polyxla.runtimes")]
assert runtimes == [("pjrt", "polyxla-runtime-pjrt")], runtimes
commands = [one.value for one in entry_points(group="console_scripts", name="polyxla")]
assert commands == ["polyxla.cli.app:main"], commands
"""


def file_name(package: str) -> str:
    """Return a distribution's name the way wheels spell it."""
    return f"polyxla-{package}".replace("-", "_")


def look_into(wheel: Path, package: str) -> list[str]:
    """Compare a wheel with the package it was built from; return what is missing."""
    project = PROJECTS[package]
    source = ROOT / "packages" / package / "src"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"{file_name(package)}-{project['version']}.dist-info"
        points = f"{info}/entry_points.txt"
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(points).decode() if points in names else "")
    expected = dict(project.get("entry-points", {}))
    if scripts := project.get("scripts"):
        expected["console_scripts"] = scripts
    files = {
        str(path.relative_to(source))
        for path in source.glob("polyxla*/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = {*files, f"{info}/METADATA", f"{info}/licenses/LICENSE"} - names
    problems = [f"{name} is missing" for name in sorted(missing)]
    problems += [] if any(name.endswith("/py.typed") for name in files) else ["py.typed is missing"]
    if len({one["version"] for one in PROJECTS.values()}) != 1:
        problems.append("the packages have more than one version")
    found = {section: dict(parser[section]) for section in parser.sections()}
    if found != expected:
        problems.append(f"entry points {found}, not {expected}")
    return [f"{wheel.name}: {text}" for text in problems]


@nox.session
def abi(session: nox.Session) -> None:
    """Compare the bridge's struct layouts with the C header, which a wheel of 230 MB carries."""
    install(session, ["bridge"], ["pip"])
    folder = Path(session.cache_dir) / "abi"
    what = ["--quiet", "--no-deps", "--dest", str(folder), "tensorflow-cpu==2.20.0"]
    session.run("python", "-m", "pip", "download", *what)
    session.run("python", ".ci/abi.py", str(next(folder.glob("tensorflow_cpu-*.whl"))))


@nox.session
def proto(session: nox.Session) -> None:
    """Make the code of runtime-xrt's messages with the oldest tools allowed; fail if it was not theirs."""
    needs = (re.fullmatch(r"grpcio>=([\d.]+),.*", one) for one in PROJECTS["runtime-xrt"]["dependencies"])
    (oldest,) = (match[1] for match in needs if match)
    session.install(f"grpcio-tools=={oldest}")
    source = ROOT / "packages" / "runtime-xrt" / "src"
    before = {path: path.read_bytes() for path in sorted(source.rglob("*_pb2*.py*"))}
    for path in sorted(source.rglob("*.proto")):
        outs = [f"--{kind}_out={source}" for kind in ("python", "pyi", "grpc_python")]
        name = str(path.relative_to(source))
        session.run("python", "-m", "grpc_tools.protoc", f"-I{source}", *outs, name)
    after = {path: path.read_bytes() for path in sorted(source.rglob("*_pb2*.py*"))}
    if before != after:
        session.error("the generated code was not that of the .proto files; commit what has changed")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link is an error."""
    install(session, requirements=group("docs"))
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--site-dir", "site", *session.posargs, env=quiet)


@nox.session
def bench(session: nox.Session) -> None:
    """Run one benchmark: ``nox -s bench -- NAME [ARGUMENTS]``."""
    files = ROOT.glob("benchmarks/*.py")
    # The others are what these have in common.
    names = sorted(path.stem for path in files if "__main__" in path.read_text())
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"nox -s bench -- NAME, one of: {', '.join(names) or 'none yet'}")
    name, *arguments = session.posargs
    install(session, PROJECTS, group("bench"), extras={"core": "[tensorboard]"})
    # What yesterday's run compiled would be measured as fast.
    session.run("python", f"benchmarks/{name}.py", *arguments, env={"POLYXLA_COMPILE_CACHE": "off"})


@nox.session
def demo(session: nox.Session) -> None:
    """Train the first example on whatever this machine has; arguments go to the example."""
    packages = ["core", "runtime-pjrt", "precision", "examples"]
    install(session, packages, extras={"core": "[tensorboard]"})
    session.run("polyxla", "run", "-m", "polyxla_examples.digits", *session.posargs)


@nox.session(venv_backend="uv")
def pin(session: nox.Session) -> None:
    """Write constraints.txt anew: ``nox -s pin`` adds what is missing, ``-- --upgrade`` moves everything."""
    wanted = {one for name in GROUPS for one in group(name)}
    for project in PROJECTS.values():
        for one in [project["dependencies"], *project.get("optional-dependencies", {}).values()]:
            wanted |= {requirement for requirement in one if not requirement.startswith("polyxla-")}
    requirements = Path(session.create_tmp()) / "requirements.in"
    requirements.write_text("\n".join(sorted(wanted)))
    how = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest"]
    quiet = ["--quiet", "--no-header", "--no-annotate", "--output-file", CONSTRAINTS]
    session.run("uv", "pip", "compile", *how, *quiet, *session.posargs, str(requirements), external=True)


if __name__ == "__main__":
    nox.main()
