"""The pages name every hook, variable, option, file and test, with the code's own defaults and texts."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import runpy
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import polyxla.cli.app
import polyxla.env
import polyxla.hookspecs
import polyxla.tpu.env
import polyxla_bridge.env
import polyxla_pjrt.env
import polyxla_pod.hookspecs
import polyxla_training.env
import polyxla_training.hookspecs
import polyxla_xrt.env
from polyxla import Replica, launch
from polyxla.cli.variables import variables
from polyxla.plugin import load_everything, select
from polyxla.tpu.metadata import MetadataClient
from polyxla_pjrt.discovery import discover
from polyxla_training import Trainer, check_replicas
from polyxla_training.lightning.callbacks import REFUSED
from polyxla_training.lightning.hooks import PLAIN
from polyxla_training.lightning.trainer_arguments import FIXES
from polyxla_training.options import LEAST_READS, LOG_EVERY_N_STEPS, TrainerOptions
from polyxla_xrt.config.configuration import Configuration, read_configuration

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
API = sorted((ROOT / "docs" / "api").glob("*.md"))
READMES = sorted(ROOT.glob("packages/*/README.md"))
HOOKSPECS = [polyxla.hookspecs, polyxla_training.hookspecs, polyxla_pod.hookspecs]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def default_of(function: Callable[..., Any], parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


@pytest.mark.parametrize(
    "hook", [name for specs in HOOKSPECS for name in vars(specs) if name.startswith("polyxla_")]
)
def test_every_hook_is_on_the_plugins_page(hook: str) -> None:
    assert f"`{hook}(" in page("plugins.md")


@pytest.mark.parametrize(
    "module",
    [
        polyxla.env,
        polyxla_bridge.env,
        polyxla_pjrt.env,
        polyxla.tpu.env,
        polyxla_training.env,
        polyxla_xrt.env,
    ],
)
def test_every_variable_is_on_the_environment_page(module: ModuleType) -> None:
    names = [name for name, value in vars(module).items() if name.isupper() and value == name]
    assert names
    assert [name for name in names if f"`{name}`" not in page("environment.md")] == []


def test_polyxla_env_lists_every_variable_in_the_sources() -> None:
    environ: dict[str, str] = {}
    listed = {row["name"] for row in variables(environ, polyxla.env.from_environ(environ))}
    sources = [path.read_text() for path in (ROOT / "packages").glob("*/src/**/*.py")]
    quoted = {name for text in sources for name in re.findall(r'"(POLYXLA_[A-Z_]*[A-Z])"', text)}
    assert len(quoted) > 20
    assert quoted - listed == set()


def node() -> Configuration:
    found = read_configuration({"XRT_TPU_CONFIG": "tpu_worker;0;a:1"})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("variable", "default"),
    [
        ("POLYXLA_START_TIMEOUT_S", polyxla.env.DEFAULT_S["POLYXLA_START_TIMEOUT_S"]),
        ("POLYXLA_INPUT_TIMEOUT_S", polyxla.env.DEFAULT_S["POLYXLA_INPUT_TIMEOUT_S"]),
        ("POLYXLA_WAIT_S", polyxla.env.from_environ({}).wait_s.value),
        ("POLYXLA_DEVICES", f"`{polyxla.env.from_environ({}).devices.value}`"),
        ("POLYXLA_STALL_TIMEOUT_S", polyxla_bridge.env.stall_timeout_s({})),
        ("CPU_NUM_DEVICES", len(discover({}, "cpu").devices)),
        ("TPU_NUM_DEVICES", node().devices_per_worker),
        ("XRT_MESH_CONNECT_WAIT", node().mesh_connect_wait_s),
        ("XRT_START_LOCAL_SERVER", int(node().may_start_service)),
    ],
)
def test_a_default_on_the_environment_page_is_the_codes(variable: str, default: Any) -> None:
    (row,) = re.findall(rf"^\| `{variable}` \|.*", page("environment.md"), re.MULTILINE)
    found = row.split(" | ")[-1].removesuffix(" |").partition(":")[0]
    assert found == (default if isinstance(default, str) else f"{default:g}")


def test_the_rows_of_the_readmes_table_decide_in_their_order() -> None:
    worker, emulated, cpu = {"XRT_TPU_CONFIG": "w;0;a:1"}, {"POLYXLA_EMULATE": "v3-8"}, {"PJRT_DEVICE": "CPU"}
    rows: list[tuple[dict[str, str], tuple[str, str, int]]] = [
        ({"POLYXLA_RUNTIME": "xrt", **cpu, **worker}, ("xrt", "TPU", 8)),
        ({"POLYXLA_RUNTIME": "pjrt", **worker}, ("pjrt", "CPU", 1)),
        ({**emulated, **worker}, ("pjrt", "TPU", 8)),
        ({**cpu, "CPU_NUM_DEVICES": "3", **worker}, ("pjrt", "CPU", 3)),
        (worker, ("xrt", "TPU", 8)),
        ({}, ("pjrt", "CPU", 1)),
    ]
    for environ, expected in rows:
        chosen = select(environ, polyxla.env.from_environ(environ).runtime)
        assert (chosen.runtime, chosen.discovery.kind, len(chosen.discovery.devices)) == expected
        assert chosen.implicit == (not environ), "only a choice without a setting is printed"


@functools.cache
def commands() -> dict[str, Any]:
    """Return every command by name, as typer's own class."""
    plugins = typer.Typer()
    load_everything().hook.polyxla_add_commands(app=plugins)
    apps: list[Any] = [typer.main.get_command(app) for app in (polyxla.cli.app.app, plugins)]
    return {name: command for app in apps for name, command in app.commands.items() if not command.hidden}


COMMANDS = [
    "check-replicas",
    "consolidate",
    "devices",
    "doctor",
    "env",
    "fits",
    "pod",
    "report",
    "run",
    "runtimes",
    "warm",
    "worker",
]


def test_every_command_is_on_the_command_line_page() -> None:
    assert sorted(commands()) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_command_line_page(name: str) -> None:
    before, *sections = page("cli.md").split("\n## ")
    (section,) = [candidate for candidate in sections if re.match(rf"`polyxla {name}\b", candidate)]
    command = commands()[name]
    parts = getattr(command, "commands", {name: command})
    # Its standard output carries messages for the launcher.
    without = [
        part for part, command in parts.items() if all(option.name != "as_json" for option in command.params)
    ]
    assert "Every command accepts `--json`" in before
    assert without == (["host"] if name == "pod" else [])
    parts = [command, *parts.values()]
    for option in [parameter for part in parts for parameter in part.params]:
        if option.param_type_name != "option" or option.name == "as_json":
            continue
        (flag,) = (spelling for spelling in option.opts if spelling.startswith("--"))
        assert re.search(rf"{flag}\b", section), flag
        if name == "worker" and isinstance(option.default, str | int) and option.default:
            (row,) = re.findall(rf"^\| `{flag}\b.*", section, re.MULTILINE)
            assert row.split(" | ")[-1].strip("` |") == str(option.default)


def test_the_options_of_check_replicas_have_the_defaults_on_the_page() -> None:
    command = {parameter.name: parameter.default for parameter in commands()["check-replicas"].params}
    for option, text in {"steps": "10", "devices": "4", "batch_size": "32", "tolerance": "1e-5"}.items():
        assert command[option] == default_of(check_replicas, option) == float(text)
        assert f"[--{option.replace('_', '-')} {text}]" in page("cli.md")


def calls(name: str) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of a function on the training page."""
    blocks = re.findall(r"```python\n(.*?)```", page("training.md"), re.DOTALL)
    return [
        {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def test_launch_has_the_arguments_and_defaults_of_the_training_page() -> None:
    [given] = calls("launch")
    assert given.pop("args") == ...
    _, _, *others = inspect.signature(launch).parameters.values()
    assert given == {parameter.name: parameter.default for parameter in others}


def test_the_trainer_has_the_arguments_and_defaults_of_the_training_page() -> None:
    [given] = calls("Trainer")
    options = list(inspect.signature(Trainer).parameters.values())[: len(given)]
    assert list(given) == [option.name for option in options], "in this order they need no names"
    assert given == {option.name: option.default for option in options} | {"max_epochs": 5}


def test_each_argument_and_callback_of_lightnings_is_on_the_training_page_with_what_its_error_says() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \| (.+) \|$", page("training.md").split("### From Lightning")[1], re.MULTILINE
    )
    here = {theirs: ours for names, ours in rows for theirs in re.findall(r"`(\w+)`", names)}
    options = {field.name for field in fields(TrainerOptions)}
    for name, fix in {**FIXES, **REFUSED}.items():
        written = set(re.findall(r"(\w+)=", fix)) & options
        assert written <= set(re.findall(r"`(\w+)`", here[name])), name


def test_what_the_conventions_page_names_exists() -> None:
    text = page("conventions.md")
    section = text.partition("## The Trainer of transformers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `.*? \| (.*) \|$", section, re.MULTILINE)
    named = {name for here in rows for name in re.findall(r"`(\w+)[`=]", here)}
    assert len(named) > 20
    assert named - {*dir(Trainer)} <= {"batch_size", "configure_optimizers", "fp16"}
    assert set(re.findall(r"`polyxla (\w[\w-]*)", text)) <= {*commands()}
    replica = set(re.findall(r"`replica\.(\w+)", text))
    assert replica >= {"setup", "loader", "step"}
    assert [name for name in replica if not hasattr(Replica, name)] == []


def test_every_command_on_the_performance_page_is_a_benchmark() -> None:
    text = page("performance.md")
    found = re.findall(r"`nox -s bench -- (?!all`)(\w+)(?: (\w+))?`", text)
    on_torchtpu = re.findall(r"`nox -s bench-torchtpu -- (\w+)`", text)
    assert len(found) > 20
    assert len(on_torchtpu) > 3
    for name, argument in (*found, *(("torchtpu", argument) for argument in on_torchtpu)):
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert not argument or f"[{argument}]" in source, argument


def test_every_method_of_replica_on_the_training_page_has_the_named_arguments() -> None:
    section = page("training.md").partition("## `Replica`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    methods = dict(re.findall(r"`(\w+)\(([^`]*)\)`", " ".join(rows)))
    assert len(methods) >= 17
    for name, arguments in methods.items():
        parameters = inspect.signature(getattr(Replica, name)).parameters.values()
        optional = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        named = set(re.findall(r"\w+", arguments))
        assert "..." in arguments or optional <= named, name


def test_the_aims_on_the_performance_page_are_those_of_the_benchmarks() -> None:
    form = r"^\| `(\w+)` \| (.*?) \| at (least|most) ([\d.]+)"
    rows = re.findall(form, page("performance.md"), re.MULTILINE)
    signs = {"least": ">=", "most": "<="}
    aims = [(benchmark, row, f"{signs[bound]} {aim}") for benchmark, row, bound, aim in rows]
    named = runpy.run_path(str(ROOT / "benchmarks" / "aims.py"))["AIMS"]
    assert aims == [(benchmark, row, aim) for benchmark, each in named.items() for row, aim in each.items()]
    for benchmark, row, _ in aims:
        source = (ROOT / "benchmarks" / f"{benchmark}.py").read_text()
        assert f'"{row.partition(":")[0]}' in source, row


def test_the_hooks_of_a_plain_module_are_on_the_training_page() -> None:
    (paragraph,) = [part for part in page("training.md").split("\n\n") if part.startswith("The module needs")]
    short = re.compile(r"`(on_\w+)_start` and `_end`")
    named = re.findall(r"`(on_\w+)`", short.sub(r"`\1_start` and `\1_end`", paragraph))
    assert set(named) - {"on_post_move_to_device"} == PLAIN


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("packages/*/pyproject.toml")), ids=lambda path: path.parent.name
)
def test_every_distribution_is_on_the_installation_page(path: Path) -> None:
    name = tomllib.loads(path.read_text())["project"]["name"]
    modules = [
        directory.name for directory in path.parent.glob("src/*") if (directory / "__init__.py").is_file()
    ]
    [module] = [f"`{module}`" for module in modules] or ["none"]
    assert f"| `{name}` | {module} |" in page("installation.md")


def test_every_session_is_on_the_page_for_contributors() -> None:
    noxfile, text = (ROOT / "noxfile.py").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    sessions = re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", noxfile, re.MULTILINE)
    assert len(sessions) >= 13
    named = re.findall(r"nox -s \"?([\w-]+)", text)
    assert {name.replace("-", "_") for name in named} == set(sessions)
    (default,) = re.findall(r"^nox\.options\.sessions = (.*)", noxfile, re.MULTILINE)
    said = [
        name.replace("(runtime='pjrt')", " on pjrt").replace("(package='all')", "")
        for name in ast.literal_eval(default)
    ]
    assert f"| `nox` | {', '.join(said)} |" in text


def templates(sources: Iterable[Path]) -> list[re.Pattern[str]]:
    """Return a pattern for each text's first line: what an f-string fills in may be anything."""
    found = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr():
                    parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
                case ast.Constant(value=str(text)):
                    parts = [text.partition("\n")[0]]
                case _:
                    continue
            fixed = "".join(str(part) for part in parts if part is not None)
            if len(fixed) >= LEAST_FIXED:
                found.add("".join(".*?" if part is None else re.escape(str(part)) for part in parts))
    return [re.compile(pattern) for pattern in found]


LEAST_FIXED = 15
"""Shorter texts would match too much, as ``f"{what}. {fix}"`` does."""


def is_printed(text: str, printed: list[re.Pattern[str]]) -> bool:
    """Return whether a text is one that the sources print, or an error's two: what is wrong, and the fix."""
    splits = [(text[: match.start()], text[match.end() :]) for match in re.finditer(r"\. ", text)]
    return any(pattern.fullmatch(text) for pattern in printed) or any(
        all(any(pattern.fullmatch(part) for pattern in printed) for part in split) for split in splits
    )


def test_the_error_texts_of_the_questions_page_are_those_of_the_sources() -> None:
    blocks = re.findall(r'^```text title="([\w ]+)"\n(.*?)```', page("faq.md"), re.MULTILINE | re.DOTALL)
    assert {title for title, _ in blocks} == {"polyxla", "torch_xla", "libtpu", "Python"}
    spec = importlib.util.find_spec("torch_xla")
    assert spec
    assert spec.origin
    torch_xla = Path(spec.origin).parent
    ours = templates((ROOT / "packages").glob("*/src/**/*.py"))
    printed = {
        "polyxla": ours,
        "torch_xla": templates([torch_xla / "runtime.py", torch_xla / "_internal" / "pjrt.py"]),
        # The emulated libtpu has the real one's texts, and so have the tests of `polyxla fits`.
        "libtpu": [*ours, *templates([ROOT / "packages" / "tools" / "tests" / "fits" / "test_fits.py"])],
    }
    # These prefixes are added where a text is printed.
    added = r"^(polyxla: |error: |WARNING:root:|RuntimeError: |runtime '\w+' cannot run here: |\.\.\. )*"
    quoted = [(title, re.sub(added, "", on_one_line(text))) for title, text in blocks if title in printed]
    assert len(quoted) >= 25
    wrong = [
        text for title, text in quoted if not is_printed(re.sub(r" \(from [^)]*\)", "", text), printed[title])
    ]
    assert wrong == []


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_says_how_to_install_and_links_to_the_documentation(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^pip install --find-links dist .*\bpolyxla", text, re.MULTILINE)
    assert "./packages/" not in text
    pages = re.findall(r"\]\(https://polyxla\.github\.io/polyxla/([\w-]+)/", text)
    assert pages
    assert [name for name in pages if not (ROOT / "docs" / f"{name}.md").is_file()] == []
    assert re.findall(r"\]\((?!https://)", text) == [], "a relative link leads nowhere on a package index"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    paths = [*PAGES, *(ROOT / "docs").rglob("*.ipynb")]
    names = [str(path.relative_to(ROOT / "docs").with_suffix(".md")) for path in paths]
    assert [name for name in names if f": {name}\n" not in navigation] == []


def test_every_module_with_public_names_is_on_an_api_page() -> None:
    # .ci/api.py looks for each of the names on the built pages.
    packages = ROOT.glob("packages/*/src/**/__init__.py")
    sources = [path for path in packages if "\n__all__ = " in path.read_text()]
    modules = {".".join(path.parts[path.parts.index("src") + 1 : -1]) for path in sources}
    shown = [name for path in API for name in re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE)]
    assert len(modules) >= 7
    assert sorted(modules - set(shown)) == []


def test_the_tests_that_the_features_page_names_exist() -> None:
    directories = [ROOT / "integration", *(ROOT / "packages").glob("*/tests")]
    files = [path for directory in directories for path in directory.rglob("test_*.py")]
    files += (ROOT / "packages").glob("*/src/**/*conformance.py")
    sources = "".join(path.read_text() for path in files)
    text = page("features.md") + page("comparison.md")
    named = set(re.findall(r"\btest_\w+", text)) - {path.stem for path in files}
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []


@pytest.mark.parametrize("name", ["features.md", "comparison.md"])
def test_the_files_that_the_features_page_names_exist(name: str) -> None:
    named = re.findall(r"`((?:packages|integration)/[^`:]+)", page(name))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


# The distributions as the architecture page calls them.
SOURCES = {
    "core": "packages/core/src/polyxla",
    "training": "packages/training/src/polyxla_training",
    "pjrt": "packages/runtime-pjrt/src/polyxla_pjrt",
    "xrt": "packages/runtime-xrt/src/polyxla_xrt",
    "bridge": "packages/bridge/src/polyxla_bridge",
    "pod": "packages/pod/src/polyxla_pod",
    "tools": "packages/tools/src/polyxla_tools",
    "sampler": "packages/sampler/src/polyxla_sampler",
    "precision": "packages/precision/src/polyxla_precision",
}


def test_the_files_that_the_architecture_page_names_exist() -> None:
    text = page("architecture.md")
    directories = [ROOT, *(ROOT / source for source in SOURCES.values())]
    named = re.findall(r"`([\w/.]+\.(?:py|c|proto))`", text)
    assert named
    assert [name for name in named if not any((directory / name).exists() for directory in directories)] == []
    # A file after the name of a distribution belongs to it.
    named_in = re.findall(rf"\b({'|'.join(SOURCES)}) `([\w/.]+\.(?:py|c|proto))`", text)
    assert {where for where, _ in named_in} == set(SOURCES)
    assert [file for file in named_in if not (ROOT / SOURCES[file[0]] / file[1]).exists()] == []
    assert [path for path in SOURCES.values() if f"`{path}`" not in text] == []


def test_the_hooks_on_the_plugins_page_are_in_the_order_of_their_modules() -> None:
    named = re.findall(r"^\| `(polyxla_\w+)\(", page("plugins.md"), re.MULTILINE)
    assert named == [name for specs in HOOKSPECS for name in vars(specs) if name.startswith("polyxla_")]


def test_the_numbers_on_the_pages_are_those_of_the_code() -> None:
    from torch_xla.distributed.parallel_loader import ParallelLoader

    from polyxla.launcher import processes
    from polyxla.plugin import Replication, failures
    from polyxla.xla import program_checks
    from polyxla_bridge.engine import clients, stall_watchdog
    from polyxla_bridge.programs import cache
    from polyxla_training import storage
    from polyxla_training.checkpoint import api, safetensors_header
    from polyxla_training.listeners import checkpointing, log_upload, progress
    from polyxla_training.observe import step_counters
    from polyxla_training.observe.own_loop import step_watch, trained
    from polyxla_xrt import local_service
    from polyxla_xrt.client import probe, unanswered
    from polyxla_xrt.config import configuration, credentials, timeouts
    from polyxla_xrt.protocol import worker

    words: dict[float, str] = {0.5: "half a", 1: "a", 2: "two", 3: "three", 9: "nine", 10: "ten"}
    words |= {30: "half an hour", 60: "minute"}
    traced = words[step_counters.MAX_TRACED_STEPS - step_counters.FIRST_STEPS]
    ahead = {
        "loader_prefetch_size": "{} batches on the host",
        "device_prefetch_size": "{} on the device",
        "host_to_device_transfer_threads": "{}",
    }
    short = f"a training of fewer than {LOG_EVERY_N_STEPS * LEAST_READS} steps"
    metadata_s = words[default_of(MetadataClient, "timeout_s")]
    written = {
        "environment.md": [f"the metadata server, which has {metadata_s} seconds to answer"],
        "training.md": [
            *(
                f"`{option}` ({text.format(default_of(ParallelLoader, option))})"
                for option, text in ahead.items()
            ),
            f"by default every {LOG_EVERY_N_STEPS}, or {words[LEAST_READS]} times in {short}",
            f"the top level of one with more than {progress.MOST_LAYERS} layers",
        ],
        "architecture.md": [
            f"SIGTERM, and SIGKILL after {failures.STOP_GRACE_S:g} s",
            f"get {words[processes.EXIT_GRACE_S]} second to exit",
            f"It says every {words[processes.EXIT_NOTICE_S]}",
            f"{words[processes.LIVENESS_CHECK_S]} check every second notices",
            f"times out after {clients.CONNECT_TIMEOUT_S} s",
            f"is reported after {stall_watchdog.RETIRED_TIMEOUT_S:g} s",
            f"after {words[failures.SIGNAL_SPREAD_S]} second",
            f"after {failures.TERMINATION_GRACE_S / 60:g} minutes at the latest",
            f"exits with code {failures.PARENT_GONE}",
            f"At most {unanswered.MAX_IN_FLIGHT} executions are in flight",
        ],
        "checkpoints.md": [
            f"up to {words[api.WAIT_TIMEOUT_S / 60]} by default",
            f"About every {words[checkpointing.AGREE_EVERY_S]} seconds",
            f"in parts of {storage.PART_BYTES >> 20} MiB",
            f"uploaded every {words[log_upload.EVERY_S]} and at the end",
            f"more than {safetensors_header.MAX_HEADER_BYTES // 10**6} MB of data",
        ],
        "compile-cache.md": [
            f"holds at most {cache.LIMIT_BYTES >> 30} GiB",
            f"again after every {cache.SWEEP_BYTES >> 20} MiB",
        ],
        "logging-and-profiling.md": [
            f"in the first {words[step_counters.FIRST_STEPS]} steps, and in at most {traced} later ones",
            f"after {words[step_watch.MAX_LINES]} such steps, a last line",
            f"every {step_watch.READ_EVERY}th step and the last one",
            f"read {words[step_watch.READ_AFTER]} steps later",
            f"at most {words[trained.MAX_ELEMENTS * 4 >> 20]} megabyte per optimizer",
            f"where {words[program_checks.STEPS]} optimizer steps or more were made",
            f"submitted for {program_checks.SECONDS:g} s",
            f"where a loop reads {words[program_checks.READS]} collectives of a replica without it",
        ],
        "plugins.md": [f"`Replication` ({words[len(Replication.__abstractmethods__)]} methods to implement"],
        "tpu-nodes.md": [
            f"exits {local_service.IDLE_S:g} s after the last one",
            f"is the number of cores of each worker, {configuration.DEFAULT_CORES} by default",
            f"up to {words[timeouts.LONGEST_WAIT_S / (7 * 24 * 3600)]} week, in order of arrival",
            f"receives nothing from the other for {worker.SILENCE_S} s",
            f"so busy that it does not answer | after {probe.BUSY_S:g} s",
            f"packets are held up for less than {worker.SILENCE_S - worker.PING_S} s",
            f"The token has at least {credentials.MIN_TOKEN_CHARS} characters",
        ],
    }
    texts = {name: on_one_line(page(name)) for name in written}
    missing = [text for name, expected in written.items() for text in expected if text not in texts[name]]
    assert missing == []


def _packages_by_requirement() -> dict[str, set[str]]:
    """Return the packages that require each library which is not ours, directly or in an extra."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for some in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            for requirement in some:
                name = re.split(r"[^\w.-]", requirement)[0].lower()
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


OLD_MESSAGES = (
    "RuntimeError: tensorflow/compiler/xla/xla_client/computation_client.cc:273 : Missing XLA configuration",
    "pytorch_lightning.utilities.exceptions.MisconfigurationException: No TPU devices were found.",
    "RuntimeError: Cannot replicate if number of devices (1) is different from 8",
    "TypeError: 'mappingproxy' object does not support item assignment",
    'XRT_TPU_CONFIG="localservice;0;localhost:51011"',
    'XRT_TPU_CONFIG="tpu_worker;0;$TPU_IP_ADDRESS:8470"',
    r"""lsof -w /lib/libtpu.so \| grep "python" \| awk '{print $2}' \| xargs -r kill -9""",
    *("torch_xla.distributed.xla_dist", "--conda-env", "xla_spawn.py", "xm.xrt_world_size()"),
    *("xm.get_ordinal()", "tpu_spawn_debug", "--tpu_metrics_debug", "tpu_cores=8", "startup-script"),
)
"""What the documents of Lightning 1.5 and 1.6 and of Hugging Face's first TPU support say, verbatim."""


def test_the_old_commands_page_has_every_old_message_and_only_commands_that_exist() -> None:
    text = page("old-commands.md")
    assert [message for message in OLD_MESSAGES if message not in text] == []
    shown = re.findall(r"`polyxla (\w[^`]*)`", text)
    assert len(shown) >= 6
    for command in shown:
        words = command.partition(" -- ")[0].split()
        found = commands()[words[0]]
        found = getattr(found, "commands", {}).get(words[-1] if len(words) == 1 else words[1], found)
        options = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, command
