"""The pages name every hook, variable and option, and their Python compiles."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import polyxla.env
import polyxla.hookspecs
import polyxla_bridge.env
import polyxla_pjrt.env
import polyxla_training.hookspecs
import polyxla_xrt.env

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TIMEOUT_S = 280
HOOKSPECS = [polyxla.hookspecs, polyxla_training.hookspecs]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize(
    "hook", [name for specs in HOOKSPECS for name in vars(specs) if name.startswith("polyxla_")]
)
def test_every_hook_is_on_the_plugins_page(hook: str) -> None:
    assert f"`{hook}(" in page("plugins.md")


@pytest.mark.parametrize("module", [polyxla.env, polyxla_bridge.env, polyxla_pjrt.env, polyxla_xrt.env])
def test_every_variable_is_on_the_environment_page(module: ModuleType) -> None:
    names = [name for name, value in vars(module).items() if name.isupper() and value == name]
    assert names
    assert [name for name in names if f"`{name}`" not in page("environment.md")] == []


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_python_in_the_pages_compiles(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        if "--8<--" not in block:
            compile(block, path.name, "exec")


READMES = sorted(ROOT.glob("packages/*/README.md"))
# What each example prints; the examples of the other packages take longer.
PRINTED = {
    "bridge": r"tensor\(\[\[4\., 4\.\]\]\)\n",
    "core": r"\[[\d.e-]+, [\d.e-]+\]\n",
    "polyxla": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
    "precision": r"\[torch\.bfloat16, torch\.bfloat16, torch\.float32, torch\.float32\]\n",
    "runtime-pjrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "runtime-xrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "sampler": r"0 \[\[2, 3\], \[7, 4\], \[8\]\]\n1 \[\[7, 3\], \[0, 4\], \[2\]\]\n910635848\n",
    "training": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
}
QUICK = {"precision", "sampler"}


@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in sorted(PRINTED)],
)
def test_the_example_of_a_readme_runs(package: str, clean_environ: dict[str, str], tmp_path: Path) -> None:
    text = (ROOT / "packages" / package / "README.md").read_text()
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[package], done.stdout), done.stdout


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_says_how_to_install_and_links_to_the_documentation(path: Path) -> None:
    text = path.read_text()
    assert f"./packages/{path.parent.name}" in text
    pages = re.findall(r"\]\(https://polyxla\.github\.io/polyxla/([\w-]+)/", text)
    assert pages
    assert [name for name in pages if not (ROOT / "docs" / f"{name}.md").is_file()] == []
    assert re.findall(r"\]\((?!https://)", text) == [], "a relative link leads nowhere on a package index"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PAGES if path.name not in navigation] == []


def test_the_tests_that_the_features_page_names_exist() -> None:
    directories = [ROOT / "integration", *(ROOT / "packages").glob("*/tests")]
    files = [path for directory in directories for path in directory.rglob("test_*.py")]
    kit = (ROOT / "packages/testing/src/polyxla_testing/conformance.py").read_text()
    sources = kit + "".join(path.read_text() for path in files)
    named = set(re.findall(r"\btest_\w+", page("features.md"))) - {path.stem for path in files}
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []


def test_the_files_that_the_features_page_names_exist() -> None:
    named = re.findall(r"`((?:packages|integration)/[^`:]+)", page("features.md"))
    assert [name for name in named if not (ROOT / name).exists()] == []


# The distributions as the architecture page calls them.
SOURCES = {
    "core": "packages/core/src/polyxla",
    "training": "packages/training/src/polyxla_training",
    "pjrt": "packages/runtime-pjrt/src/polyxla_pjrt",
    "xrt": "packages/runtime-xrt/src/polyxla_xrt",
    "bridge": "packages/bridge/src/polyxla_bridge",
    "sampler": "packages/sampler/src/polyxla_sampler",
    "precision": "packages/precision/src/polyxla_precision",
}


def test_the_files_that_the_architecture_page_names_exist() -> None:
    text = page("architecture.md")
    directories = [ROOT, *(ROOT / source for source in SOURCES.values())]
    named = re.findall(r"`([\w/.]+\.(?:py|c|proto))`", text)
    assert named
    assert [name for name in named if not any((directory / name).exists() for directory in directories)] == []
    # Those after the name of a distribution are files of that one.
    named_in = re.findall(rf"\b({'|'.join(SOURCES)}) `([\w/.]+\.(?:py|c|proto))`", text)
    assert {where for where, _ in named_in} == set(SOURCES)
    assert [one for one in named_in if not (ROOT / SOURCES[one[0]] / one[1]).exists()] == []
    assert [path for path in SOURCES.values() if f"`{path}`" not in text] == []


def test_the_hooks_on_the_plugins_page_are_in_the_order_of_their_modules() -> None:
    named = re.findall(r"^\| `(polyxla_\w+)\(", page("plugins.md"), re.MULTILINE)
    assert named == [name for specs in HOOKSPECS for name in vars(specs) if name.startswith("polyxla_")]


def test_the_numbers_on_the_pages_are_those_of_the_code() -> None:
    from polyxla.contracts.replication import Replication
    from polyxla.launcher import failures, processes
    from polyxla.xla import unsynced_steps
    from polyxla_bridge.engine import clients, stall_watchdog
    from polyxla_bridge.programs import cache_directory
    from polyxla_training.checkpoint import background_writer, safetensors_header
    from polyxla_training.listeners import checkpointing
    from polyxla_training.observe.own_loop import step_watch, trained_parameters
    from polyxla_training.observe.tracing import trace_schedule
    from polyxla_training.storage import directory_upload, remote_path
    from polyxla_xrt import local_service
    from polyxla_xrt.client import engine
    from polyxla_xrt.config import configuration, credential_files, timeouts
    from polyxla_xrt.protocol import worker

    words: dict[float, str] = {0.5: "half a", 1: "a", 2: "two", 3: "three", 9: "nine", 10: "ten"}
    words |= {30: "half an hour", 60: "minute"}
    traced = words[trace_schedule.MAX_TRACED_STEPS - trace_schedule.FIRST_STEPS]
    written = {
        "architecture.md": [
            f"SIGTERM, and SIGKILL after {failures.STOP_GRACE_S:g} s",
            f"get {words[processes.EXIT_GRACE_S]} second to exit",
            f"{words[processes.LIVENESS_CHECK_S]} check every second notices",
            f"times out after {clients.CONNECT_TIMEOUT_S} s",
            f"is reported after {stall_watchdog.RETIRED_TIMEOUT_S:g} s",
            f"exits with code {failures.PARENT_GONE}",
            f"At most {engine.MAX_IN_FLIGHT} executions are in flight",
        ],
        "checkpoints.md": [
            f"up to {words[background_writer.WAIT_TIMEOUT_S / 60]} by default",
            f"About every {words[checkpointing.AGREE_EVERY_S]} seconds",
            f"in parts of {remote_path.PART_BYTES >> 20} MiB",
            f"uploaded every {words[directory_upload.EVERY_S]} and at the end",
            f"more than {safetensors_header.MAX_HEADER_BYTES // 10**6} MB of data",
        ],
        "compile-cache.md": [
            f"holds at most {cache_directory.LIMIT_BYTES >> 30} GiB",
            f"again after every {cache_directory.SWEEP_BYTES >> 20} MiB",
        ],
        "logging-and-profiling.md": [
            f"in the first {words[trace_schedule.FIRST_STEPS]} steps, and in at most {traced} later ones",
            f"after {words[step_watch.MAX_LINES]} such steps, a last line",
            f"every {step_watch.READ_EVERY}th step and the last one",
            f"read {words[step_watch.READ_AFTER]} steps later",
            f"at most {words[trained_parameters.MAX_ELEMENTS * 4 >> 20]} megabyte per optimizer",
            f"where {words[unsynced_steps.STEPS]} optimizer steps or more were made",
            f"submitted for {unsynced_steps.SECONDS:g} s",
        ],
        "plugins.md": [f"`Replication` ({words[len(Replication.__abstractmethods__)]} methods to implement"],
        "tpu-nodes.md": [
            f"exits {local_service.IDLE_S:g} s after the last one",
            f"is the number of cores of each worker, {configuration.DEFAULT_CORES} by default",
            f"up to {words[timeouts.LONGEST_WAIT_S / (7 * 24 * 3600)]} week, in order of arrival",
            f"receives nothing from the other for {worker.SILENCE_S} s",
            f"The token has at least {credential_files.MIN_TOKEN_CHARS} characters",
        ],
    }
    texts = {name: " ".join(page(name).split()) for name in written}
    missing = [text for name, expected in written.items() for text in expected if text not in texts[name]]
    assert missing == []


def _packages_by_requirement() -> dict[str, set[str]]:
    """Return the packages that require each library which is not ours, directly or in an extra."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for some in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            for one in some:
                name = re.split(r"[^\w.-]", one)[0].lower()
                if not name.startswith("polyxla") and path.parent.name != "polyxla":
                    found.setdefault(name, set()).add(path.parent.name)
    return found


def test_every_library_is_on_the_dependencies_page_with_the_packages_that_require_it() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", page("dependencies.md"), re.MULTILINE)
    required = _packages_by_requirement()
    assert {"pluggy", "torch", "jaxlib", "s3fs"} <= required.keys()
    for library, packages in required.items():
        # PyYAML is the distribution pyyaml, Jinja is jinja2.
        names = re.compile(rf"\b{library.rstrip('2')}\b", re.IGNORECASE)
        users = " ".join(used for row, used in rows if names.search(row))
        assert [package for package in sorted(packages) if package not in users] == [], library


def test_the_examples_of_the_sampling_page_are_right() -> None:
    blocks = re.findall(r"```python\n(.*?)```", page("sampling.md"), re.DOTALL)
    checked = [block for block in blocks if "assert" in block]
    assert len(checked) == 3
    for block in checked:
        exec(block, {})
