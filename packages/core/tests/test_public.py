"""The public surface: what is exported, what is documented, and what importing it costs."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import polyxla
import polyxla_testing
from polyxla import errors, hookspecs
from polyxla.cli import app
from polyxla.plugin import env
from polyxla_testing import fake

TIMEOUT_S = 60.0
HEAVY = ("torch", "torch_xla", "grpc", "numpy", "lightning", "tensorboard", "jax")


def _public(module: object) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


@pytest.mark.parametrize("module", [polyxla, polyxla_testing], ids=["polyxla", "testing"])
def test_all_is_what_is_defined_and_sorted(module: object) -> None:
    exported: list[str] = module.__all__  # type: ignore[attr-defined]
    assert exported == sorted(exported)
    assert set(exported) == _public(module)


def test_the_version_is_that_of_the_distribution() -> None:
    assert polyxla.__version__ == importlib.metadata.version("polyxla-core")
    with pytest.raises(AttributeError, match="module 'polyxla' has no attribute 'version'"):
        polyxla.version  # noqa: B018  (the access is the test)


def test_every_export_has_a_docstring() -> None:
    undocumented = [
        name for name in polyxla.__all__ if name != "hookimpl" and not inspect.getdoc(getattr(polyxla, name))
    ]
    assert undocumented == []


def test_every_error_is_exported_and_a_polyxla_error() -> None:
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    kinds = [kind for kind in found if kind.__module__ == errors.__name__]
    assert kinds
    assert all(issubclass(kind, polyxla.PolyxlaError) for kind in kinds)
    assert {kind.__name__ for kind in kinds} <= set(polyxla.__all__)


def _documented(path: str) -> set[str]:
    """Names assigned at module level with a docstring below."""
    body = ast.parse(Path(path).read_text()).body
    return {
        target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.Assign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_every_variable_is_spelt_as_itself_and_documented() -> None:
    names = [name for name in vars(env) if name.startswith("POLYXLA_")]
    assert names
    assert [getattr(env, name) for name in names] == names
    assert set(names) <= _documented(env.__file__)
    assert fake.FAKE_DEVICES == "FAKE_DEVICES"


def test_every_hook_says_when_it_is_called() -> None:
    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("polyxla_")}
    assert len(hooks) >= 11
    silent = [name for name, hook in hooks.items() if "alled" not in (hook.__doc__ or "")]
    assert silent == []
    unmarked = [name for name, hook in hooks.items() if not hasattr(hook, "polyxla_spec")]
    assert unmarked == []


def test_every_command_has_a_help_text() -> None:
    assert [command.callback for command in app.app.registered_commands if not command.callback.__doc__] == []


def _imported_by(code: str, *args: str) -> set[str]:
    """Run `code` in a fresh interpreter; return the top-level modules that it imported."""
    report = "\nimport json, sys\nprint(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code + report, *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_polyxla_imports_nothing_heavy() -> None:
    assert _imported_by("import polyxla").isdisjoint({*HEAVY, "rich", "typer", "cloudpickle", "pytest"})


def test_the_parts_that_a_launch_needs_import_nothing_heavy() -> None:
    code = (
        "import polyxla.launcher.processes, polyxla.launcher.child, "
        "polyxla.cli.run, polyxla.cli.script, polyxla.cli.variables"
    )
    assert _imported_by(code).isdisjoint({*HEAVY, "rich", "typer"})


def test_the_test_kit_imports_nothing_heavy() -> None:
    assert _imported_by("import polyxla_testing").isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "args", [["--help"], ["run", "--help"], ["devices", "--help"]], ids=["help", "run", "devices"]
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import polyxla.cli.app\n"
        "try:\n    polyxla.cli.app.main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert _imported_by(code, *args).isdisjoint({*HEAVY, "rich"})


def test_a_listing_of_runtimes_imports_nothing_heavy() -> None:
    code = "import polyxla.cli.app\ntry:\n    polyxla.cli.app.main()\nexcept SystemExit:\n    pass"
    assert _imported_by(code, "runtimes", "--json").isdisjoint(HEAVY)
