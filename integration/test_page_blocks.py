"""The blocks of the pages: code that compiles and runs, data that can be read, and output that is right."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyxla.plugin import AcceleratorType
from polyxla_pod.manifest import node_selector

TIMEOUT_S = 280
ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def fenced(language: str, text: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_ends(path: Path) -> None:
    fences = re.findall(r"^```(.*)", path.read_text(), re.MULTILINE)
    # With one missing, text is code and code is text from there on.
    assert [bool(fence) for fence in fences] == [True, False] * (len(fences) // 2)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_python_in_the_pages_compiles(path: Path) -> None:
    for block in fenced("python", path.read_text()):
        if "--8<--" not in block:
            compile(block, path.name, "exec")


BLOCKS: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "blocks.py"))
# The first words of commands that `nox -s blocks` cannot run: they install, never end, or need other hosts.
NOT_RUN = r"(?:uv )?pip|python3 -m venv|\.venv|gcloud|kubectl|ray|ssh|curl|polyxla (?:worker --|pod run)"


@pytest.mark.parametrize("path", BLOCKS["pages"](), ids=lambda path: path.name)
def test_a_block_runs_or_says_why_it_does_not(path: Path) -> None:
    text, blocks = path.read_text(), list(BLOCKS["blocks"](path))
    fences = re.findall(r"^ *```(?:python|sh|bash|console)\b", text, re.MULTILINE)
    hidden = text.count("<!-- run:")
    assert len(blocks) == len(fences) + hidden, "a fence has an attribute, or a hidden block has no end"
    assert len([block for block in blocks if block.reason]) == text.count("<!-- not run:"), (
        "a mark without a block"
    )
    for block in blocks:
        if block.reason is None and block.language != "python":
            assert block.commands, f"{path.name}:{block.line}: no line begins with $"
            found = re.search(rf"^(?:\w+=\S+ )*({NOT_RUN})", block.commands, re.MULTILINE)
            assert not found, f"{path.name}:{block.line}: <!-- not run: REASON --> is missing"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_yaml_in_the_pages_can_be_read(path: Path) -> None:
    for block in fenced("yaml", path.read_text()):
        assert isinstance(yaml.safe_load(block), dict | list), block


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_json_in_the_pages_can_be_read(path: Path) -> None:
    for block in fenced("json", path.read_text()):
        assert isinstance(json.loads(block), dict), block


def test_the_workflow_for_github_runs_the_tests_and_uses_pips_cache() -> None:
    (block,) = fenced("yaml", page("how-to/github-actions.md"))
    workflow = yaml.safe_load(block)
    # YAML 1.1 reads the key `on` as true.
    assert workflow.keys() == {"name", True, "jobs"}
    (job,) = workflow["jobs"].values()
    assert job.keys() == {"runs-on", "timeout-minutes", "steps"}
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert "pytest" in commands
    for command in commands:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    assert "pip" in [step.get("with", {}).get("cache") for step in job["steps"]]


def test_the_labels_on_the_page_for_gke_are_those_of_the_manifest() -> None:
    (block,) = fenced("yaml", page("how-to/gke.md"))
    assert "--type v5e-16" in page("how-to/gke.md")
    assert yaml.safe_load(block)["nodeSelector"] == node_selector(AcceleratorType.parse("v5e-16", "the page"))


def test_the_task_for_skypilot_has_keys_of_its_format() -> None:
    (block,) = re.findall(r"```yaml\n(# train\.yaml.*?)```", page("pods.md"), re.DOTALL)
    task = yaml.safe_load(block)
    # Source: the reference of SkyPilot's YAML.
    assert task.keys() == {"resources", "workdir", "setup", "run"}
    assert task["resources"].keys() == {"accelerators", "accelerator_args"}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


def output_of(arguments: list[str], directory: Path, environ: dict[str, str]) -> str:
    """Run Python with these arguments, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What each example prints; the examples of the other packages take longer.
PRINTED = {
    "bridge": r"tensor\(\[\[4\., 4\.\]\]\)\n",
    "core": r"\[[\d.e-]+, [\d.e-]+\]\n",
    "core, of a TPU": r"Bounds\(hosts=\(1, 1, 2\), chips_per_host=\(2, 2, 1\)\)\n",
    "polyxla": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
    "pod": r"\{'cloud\.google\.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice', .*: '4x4'\}\n",
    "precision": r"\[torch\.bfloat16, torch\.bfloat16, torch\.float32, torch\.float32\]\n",
    "runtime-pjrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "runtime-xrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "the project": r"\[[\d.e-]+\]\n",
    "sampler": r"0 \[\[2, 3\], \[7, 4\], \[8\]\]\n1 \[\[7, 3\], \[0, 4\], \[2\]\]\n910635848\n",
    "tools": r"ok\n",
    "training": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
}
QUICK = {"core, of a TPU", "pod", "precision", "sampler", "tools"}


@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in sorted(PRINTED)],
)
def test_the_example_of_a_readme_runs(example: str, clean_environ: dict[str, str], tmp_path: Path) -> None:
    package, second, _ = example.partition(", of a TPU")
    directory = ROOT if package == "the project" else ROOT / "packages" / package
    text = (directory / "README.md").read_text()
    script = tmp_path / "example.py"
    script.write_text(fenced("python", text)[1 if second else 0])
    printed = output_of([script.name], tmp_path, clean_environ)
    assert re.fullmatch(PRINTED[example], printed), printed


def first_programs() -> list[tuple[str, str]]:
    """Return the name and the text of each program on the two pages that a user reads first."""
    blocks = [
        block for name in ("index.md", "quickstart.md") for block in BLOCKS["blocks"](ROOT / "docs" / name)
    ]
    return [(block.file, block.text) for block in blocks if block.file]


@pytest.mark.long
@pytest.mark.parametrize(("name", "text"), first_programs(), ids=[name for name, _ in first_programs()])
def test_the_programs_of_the_first_pages_print_what_they_say(
    name: str, text: str, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    command = ["pytest", "-q"] if name.startswith("test_") else ["polyxla", "run", "--devices", "4"]
    output = output_of(["-m", *command, name], tmp_path, clean_environ)
    if name == "digits.py":
        assert re.fullmatch(r"\{'accuracy': (0\.[89]\d*|1\.0)\}\n", output)
    else:
        printed = [line for line in output.splitlines() if not re.fullmatch(r"\d+ passed in .*", line)]
        assert printed
        assert [line for line in printed if line not in page("index.md") + page("quickstart.md")] == []


def test_the_examples_of_the_sampling_page_are_right() -> None:
    blocks = fenced("python", page("sampling.md"))
    checked = [block for block in blocks if "assert" in block]
    assert len(checked) == 3
    for block in checked:
        exec(block, {})
