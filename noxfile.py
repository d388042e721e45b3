#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5"]
# ///
"""The monorepo's sessions. A bare ``nox`` checks everything; ``nox -l`` lists the rest.

[dependency-groups] of pyproject.toml and the packages' own metadata list what a session installs;
constraints.txt pins the versions.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
# The integration suites on xrt and torchtpu are separate jobs in .github/workflows: together with these they
# take over half an hour on two cores.
nox.options.sessions = ["lint", "types", "tests(package='all')", "integration(runtime='pjrt')", "build"]
# With this variable, each process of a test compiles all the modules that it imports: with torch_xla, this
# takes as long as the rest of the import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
CONSTRAINTS = "constraints.txt"
CONSTRAINTS_TORCHTPU = "constraints-torchtpu.txt"
TORCH_TPU_BENCHMARK = "torchtpu"
JUNIT = ROOT / ".cache" / "junit"
GROUPS: dict[str, Any] = nox.project.load_toml("pyproject.toml")["dependency-groups"]
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: nox.project.load_toml(path)["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PACKAGE_OF = {project["name"]: package for package, project in PROJECTS.items()}
# Each of the two frameworks needs a release of torch of its own: their packages are never in one environment.
ON_TORCH_XLA = ["runtime-pjrt", "runtime-xrt"]
ON_TORCH_TPU = ["runtime-torchtpu"]
WITH_TORCH_XLA = [package for package in PROJECTS if package not in ON_TORCH_TPU]
WITH_TORCH_TPU = [package for package in PROJECTS if package not in ON_TORCH_XLA]
TESTED = [package for package in WITH_TORCH_XLA if any(ROOT.glob(f"packages/{package}/tests/**/test_*.py"))]
# Tested with both frameworks. The tests of bridge and precision read torch_xla's programs.
TESTED_ON_TORCH_TPU = ["core", "runtime-torchtpu", "sampler", "tools", "training"]
# Where only a part of a package's tests is for both.
TESTS_ON_TORCH_TPU = {"tools": "tests/fits"}
# Siblings that a package's tests use and its code does not.
TESTS_NEED = {
    "bridge": ["testing"],
    "core": ["testing"],
    "pod": ["bridge", "examples", "runtime-pjrt", "sampler", "testing"],
    "runtime-pjrt": ["testing"],
    "runtime-torchtpu": ["testing"],
    "runtime-xrt": ["testing"],
    "tools": ["runtime-pjrt", "testing"],
    "training": ["sampler", "testing"],
}
# The first runtime runs all of integration/, the others run the tests that depend on the runtime.
RUNTIMES = ["pjrt", "xrt", "torchtpu"]
# Directories with programs of other libraries, for `clients`.
CLIENTS = {"pjrt": "integration/clients", "torchtpu": "integration/torchtpu/clients"}
# Suites of tests that others wrote, for `scorecard`: the runtime, and whose requirements each needs.
SCORECARDS = {
    "torch_xla": ("pjrt", "torch_xla"),
    "torch_xla-replicas": ("pjrt", "torch_xla"),
    "torch_xla-pallas": ("pjrt", "torch_xla"),
    "torch_xla-torch": ("pjrt", "torch"),
    "lightning": ("pjrt", "lightning"),
    "dtensor": ("torchtpu", "torch"),
    "operators": ("torchtpu", "torch"),
    "gradients": ("torchtpu", "torch"),
    "torch": ("torchtpu", "torch"),
    "dtensor-operators": ("torchtpu", "torch"),
    "dtensor-tools": ("torchtpu", "torch"),
    "torch-sample": ("torchtpu", "torch"),
    "torchcts": ("torchtpu", "torchcts"),
    "fsdp2": ("torchtpu", "torch"),
    "fsdp2-training": ("torchtpu", "torch"),
    "tensor-parallel": ("torchtpu", "torch"),
    "device-mesh": ("torchtpu", "torch"),
    "checkpoint": ("torchtpu", "torch"),
    "pipelining": ("torchtpu", "torch"),
    "accelerate": ("torchtpu", "accelerate"),
    "accelerate-torch_xla": ("pjrt", "accelerate-torch_xla"),
    "examples": ("torchtpu", "examples"),
    "torchtitan": ("torchtpu", "torchtitan"),
}
# These allow only older releases of torch, or of a library of data, than the pinned ones.
UNPINNED = ["scorecard-torchcts", "scorecard-torchtitan"]
# Extras that log to services, with many requirements, and the directory of their tests.
TRACKERS = ["mlflow", "wandb"]
TRACKERS_TESTS = "integration/trackers"
# These promise a range of versions, and are tested with the oldest. The others follow one torch_xla release.
WITH_A_RANGE = ["core", "sampler", "precision", "testing", "training"]
# All of `TESTED`, in one environment.
ALL = "all"
# A few tests take most of the time, so the process that is done first takes over some of another's.
TWO_AT_ONCE = ["-n", "2", "--dist", "worksteal"]
# Tests of packages wait for processes and deadlines a third of their time, those of integration hardly ever.
FOUR_AT_ONCE = ["-n", "4", "--dist", "worksteal"]
# Their slow tests share a result of their process; two processes would compute it twice.
ONE_AT_A_TIME = ["precision"]
# torch 2.9's wheels are manylinux_2_28: no machine that runs them has an older glibc.
NEWEST_GLIBC = 28


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of one dependency group."""
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)


def extras_of(package: str) -> dict[str, list[str]]:
    """Return the requirements of each of a package's extras."""
    extras: dict[str, list[str]] = PROJECTS[package].get("optional-dependencies", {})
    # libtpu is for machines with a TPU; `trackers` tests the other two.
    return {extra: required for extra, required in extras.items() if extra not in ("tpu", *TRACKERS)}


def with_siblings(packages: Iterable[str], with_extras: Collection[str] = ()) -> list[str]:
    """Return the packages and the siblings that they require, which must be installed along with them."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        package = waiting.pop()
        if package not in found:
            found.add(package)
            waiting += siblings(PROJECTS[package]["dependencies"])
            extras = extras_of(package) if package in with_extras else {}
            waiting += [sibling for extra in extras.values() for sibling in siblings(extra)]
    return sorted(found)


def siblings(requirements: Iterable[str]) -> list[str]:
    """Return our packages among requirements such as ``polyxla-training[tensorboard]==0.1.0``."""
    names = (re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)
    return [PACKAGE_OF[name] for name in names if name in PACKAGE_OF]


def install(
    session: nox.Session,
    packages: Iterable[str] = (),
    requirements: Sequence[str] = (),
    *,
    with_extras: Collection[str] = (),
    editable: bool = False,
    options: Sequence[str] = ("-c", CONSTRAINTS),
) -> None:
    """Install our packages from their directories, and other requirements, in one command.

    Args:
        session: where to install.
        packages: ours; the siblings they require are added.
        requirements: others.
        with_extras: which of the packages are installed with all of their extras.
        editable: whether the sources stay where they are.
        options: for the installer.
    """
    arguments = [*options, *requirements]
    as_built = not editable and session.venv_backend == "uv"
    if as_built:
        # uv would install the workspace's packages as editable ones.
        arguments.append("--no-sources")
    for package in with_siblings(packages, with_extras):
        # A reused environment may hold the same version, built from older sources.
        if as_built:
            arguments.append(f"--reinstall-package={PROJECTS[package]['name']}")
        extras = ",".join(extras_of(package)) if package in with_extras else ""
        directory = f"./packages/{package}" + (f"[{extras}]" if extras else "")
        arguments += ["-e", directory] if editable else [directory]
    session.install(*arguments)


def junit(name: str) -> str:
    """Return the option that makes pytest write the file that .ci/tally.py counts."""
    JUNIT.mkdir(parents=True, exist_ok=True)
    return f"--junitxml={JUNIT / name}.xml"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, layers, wording, changelog fragments, and that no file names one machine."""
    install(session, requirements=group("lint"))
    # The imports are read, not run: the packages need not be installed, nor what they require.
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})
    session.run("codespell")
    session.run("towncrier", "build", "--draft", "--version", "next", silent=True)
    for check in ("wording", "tracked"):
        session.run("python", f".ci/{check}.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly, one directory of tests at a time: two may have files of the same name."""
    install(session, WITH_TORCH_XLA, group("types"), with_extras=["pod", "training"], editable=True)
    # Runtime torchtpu cannot be installed beside torch_xla: mypy reads its sources.
    sources = {"MYPYPATH": "packages/runtime-torchtpu/src"}
    checks: list[tuple[list[str], dict[str, str]]] = []
    for package in PROJECTS:
        tests = Path("packages", package, "tests")
        inner = sorted(str(path.parent) for path in tests.glob("*/conftest.py"))
        parts = [str(tests.with_name("src"))] if package != "polyxla" else []
        if any(tests.glob("*.py")):
            parts.append(str(tests))
        if parts:
            checks.append(([*parts, *(f"--exclude=^{directory}/" for directory in inner)], sources))
        checks += [([directory], sources) for directory in inner]
    files = [str(path) for path in sorted(Path(".ci").glob("*.py")) if path.name != "abi.py"]
    checks += [(["integration", "noxfile.py", *files], sources), (["benchmarks"], {"MYPYPATH": "benchmarks"})]
    # Each core has a cache of its own: mypy has ended with an internal error where two filled the same one.
    caches: SimpleQueue[str] = SimpleQueue()
    for core in range(2):
        caches.put(f".mypy_cache/{core}")

    def check(parts: list[str], environ: dict[str, str]) -> None:
        cache = caches.get()
        try:
            session.run("mypy", f"--cache-dir={cache}", *parts, env=environ, silent=True)
        finally:
            caches.put(cache)

    with two_threads() as both:
        runs = wait([both.submit(check, *given) for given in checks])
    for run in runs.done:
        run.result()


@contextlib.contextmanager
def two_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield an executor that starts nothing else once its context has ended, as at Ctrl-C."""
    both = ThreadPoolExecutor(2)
    try:
        yield both
    finally:
        both.shutdown(cancel_futures=True)


@nox.session
@nox.parametrize("package", [ALL, *TESTED])
def tests(session: nox.Session, package: str) -> None:
    """Test one package in an environment with only its own requirements, or all packages in a common one."""
    if package != ALL:
        with_package(session, package)
        session.run(*tests_of(session, package, 4))
        return
    requirements = {requirement for name in GROUPS if name.startswith("test") for requirement in group(name)}
    install(session, WITH_TORCH_XLA, sorted(requirements), with_extras=["pod", "training"], editable=True)
    # Two packages at once: each process of pytest imports torch, and one package at a time would need four.
    with two_threads() as both:
        commands = {each: tests_of(session, each, 2) for each in sorted(TESTED, key=by_length)}
        runs = {each: both.submit(session.run, *run, silent=True) for each, run in commands.items()}
        for run in as_completed(runs.values()):
            # nox has printed the output of those that failed.
            session.log(run.exception() or run.result())
    failed = [each for each, run in runs.items() if run.exception()]
    if failed:
        session.error(f"tests of {', '.join(failed)} failed")


def by_length(package: str) -> int:
    """Return a key that sorts packages: the most tests come first, so that no core is idle at the end."""
    return -sum(path.read_text().count("\n") for path in ROOT.glob(f"packages/{package}/tests/**/*.py"))


def tests_of(session: nox.Session, package: str, processes: int) -> list[str]:
    """Return the command that runs the tests of a package, so many at a time."""
    # A few tests are done before other processes have started.
    how = [] if "-k" in session.posargs else at_once(package, processes)
    return ["pytest", *how, f"packages/{package}/tests", junit(f"tests-{package}"), *session.posargs]


@nox.session(name="tests-torchtpu")
@nox.parametrize("package", TESTED_ON_TORCH_TPU)
def tests_torchtpu(session: nox.Session, package: str) -> None:
    """Test one package beside TorchTPU, with its release of torch."""
    needs = [sibling for sibling in TESTS_NEED.get(package, []) if sibling not in ON_TORCH_XLA]
    pins = ("-c", CONSTRAINTS_TORCHTPU)
    install(
        session, [package, *needs], group("test-training"), with_extras=[package], editable=True, options=pins
    )
    options = [*FOUR_AT_ONCE, junit(f"tests-torchtpu-{package}")]
    tests = TESTS_ON_TORCH_TPU.get(package, "tests")
    session.run("pytest", f"packages/{package}/{tests}", *options, *session.posargs)


@nox.session
@nox.parametrize("package", TESTED)
def coverage(session: nox.Session, package: str) -> None:
    """Test one package and list the lines that no test runs. Takes longer than `tests`."""
    directory = with_package(session, package)
    data = ROOT / ".cache" / "coverage" / package
    data.mkdir(parents=True, exist_ok=True)
    environ = {"COVERAGE_FILE": str(data / "data")}
    session.run("coverage", "erase", env=environ)
    pytest = ["-m", "pytest", *at_once(package), f"{directory}/tests"]
    session.run("coverage", "run", *pytest, *session.posargs, env=environ)
    session.run("coverage", "combine", "--quiet", env=environ)
    session.run("coverage", "report", f"--include={directory}/src/*", env=environ)


def at_once(package: str, processes: int = 4) -> list[str]:
    """Return pytest's options for how many of a package's tests run at the same time."""
    if package in ONE_AT_A_TIME:
        return []
    # Tests that share a Ray cluster are an xdist group, which one of the processes runs.
    return ["-n", str(processes), "--dist", "loadgroup" if package == "pod" else "worksteal"]


def with_package(session: nox.Session, package: str) -> str:
    """Install one package with what its tests need; return its directory."""
    packages = [package, *TESTS_NEED.get(package, [])]
    tests = f"test-{package}"
    requirements = group(tests if tests in GROUPS else "test")
    install(session, packages, requirements, with_extras=[package], editable=True)
    return f"packages/{package}"


@nox.session
@nox.parametrize("runtime", RUNTIMES)
def integration(session: nox.Session, runtime: str) -> None:
    """Test all packages together, installed as a user installs them, on one runtime."""
    on_torch_tpu = runtime == "torchtpu"
    pins = ("-c", CONSTRAINTS_TORCHTPU if on_torch_tpu else CONSTRAINTS)
    packages = WITH_TORCH_TPU if on_torch_tpu else WITH_TORCH_XLA
    install(session, packages, group("integration"), with_extras=["training"], options=pins)
    options = ["--durations=10", "--polyxla-runtime", runtime, junit(f"integration-{runtime}")]
    # These need other libraries: `clients` and `trackers` run them.
    options += [f"--ignore={directory}" for directory in (*CLIENTS.values(), TRACKERS_TESTS)]
    session.run("pytest", "integration", *TWO_AT_ONCE, *options, *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Run jobs with faults at random: ``-- --minutes 60``, ``--seed N``, ``--only worker``, ``--json``."""
    install(session, ["bridge", "polyxla", "runtime-pjrt", "runtime-xrt"], options=("-c", CONSTRAINTS))
    session.run("python", "integration/faults.py", *session.posargs)


@nox.session
@nox.parametrize("runtime", list(CLIENTS))
def clients(session: nox.Session, runtime: str) -> None:
    """Train with Lightning, Accelerate and transformers on emulated TPUs; takes a quarter of an hour."""
    pins = ("-c", CONSTRAINTS_TORCHTPU if runtime == "torchtpu" else CONSTRAINTS)
    packages = ["bridge", f"runtime-{runtime}", "testing", "tools"]
    install(session, packages, group(f"clients-{runtime}"), options=pins)
    # Keep the tests of a library in one process: they share its run on the CPU.
    together = ["-n", "2", "--dist", "loadgroup"]
    options = ["--durations=10", "--polyxla-runtime", runtime, junit(f"clients-{runtime}")]
    session.run("pytest", CLIENTS[runtime], *together, *options, *session.posargs)


@nox.session
@nox.parametrize("runtime", list(CLIENTS))
def notebooks(session: nox.Session, runtime: str) -> None:
    """Run the tutorials in docs/tutorials that are for one framework; ``-- --save`` keeps what they print."""
    pins = ("-c", CONSTRAINTS_TORCHTPU if runtime == "torchtpu" else CONSTRAINTS)
    packages = ["bridge", "sampler", "training", f"runtime-{runtime}"]
    packages += ["runtime-xrt", "tools"] if runtime == "pjrt" else []
    install(session, packages, group(f"notebooks-{runtime}"), options=pins)
    framework = "torch_tpu" if runtime == "torchtpu" else "torch_xla"
    session.run(
        "python", ".ci/notebooks.py", framework, *session.posargs, env={"POLYXLA_COMPILE_CACHE": "off"}
    )


@nox.session
def trackers(session: nox.Session) -> None:
    """Log a training to Weights & Biases, offline, and to MLflow, in a file."""
    extras = PROJECTS["training"]["optional-dependencies"]
    requirements = [*group("trackers"), *(requirement for extra in TRACKERS for requirement in extras[extra])]
    # Install without the constraints, because MLflow allows only older releases of some libraries.
    install(session, ["runtime-pjrt", "training", "testing", "tools"], requirements, options=())
    options = ["--polyxla-runtime", "pjrt", junit("trackers")]
    # MLflow would report its use to its makers.
    environ = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    session.run("pytest", TRACKERS_TESTS, *options, *session.posargs, env=environ)


@nox.session
def blocks(session: nox.Session) -> None:
    """Run the code blocks of README and docs/, each page in its own process; ``-- NAME`` runs one."""
    packages = ["bridge", "polyxla", "runtime-pjrt", "runtime-xrt", "testing"]
    install(session, packages, [*group("notebooks-pjrt"), *group("test")], with_extras=["training"])
    session.run("python", ".ci/notebooks.py", "pages", *session.posargs, env={"POLYXLA_COMPILE_CACHE": "off"})


@nox.session(venv_backend="uv", reuse_venv=False)
def minimums(session: nox.Session) -> None:
    """Test the packages that promise a range of versions with the oldest they allow."""
    ranges = [requirement for package in WITH_A_RANGE for requirement in PROJECTS[package]["dependencies"]]
    ranges += [
        requirement
        for package in WITH_A_RANGE
        for extra in extras_of(package).values()
        for requirement in extra
    ]
    free = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in ranges}
    pins = Path(CONSTRAINTS).read_text().splitlines()
    # Not in a directory that nox makes, which would become the tests' own for temporary files, in this
    # repository.
    constraints = Path(session.virtualenv.location) / CONSTRAINTS
    constraints.write_text("\n".join(pin for pin in pins if pin.split("==")[0].lower() not in free))
    options = ["--resolution", "lowest-direct", "-c", str(constraints)]
    test_range(session, options)


@nox.session(venv_backend="uv", reuse_venv=False)
def newest(session: nox.Session) -> None:
    """Test the same packages with the newest versions they allow, which a new user gets."""
    test_range(session, options=())


def test_range(session: nox.Session, options: Sequence[str]) -> None:
    """Test the packages that promise a range of versions, with those that the installer's options select."""
    install(session, WITH_A_RANGE, group("test-training"), with_extras=WITH_A_RANGE, options=options)
    # typer and click build the help text together, and have not always fitted.
    session.run("polyxla", "run", "--help", silent=True)
    directories = [f"packages/{package}/tests" for package in WITH_A_RANGE if package in TESTED]
    session.run("pytest", *TWO_AT_ONCE, *directories, junit(session.name), *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build every package into dist/ as an index accepts it, compare with the sources, install three."""
    install(session, requirements=group("build"))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PROJECTS:
        # Build the wheel from the source distribution, so that a file missing there is noticed.
        how = ["--no-isolation", f"--outdir={dist}"]
        session.run("python", "-m", "build", *how, f"packages/{package}", silent=True)
    for wheel in dist.glob("*-linux_*.whl"):
        # An index refuses this tag. auditwheel finds the oldest glibc and libstdc++ that will do.
        session.run("auditwheel", "repair", "--wheel-dir", str(dist), str(wheel))
        wheel.unlink()
    wheels = {package: next(dist.glob(f"{file_name(package)}-*.whl")) for package in PROJECTS}
    problems = [text for package, wheel in wheels.items() for text in look_into(wheel, package)]
    session.run("twine", "check", "--strict", *sorted(str(path) for path in dist.iterdir()))
    if problems:
        session.error("\n".join(problems))
    bare = Path(session.create_tmp()) / "bare"
    session.run("python", "-m", "venv", "--clear", str(bare))
    python = str(bare / "bin" / "python")
    offline = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    some = [str(wheels[package]) for package in ("bridge", "core", "runtime-pjrt")]
    session.run(python, "-m", "pip", "install", *offline, *some, external=True)
    session.run(python, "-c", SEE_ENTRY_POINTS, external=True)


SEE_ENTRY_POINTS = """
from importlib.metadata import entry_points
runtimes = [(point.name, point.dist.name) for point in entry_points(group="polyxla.runtimes")]
assert runtimes == [("pjrt", "polyxla-runtime-pjrt")], runtimes
commands = [point.value for point in entry_points(group="console_scripts", name="polyxla")]
assert commands == ["polyxla.__main__:main"], commands
"""


def file_name(package: str) -> str:
    """Return a distribution's name the way wheels spell it."""
    name: str = PROJECTS[package]["name"]
    return name.replace("-", "_")


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
    # The umbrella has no code.
    if files and not any(name.endswith("/py.typed") for name in files):
        problems.append("py.typed is missing")
    problems += wrong_tag(wheel)
    if len({project["version"] for project in PROJECTS.values()}) != 1:
        problems.append("the packages have more than one version")
    found = {section: dict(parser[section]) for section in parser.sections()}
    if found != expected:
        problems.append(f"entry points {found}, not {expected}")
    return [f"{wheel.name}: {text}" for text in problems]


def wrong_tag(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel's platforms: an index accepts any platform, or a manylinux."""
    platform = wheel.stem.rpartition("-")[2]
    glibcs = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", platform)]
    if platform == "any" or (glibcs and min(glibcs) <= NEWEST_GLIBC):
        return []
    return [f"it is for {platform}, not for manylinux_2_{NEWEST_GLIBC} or older"]


@nox.session
def abi(session: nox.Session) -> None:
    """Compare the bridge's struct layouts with the C header, which a wheel of 230 MB carries."""
    install(session, ["bridge"], ["pip"])
    directory = Path(session.cache_dir) / "abi"
    what = ["--quiet", "--no-deps", "--dest", str(directory), "tensorflow-cpu==2.20.0"]
    session.run("python", "-m", "pip", "download", *what)
    session.run("python", ".ci/abi.py", str(next(directory.glob("tensorflow_cpu-*.whl"))))


@nox.session
@nox.parametrize("runtime", ["pjrt", "torchtpu"])
def libtpu(session: nox.Session, runtime: str) -> None:
    """Test what needs libtpu with that of one framework, and the variables of TPU processes. No TPU."""
    on_torch_tpu = runtime == "torchtpu"
    pins = ("-c", CONSTRAINTS_TORCHTPU if on_torch_tpu else CONSTRAINTS)
    packages = ["bridge", f"runtime-{runtime}", "testing", "tools"]
    install(session, packages, ["libtpu", *group("test-core")], options=pins)
    if not on_torch_tpu:
        session.run("python", ".ci/variables.py")
    files = ("packages/tools/tests/fits/test_libtpu.py", "packages/bridge/tests/test_real_libtpu.py")
    session.run("pytest", *files, *session.posargs)


@nox.session
@nox.parametrize("suite", list(SCORECARDS))
def scorecard(session: nox.Session, suite: str) -> None:
    """Run tests that others wrote on emulated TPUs; the argument is a checkout of their project."""
    runtime, project = SCORECARDS[suite]
    needs = f"scorecard-{project}"
    constraints = CONSTRAINTS_TORCHTPU if runtime == "torchtpu" else CONSTRAINTS
    pins = () if needs in UNPINNED else ("-c", constraints)
    install(session, ["bridge", f"runtime-{runtime}", "tools"], group(needs), options=pins)
    session.run("python", ".ci/scorecard.py", suite, *session.posargs)


@nox.session
def proto(session: nox.Session) -> None:
    """Generate the code of all .proto files with the oldest tools supported; fail if the code has changed."""
    needs = (
        re.fullmatch(r"grpcio>=([\d.]+),.*", requirement)
        for requirement in PROJECTS["runtime-xrt"]["dependencies"]
    )
    (oldest,) = (match[1] for match in needs if match)
    session.install(f"grpcio-tools=={oldest}")
    before = generated_code()
    for source in sorted(ROOT.glob("packages/*/src")):
        for path in sorted(source.rglob("*.proto")):
            kinds = ["python", "pyi"]
            if re.search(r"^service ", path.read_text(), re.MULTILINE):
                kinds.append("grpc_python")
            outs = [f"--{kind}_out={source}" for kind in kinds]
            name = str(path.relative_to(source))
            session.run("python", "-m", "grpc_tools.protoc", f"-I{source}", *outs, name)
    if before != generated_code():
        session.error("the committed code was not generated from the .proto files; commit the changed files")


def generated_code() -> dict[Path, bytes]:
    """Return the content of each file that protoc generated."""
    return {path: path.read_bytes() for path in sorted(ROOT.glob("packages/*/src/**/*_pb2*.py*"))}


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link, or a public name on no page, is an error."""
    install(session, requirements=group("docs"))
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--site-dir", "site", *session.posargs, env=quiet)
    session.run("python", ".ci/api.py", "site")


@nox.session
def bench(session: nox.Session) -> None:
    """Run one benchmark, or all, also that of TorchTPU: ``nox -s bench -- NAME|all [ARGUMENTS]``."""
    files = ROOT.glob("benchmarks/*.py")
    # The other files are what the benchmarks share. That of a GPU runs on a machine of its own: docs/gpu.md.
    names = {path.stem for path in files if "__main__" in path.read_text()} - {TORCH_TPU_BENCHMARK, "device"}
    name, *arguments = session.posargs or [""]
    if name not in (*names, "all"):
        session.error(f"nox -s bench -- NAME, one of: all, {', '.join(sorted(names))}")
    if name == "all":
        session.notify("bench-torchtpu", arguments)
    failed = []
    for each in sorted(names) if name == "all" else [name]:
        try:
            run_benchmark(session, each, arguments, WITH_TORCH_XLA, CONSTRAINTS)
        except nox.command.CommandFailed:
            failed.append(each)
    if failed:
        session.error(f"{', '.join(failed)} failed")


@nox.session(name="bench-torchtpu")
def bench_torchtpu(session: nox.Session) -> None:
    """Run the benchmark of TorchTPU, which needs another release of torch: ``-- [ARGUMENTS]``."""
    run_benchmark(session, TORCH_TPU_BENCHMARK, session.posargs, WITH_TORCH_TPU, CONSTRAINTS_TORCHTPU)


def run_benchmark(
    session: nox.Session, name: str, arguments: Iterable[str], packages: Collection[str], constraints: str
) -> None:
    """Install our packages, and run a benchmark with them."""
    install(session, packages, group("bench"), with_extras=["training"], options=("-c", constraints))
    # A program compiled by an earlier run would be measured as a fast one.
    session.run("python", f"benchmarks/{name}.py", *arguments, env={"POLYXLA_COMPILE_CACHE": "off"})


@nox.session
def demo(session: nox.Session) -> None:
    """Train the first example on this machine; arguments go to the example."""
    install(session, ["runtime-pjrt", "precision", "examples"])
    session.run("polyxla", "run", "-m", "polyxla_examples.digits", *session.posargs)


@nox.session(venv_backend="uv")
def pin(session: nox.Session) -> None:
    """Rewrite the constraints: ``nox -s pin`` adds missing pins, ``-- --upgrade`` moves all of them."""
    everything = {requirement for name in GROUPS if name not in UNPINNED for requirement in group(name)}
    # Only torch_xla's environment needs these, or needs them in another release.
    on_torch_xla = re.compile(r"torch_?xla|torchvision|torchax|torch==|flax|libtpu")
    shared = {requirement for requirement in everything if not on_torch_xla.match(requirement)}
    write_pins(session, CONSTRAINTS, everything | required_by(WITH_TORCH_XLA) | {"torch==2.9.*"})
    write_pins(session, CONSTRAINTS_TORCHTPU, shared | required_by(WITH_TORCH_TPU))


def required_by(packages: Iterable[str]) -> set[str]:
    """Return what our packages and their extras require of others."""
    lists = [PROJECTS[package]["dependencies"] for package in packages]
    extras = [PROJECTS[package].get("optional-dependencies", {}) for package in packages]
    lists += [extra for table in extras for name, extra in table.items() if name not in TRACKERS]
    return {
        requirement for requirements in lists for requirement in requirements if not siblings([requirement])
    }


def write_pins(session: nox.Session, file: str, wanted: Collection[str]) -> None:
    """Pin the versions of what is wanted, and of what that requires."""
    requirements = Path(session.create_tmp()) / "requirements.in"
    requirements.write_text("\n".join(sorted(wanted)))
    how = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest"]
    quiet = ["--quiet", "--no-header", "--no-annotate", "--output-file", file]
    session.run("uv", "pip", "compile", *how, *quiet, *session.posargs, str(requirements), external=True)


if __name__ == "__main__":
    nox.main()
