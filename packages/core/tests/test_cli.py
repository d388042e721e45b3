"""The command line: tables, JSON documents, the program's arguments, and errors without a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import polyxla
from polyxla.cli.app import app
from polyxla.console import say_once
from polyxla.plugin import env
from polyxla.plugin_manager import HOOKSPECS
from polyxla_testing import PluginInstaller

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
XRT_MISSING = (
    "runtime 'xrt' is not installed (installed: toy) (from {}). "
    "Install it: pip install ./packages/bridge ./packages/runtime-xrt"
)
COUNTS = "Write a count from 1 to 8, or {0}auto for all of them."
NAMES = "Name devices from 0 to 7, each once, such as {0}'[7]'."
FORMS = "Write {0}auto, a count such as {0}8, or indices such as {0}'[5]'."


@pytest.fixture(autouse=True)
def _toy(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    install_plugin.hide_others()
    install_plugin("toy", _toy_runtime("TOY"))
    for name in ("POLYXLA_RUNTIME", "POLYXLA_DEVICES", "POLYXLA_PRECISION", "PJRT_DEVICE", "XRT_TPU_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOY", "8")
    monkeypatch.chdir(tmp_path)
    # `run -m` looks for modules in the current directory.
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)")
    # As in a clone, where errors advise to install its directories.
    (tmp_path / "packages" / "core").mkdir(parents=True)
    (tmp_path / "packages" / "core" / "pyproject.toml").touch()
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def _toy_runtime(variable: str) -> str:
    """Return the source of a runtime whose devices and claim come from `variable`."""
    code = (PROGRAMS / "toy_runtime.py").read_text()
    return code.replace('VARIABLE = "TOY"', f"VARIABLE = {variable!r}")


def _invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def _polyxla(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyxla", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


def _document(*args: str, exit_code: int = 0) -> dict[str, Any]:
    result = _invoke(*args)
    assert result.exit_code == exit_code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _error(where: str) -> dict[str, str]:
    what, _, fix = XRT_MISSING.partition(" (from {}). ")
    text = XRT_MISSING.format(where)
    return {"error": text, "what": what, "where": where, "fix": fix, "version": polyxla.__version__}


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


class TestRuntimes:
    def test_table_of_the_command(self) -> None:
        result = _invoke("runtimes")
        assert result.exit_code == 0
        assert _lines(result.stdout) == [
            ["runtime", "can", "run", "here", "devices", "asked", "for", "by"],
            ["→", "toy", "yes", "8", "TOY", "TOY=8"],
            ["chosen:", "toy", "(TOY=8)"],
        ]

    def test_json_document(self, install_plugin: PluginInstaller) -> None:
        install_plugin("broken", "raise ImportError('no grpc')")
        why_not = (
            "runtime 'broken' cannot be imported: ImportError: no grpc (from broken of broken). "
            "Repair or remove it: pip install --force-reinstall broken"
        )
        assert _document("runtimes", "--json") == {
            "chosen": "toy",
            "reason": "TOY=8",
            "warnings": [f"left out: {why_not}"],
            **dict.fromkeys(("error", "what", "where", "fix")),
            "version": polyxla.__version__,
            "runtimes": [
                {
                    "name": "broken",
                    "package": "broken",
                    "version": "1.0",
                    "available": False,
                    "asked_for_by": None,
                    "kind": None,
                    "devices": 0,
                    "why_not": why_not,
                },
                {
                    "name": "toy",
                    "package": "toy",
                    "version": "1.0",
                    "available": True,
                    "asked_for_by": "TOY=8",
                    "kind": "TOY",
                    "devices": 8,
                    "why_not": None,
                },
            ],
        }

    def test_a_broken_runtime_is_listed_and_the_others_work(self, install_plugin: PluginInstaller) -> None:
        install_plugin("broken", "raise ImportError('no grpc')")
        result = _invoke("runtimes")
        assert result.exit_code == 0
        assert "no: runtime 'broken' cannot be imported: ImportError: no grpc" in result.stdout
        assert "chosen: toy (TOY=8)" in result.stdout

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            pytest.param(
                "raise ImportError('no disk')", "plugin 'extra' cannot be imported: ImportError: no disk"
            ),
            pytest.param(
                "from polyxla import hookimpl\n@hookimpl\ndef polyxla_step_finishd(): pass",
                "plugin 'extra' does not match polyxla's hooks: unknown hook 'polyxla_step_finishd'",
            ),
        ],
        ids=["import", "misspelt"],
    )
    def test_a_broken_plugin_is_reported_as_a_warning(
        self, code: str, text: str, install_plugin: PluginInstaller
    ) -> None:
        install_plugin.listener("extra", code)
        result = _invoke("runtimes")
        assert result.exit_code == 0
        assert result.stderr.startswith(f"polyxla: {text}")
        assert _document("runtimes", "--json")["warnings"][0].startswith(text)

    def test_two_claims_are_a_warning(
        self, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_plugin("toy-b", _toy_runtime("TOY_B"))
        monkeypatch.setenv("TOY_B", "1")
        monkeypatch.setenv("TOY_B_CLAIM", "CONFIGURED")
        warning = (
            "TOY_B=1 asks for runtime 'toy-b' and TOY=8 for 'toy': 'toy' wins. "
            "Unset one of them, or name a runtime with --runtime."
        )
        assert _invoke("runtimes").stderr == f"polyxla: {warning}\n"
        assert _document("runtimes", "--json")["warnings"] == [warning]
        named = _document("runtimes", "--runtime", "toy-b", "--json")
        assert (named["chosen"], named["reason"], named["warnings"]) == ("toy-b", "--runtime toy-b", [])

    def test_the_table_is_shown_even_if_no_runtime_can_be_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TOY")
        error = "no runtime can be chosen (toy: not asked for). Name one with --runtime or POLYXLA_RUNTIME."
        document = _document("runtimes", "--json", exit_code=2)
        assert (document["chosen"], document["error"]) == (None, error)
        assert f"{document['what']}. {document['fix']}" == error
        assert document["runtimes"][0]["asked_for_by"] is None
        result = _invoke("runtimes")
        assert (result.exit_code, result.stderr) == (2, f"polyxla: error: {error}\n")
        assert "toy" in result.stdout, "the table shows what is wrong"


class TestDevices:
    def test_table_of_the_command(self) -> None:
        result = _invoke("devices")
        assert result.exit_code == 0
        first, *rows, last = _lines(result.stdout)
        assert first == ["index", "kind", "name", "host_index"]
        assert rows[0] == ["0", "TOY", "toy", "device", "0", "0"]
        assert [(row[0], row[-1]) for row in rows] == [(str(index), str(index // 4)) for index in range(8)]
        assert last == ["runtime", "toy,", "topology", "toy-8,", "2", "host(s)"]

    def test_json_document(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOY", "1")
        assert _document("devices", "--runtime", "toy", "--json") == {
            "runtime": "toy",
            "reason": "--runtime toy",
            "topology": "toy-8",
            "host_count": 2,
            "devices": [{"index": 0, "kind": "TOY", "name": "toy device 0", "host_index": 0}],
        }

    def test_an_implicit_choice_is_printed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOY_CLAIM", "FALLBACK")
        assert _invoke("devices").stderr == "polyxla: runtime toy: TOY=8\n"

    def test_an_error_is_a_json_document(self) -> None:
        assert _document("devices", "--runtime", "xrt", "--json", exit_code=2) == _error("--runtime xrt")


class TestEnv:
    def test_json_document(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLYXLA_DEVICES", "[5]")
        monkeypatch.setenv("POLYXLA_START_TIMEOUT_S", "9")
        monkeypatch.setenv("POLYXLA_SECRET", "sesame")
        monkeypatch.delenv("POLYXLA_COMPILE_CACHE", raising=False)
        rows = _document("env", "--runtime", "toy", "--json")["variables"]
        cells = [tuple(row[key] for key in ("name", "value", "origin", "reader")) for row in rows]
        assert [row for row in cells if row[-1] != "plugins"] == [
            ("POLYXLA_RUNTIME", "toy", "--runtime toy", "polyxla"),
            ("POLYXLA_DEVICES", "[5]", "environment", "polyxla"),
            ("POLYXLA_PRECISION", None, "default", "polyxla"),
            ("POLYXLA_START_TIMEOUT_S", "9", "environment", "polyxla"),
            ("POLYXLA_INPUT_TIMEOUT_S", "1800", "default", "polyxla"),
            ("POLYXLA_STALL_TIMEOUT_S", "300", "default", "polyxla"),
            ("POLYXLA_WAIT_S", "0", "default", "polyxla"),
            ("POLYXLA_SECRET", "(hidden)", "environment", "polyxla"),
            ("POLYXLA_COMPILE_CACHE", "on", "default", "polyxla"),
            ("POLYXLA_RUN", None, "default", "polyxla"),
            ("POLYXLA_FULL_TRACEBACK", "0", "default", "polyxla"),
            ("TOY", "8", "environment", "runtime toy"),
            ("TOY_VISIBLE", "5", "set by runtime toy", "replicas"),
        ]

    def test_table_of_the_command(self) -> None:
        result = _invoke("env")
        assert result.exit_code == 0
        table = _lines(result.stdout)
        assert table[0] == ["variable", "value", "origin", "read", "by"]
        assert table[2] == ["POLYXLA_DEVICES", "auto", "default", "polyxla"]
        assert table[-1] == ["TOY_VISIBLE", "0,1,2,3,4,5,6,7", "set", "by", "runtime", "toy", "replicas"]

    def test_every_variable_of_polyxla_is_listed(self) -> None:
        rows = _document("env", "--json")["variables"]
        listed = [row["name"] for row in rows if row["reader"] == "polyxla"]
        assert sorted(listed) == sorted(name for name in vars(env) if name.startswith("POLYXLA_"))

    def test_an_error_is_shown_in_place_of_the_replicas_variables(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("POLYXLA_DEVICES", "9")
        rows = _document("env", "--json")["variables"]
        assert rows[1]["value"] == "9"
        assert rows[-1]["name"] == "(replicas)"
        assert rows[-1]["origin"] == (
            "error: devices=9 asks for 9 devices, but runtime toy has 8 here "
            f"(from POLYXLA_DEVICES=9). {COUNTS.format('POLYXLA_DEVICES=')}"
        )


def _plan(*args: str) -> dict[str, Any]:
    plan = _document("run", "--dry-run", "--json", *args)
    assert plan["command"][:3] == [sys.executable, "-m", "polyxla.cli.script"]
    return {**plan, "command": plan["command"][3:]}


class TestRun:
    @pytest.mark.parametrize(
        ("args", "command", "devices"),
        [
            pytest.param(["script.py"], ["script.py"], 8, id="script"),
            pytest.param(["--", "script.py", "--json"], ["script.py", "--json"], 8, id="dashes"),
            pytest.param(
                ["-m", "json.tool", "--json"], ["-m", "json.tool", "--json"], 8, id="module-with-json"
            ),
            pytest.param(["-m", "script", "-m", "-h"], ["-m", "script", "-m", "-h"], 8, id="module-here"),
            pytest.param(
                ["--devices", "1", "script.py", "--devices", "7"],
                ["script.py", "--devices", "7"],
                1,
                id="both",
            ),
            pytest.param(
                ["--devices=2", "script.py", "--runtime", "mine"],
                ["script.py", "--runtime", "mine"],
                2,
                id="equals",
            ),
            pytest.param(
                ["--runtime", "toy", "--precision", "p", "--wait", "9", "-m", "script", "--dry-run"],
                ["-m", "script", "--dry-run"],
                8,
                id="every-option",
            ),
            pytest.param(["script.py", "--help"], ["script.py", "--help"], 8, id="help"),
            pytest.param(["script.py", "--", "x"], ["script.py", "--", "x"], 8, id="dashes-behind"),
        ],
    )
    def test_arguments_after_the_program_belong_to_the_program(
        self, args: list[str], command: list[str], devices: int, install_plugin: PluginInstaller
    ) -> None:
        install_plugin.listener(
            "policies", "from polyxla import hookimpl\n@hookimpl\ndef polyxla_precision(name): return name"
        )
        plan = _plan(*args)
        assert plan["command"] == command
        assert plan["devices"] == list(range(devices))

    @pytest.mark.parametrize(
        ("args", "variables"),
        [
            pytest.param([], {"TOY_VISIBLE": "0,1,2,3,4,5,6,7", "POLYXLA_RUNTIME": "toy"}, id="default"),
            pytest.param(
                ["--devices", "2"],
                {"TOY_VISIBLE": "0,1", "POLYXLA_RUNTIME": "toy", "POLYXLA_DEVICES": "[0, 1]"},
                id="count",
            ),
            pytest.param(
                ["--devices", "[5]"],
                {"TOY_VISIBLE": "5", "POLYXLA_RUNTIME": "toy", "POLYXLA_DEVICES": "[5]"},
                id="index",
            ),
            pytest.param(
                ["--precision", "32"],
                {"TOY_VISIBLE": "0,1,2,3,4,5,6,7", "POLYXLA_RUNTIME": "toy", "POLYXLA_PRECISION": "32"},
                id="precision",
            ),
            pytest.param(
                ["--wait", "1.5"],
                {"TOY_VISIBLE": "0,1,2,3,4,5,6,7", "POLYXLA_RUNTIME": "toy", "POLYXLA_WAIT_S": "1.5"},
                id="wait",
            ),
        ],
    )
    def test_the_choice_is_in_the_programs_environment(
        self, args: list[str], variables: dict[str, str], install_plugin: PluginInstaller
    ) -> None:
        install_plugin.listener(
            "policies", "from polyxla import hookimpl\n@hookimpl\ndef polyxla_precision(name): return name"
        )
        before = dict(os.environ)
        plan = _plan(*args, "script.py")
        assert plan["environment"] == variables
        assert (plan["runtime"], plan["reason"], plan["warnings"]) == ("toy", "TOY=8", [])
        assert dict(os.environ) == before

    def test_devices_auto_wins_over_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLYXLA_DEVICES", "2")
        assert _plan("script.py")["devices"] == [0, 1]
        plan = _plan("--devices", "auto", "script.py")
        assert plan["environment"]["POLYXLA_DEVICES"] == "[0, 1, 2, 3, 4, 5, 6, 7]"

    def test_wait_wins_over_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLYXLA_WAIT_S", "60")
        assert _plan("script.py")["environment"]["POLYXLA_WAIT_S"] == "60"
        assert _plan("--wait", "0", "script.py")["environment"]["POLYXLA_WAIT_S"] == "0"

    def test_a_plugins_dictionary_is_not_changed(self, install_plugin: PluginInstaller) -> None:
        install_plugin("shared", (PROGRAMS / "shared_environment_runtime.py").read_text())
        for _ in range(2):
            plan = _plan("--runtime", "shared", "script.py")
            assert plan["environment"] == {"A": "1", "POLYXLA_RUNTIME": "shared"}

    def test_a_dry_run_prints_the_variables_and_the_command(self) -> None:
        result = _invoke("run", "--dry-run", "--devices", "1", "script.py", "--lr", "1")
        assert result.exit_code == 0
        *variables, command = result.stdout.splitlines()
        assert variables == ["TOY_VISIBLE=0", "POLYXLA_RUNTIME=toy", "POLYXLA_DEVICES=[0]"]
        assert command == f"{sys.executable} -m polyxla.cli.script script.py --lr 1"

    def test_the_secret_reaches_the_script_and_is_not_printed(
        self, install_plugin: PluginInstaller, tmp_path: Path
    ) -> None:
        code = _toy_runtime("TOY").replace("return {f", "return {'POLYXLA_SECRET': 'known to few', f")
        install_plugin("secret", code)
        (tmp_path / "script.py").write_text("import os; print(os.environ['POLYXLA_SECRET'])")
        choice = ("--runtime", "secret")
        for options in [("--dry-run",), ("--dry-run", "--json")]:
            printed = _invoke("run", *choice, *options, "script.py").stdout
            assert "(hidden)" in printed
            assert "known" not in printed
        done = _polyxla("run", *choice, "--json", "script.py")
        assert done.stdout == "known to few\n"
        assert json.loads(done.stderr)["environment"]["POLYXLA_SECRET"] == "(hidden)"

    def test_the_script_runs_with_the_choice_and_its_own_arguments(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text((PROGRAMS / "environment_script.py").read_text())
        done = _polyxla("run", "--devices", "[3]", "script.py", "--devices", "7", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == [["script.py", "--devices", "7", "--json"], ["toy", "[3]", "3"]]

    def test_the_script_has_the_options_of_the_commands_python(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("import sys; print(sys.flags.optimize, sys.warnoptions[-1])")
        command = [sys.executable, "-O", "-W", "error", "-m", "polyxla", "run", "script.py"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.stdout, done.stderr) == ("1 error\n", "")

    def test_broken_prepared_processes_are_left_out(self, install_plugin: PluginInstaller) -> None:
        install_plugin("broken", "import no_such_module", group="polyxla.prepared")
        done = _polyxla("run", "script.py")
        assert (done.returncode, done.stdout) == (0, "['script.py']\n")
        assert done.stderr == (
            "polyxla: prepared processes (broken) are left out: "
            "ModuleNotFoundError: No module named 'no_such_module'\n"
        )

    def test_a_script_in_the_background_of_a_shell_script_ignores_ctrl_c(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("import signal; print(signal.getsignal(signal.SIGINT))")
        # What a shell does to a command with `&`, unless it has job control.
        command = [
            "sh",
            "-c",
            'trap "" INT; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "polyxla",
            "run",
            "script.py",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert (done.stdout, done.stderr) == (f"{signal.SIG_IGN}\n", "")

    def test_the_script_keeps_the_commands_process_id(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("import os; print(os.getpid())")
        command = [sys.executable, "-m", "polyxla", "run", "script.py"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        assert printed == f"{process.pid}\n"

    @pytest.mark.parametrize("end", ["", "; sys.exit()"], ids=["returns", "exits"])
    def test_a_script_that_launches_none_of_the_replicas_asked_for_gets_a_warning(
        self, end: str, tmp_path: Path
    ) -> None:
        (tmp_path / "script.py").write_text(f"import sys; print('done'){end}")
        done = _polyxla("run", "--devices", "4", "script.py")
        assert (done.returncode, done.stdout) == (0, "done\n")
        assert done.stderr == (
            "polyxla: 4 replicas were asked for, but the program ended without launching any. Launch them "
            "in it (polyxla.launch, torch_xla.launch), or run the program in each: polyxla run --each.\n"
        )

    def test_a_script_that_launches_gets_no_warning(
        self, tmp_path: Path, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("echo", (PROGRAMS / "echo_runtime.py").read_text())
        (tmp_path / "script.py").write_text("import polyxla; polyxla.launch(print)")
        done = _polyxla("run", "--runtime", "echo", "--devices", "4", "script.py")
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_misspelt_variable_is_named_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("echo", (PROGRAMS / "echo_runtime.py").read_text())
        (tmp_path / "script.py").write_text("import polyxla; polyxla.launch(print); polyxla.launch(print)")
        monkeypatch.setenv("POLYXLA_DEVICE", "4")
        done = _polyxla("run", "--runtime", "echo", "script.py")
        text = "POLYXLA_DEVICE is not a variable of polyxla and has no effect. Did you mean POLYXLA_DEVICES?"
        assert (done.returncode, done.stderr) == (0, f"polyxla: {text}\n")
        assert text in _document("runtimes", "--runtime", "echo", "--json")["warnings"]

    def test_a_note_of_the_runtime_is_printed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("echo", (PROGRAMS / "echo_runtime.py").read_text())
        monkeypatch.setenv("ECHO_NOTE", "SPEED is old")
        (tmp_path / "script.py").write_text("import polyxla; polyxla.launch(print)")
        done = _polyxla("run", "--runtime", "echo", "script.py")
        assert (done.returncode, done.stderr) == (0, "polyxla: SPEED is old\n")

    def test_json_is_a_line_on_standard_error(self) -> None:
        done = _polyxla("run", "--json", "script.py", "--json")
        assert done.stdout == "['script.py', '--json']\n"
        assert json.loads(done.stderr)["command"][-2:] == ["script.py", "--json"]

    def test_warnings_are_printed_before_the_script_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XRT_TPU_CONFIG", "tpu_worker;0;10.0.0.2:8470")
        done = _polyxla("run", "script.py")
        assert done.stdout == "['script.py']\n"
        assert done.stderr == (
            "polyxla: XRT_TPU_CONFIG=tpu_worker;0;10.0.0.2:8470 asks for runtime 'xrt' and TOY=8 for 'toy': "
            "'toy' wins. Unset one of them, or name a runtime with --runtime.\n"
        )

    @pytest.mark.parametrize(
        ("code", "exit_code"),
        [
            pytest.param("raise SystemExit(7)", 7, id="exit"),
            pytest.param("1/0", 1, id="exception"),
            pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, id="signal"),
        ],
    )
    def test_the_scripts_exit_code_is_passed_through(self, code: str, exit_code: int, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text(code)
        assert _polyxla("run", "script.py").returncode == exit_code

    def test_a_plain_exception_of_the_script_keeps_its_traceback(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("print('before')\n1/0\n")
        done = _polyxla("run", "script.py")
        assert done.stdout == "before\n"
        assert "Traceback (most recent call last):" in done.stderr
        assert f'File "{tmp_path / "script.py"}", line 2' in done.stderr
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")

    def test_standard_input_is_the_scripts(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("print(input())")
        assert _polyxla("run", "script.py", input="hello\n").stdout == "hello\n"


def _refused(args: list[str], text: str) -> None:
    result = _invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"polyxla: error: {text}\n"
    assert isinstance(result.exception, SystemExit), "anything else would have been a traceback"


class TestBadInput:
    @pytest.mark.parametrize("command", [["devices"], ["run", "script.py"]], ids=["devices", "run"])
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            pytest.param(
                "toi",
                "no runtime is called 'toi' (installed: toy) (from {}). Did you mean 'toy'?",
                id="unknown",
            ),
            pytest.param("xrt", XRT_MISSING, id="not-installed"),
        ],
    )
    def test_a_missing_runtime_is_an_error(
        self, name: str, text: str, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, *rest = command
        _refused([first, "--runtime", name, *rest], text.format(f"--runtime {name}"))
        monkeypatch.setenv("POLYXLA_RUNTIME", name)
        _refused(command, text.format(f"POLYXLA_RUNTIME={name}"))

    @pytest.mark.parametrize("break_it", [False, True], ids=["not-installed", "broken"])
    def test_xrt_asked_for_is_never_replaced(
        self, break_it: bool, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XRT_TPU_CONFIG", "tpu_worker;0;10.0.0.2:8470")
        monkeypatch.setenv("TOY_CLAIM", "FALLBACK")
        text = XRT_MISSING.format("XRT_TPU_CONFIG=tpu_worker;0;10.0.0.2:8470")
        if break_it:
            install_plugin("broken-xrt", "raise ImportError('no grpc')", name="xrt")
            text = (
                "runtime 'xrt' cannot be imported: ImportError: no grpc (from broken_xrt of broken-xrt). "
                "Repair or remove it: pip install --force-reinstall broken-xrt"
            )
        _refused(["devices"], text)
        _refused(["run", "script.py"], text)

    def test_two_runtimes_with_one_name(self, install_plugin: PluginInstaller) -> None:
        install_plugin("toy-copy", _toy_runtime("TOY"), name="toy")
        text = (
            "runtime 'toy' is provided by more than one distribution: toy, toy-copy "
            "(from entry-point group polyxla.runtimes). Uninstall all but one of them."
        )
        _refused(["devices", "--runtime", "toy"], text)
        assert _document("runtimes", "--json", exit_code=2)["runtimes"][0]["why_not"] == text

    @pytest.mark.parametrize(
        "install", [PluginInstaller.__call__, PluginInstaller.listener], ids=["runtime", "plugin"]
    )
    def test_a_misspelt_hook_is_an_error_with_the_nearest_name(
        self, install: Callable[..., None], install_plugin: PluginInstaller
    ) -> None:
        install(
            install_plugin, "odd", "from polyxla import hookimpl\n@hookimpl\ndef polyxla_lunch(job): pass"
        )
        result = _invoke(
            "run", *(["--runtime", "odd"] if install is PluginInstaller.__call__ else []), "script.py"
        )
        assert result.exit_code == 2
        assert "'odd' does not match polyxla's hooks: unknown hook 'polyxla_lunch' in plugin" in result.stderr
        assert result.stderr.endswith("(from odd). Did you mean 'polyxla_launch'?\n")

    def test_equal_claims_are_an_error(
        self, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_plugin("toy-b", _toy_runtime("TOY_B"))
        monkeypatch.setenv("TOY_B", "1")
        _refused(
            ["devices"],
            "runtimes 'toy' (TOY=8) and 'toy-b' (TOY_B=1) claim this environment equally. "
            "Name one with --runtime or POLYXLA_RUNTIME.",
        )

    @pytest.mark.parametrize(
        ("devices", "text"),
        [
            pytest.param(
                "9",
                f"devices=9 asks for 9 devices, but runtime toy has 8 here (from {{1}}). {COUNTS}",
                id="9",
            ),
            pytest.param("0", f"devices=0 asks for no device (from {{1}}). {COUNTS}", id="0"),
            pytest.param("-1", f"devices=-1 asks for no device (from {{1}}). {COUNTS}", id="negative"),
            pytest.param(
                "[8]",
                f"devices=[8] names device 8, but runtime toy has devices 0 to 7 (from {{1}}). {NAMES}",
                id="[8]",
            ),
            pytest.param("[0,0]", f"devices=[0, 0] names a device twice (from {{1}}). {NAMES}", id="twice"),
            pytest.param("[]", f"devices=[] names no device (from {{1}}). {NAMES}", id="empty"),
            *(
                pytest.param(
                    asked,
                    f"devices={asked!r} is neither a count, a list of indices nor 'auto' (from {{1}}). "
                    f"{FORMS}",
                    id=asked,
                )
                for asked in ("x", "true", "1.5")
            ),
        ],
    )
    def test_devices_that_do_not_exist_are_an_error(
        self, devices: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = ["run", "--devices", devices, "script.py"]
        _refused(asked, text.format("--devices ", f"--devices {devices}"))
        monkeypatch.setenv("POLYXLA_DEVICES", devices)
        _refused(["run", "script.py"], text.format("POLYXLA_DEVICES=", f"POLYXLA_DEVICES={devices}"))

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            pytest.param(
                ["nosuch.py"],
                "there is no file 'nosuch.py' in {cwd} (from polyxla run). "
                "Write the path of a script, or -m and the name of a module.",
                id="script",
            ),
            pytest.param(
                ["empty"],
                "the directory 'empty' has no __main__.py (from polyxla run). "
                "Write the path of a script in it.",
                id="folder",
            ),
            pytest.param(
                ["-m", "nosuch.module"],
                "there is no module 'nosuch.module' (from polyxla run -m). "
                "Install it into this environment, or run its file: polyxla run path/to/script.py.",
                id="module",
            ),
            pytest.param(
                ["-m"],
                "-m names no module (from polyxla run). Write -m and the name of a module.",
                id="no-module",
            ),
        ],
    )
    def test_a_missing_program_is_an_error(self, args: list[str], text: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        _refused(["run", *args], text.format(cwd=tmp_path))

    def test_an_unknown_precision_is_an_error(self) -> None:
        result = _invoke("run", "--precision", "half", "script.py")
        assert result.exit_code == 2
        assert result.stderr.startswith(
            "polyxla: error: no installed plugin knows the precision 'half' (from --precision half). "
        )

    @pytest.mark.parametrize("wait", ["soon", "-1", "nan", "inf", "10 s", "1e999"])
    def test_an_invalid_wait_is_an_error(self, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (
            f"{wait!r} is not a number of seconds, 0 or more (from {{}}). "
            "Write the longest wait for devices that another job is using, such as 600, or leave it out."
        )
        _refused(["run", "--wait", wait, "script.py"], text.format(f"--wait {wait}"))
        monkeypatch.setenv("POLYXLA_WAIT_S", wait)
        _refused(["run", "script.py"], text.format(f"POLYXLA_WAIT_S={wait}"))

    def test_an_error_of_a_dry_run_is_a_json_document(self) -> None:
        asked = ["run", "--dry-run", "--json", "--runtime", "xrt", "script.py"]
        assert _document(*asked, exit_code=2) == _error("--runtime xrt")

    @pytest.mark.parametrize(
        ("options", "said", "fix"),
        [
            (
                ["--nproc-per-node", "4"],
                "--nproc-per-node is an option of torchrun",
                "Write --devices 4. Add",
            ),
            (["--num_processes=2"], "--num_processes is an option of Accelerate", "Write --devices 2. Add"),
            (["--wait", "2", "--mixed_precision", "bf16"], "of Accelerate", "Write --precision bf16-mixed."),
            (["--nnodes", "2"], "--nnodes is an option of torchrun", "For several hosts, write polyxla pod."),
        ],
    )
    def test_an_option_of_another_launcher_is_answered_with_ours(
        self, options: list[str], said: str, fix: str
    ) -> None:
        result = _invoke("run", *options, "script.py")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{said} (from polyxla run). {fix}" in result.stderr

    def test_a_programs_options_are_its_own(self) -> None:
        plan = _document("run", "--dry-run", "--json", "script.py", "--nproc-per-node", "4")
        assert plan["command"][-2:] == ["--nproc-per-node", "4"]

    def test_emulate_sets_the_variable(self) -> None:
        plan = _document("run", "--dry-run", "--json", "--emulate", "v5e-8", "script.py")
        assert plan["environment"]["POLYXLA_EMULATE"] == "v5e-8"
        assert plan["command"][-1] == "script.py"

    def test_the_help_has_examples(self) -> None:
        assert " polyxla run --devices 4 --each train.py " in _invoke("run", "--help").stdout

    def test_run_without_a_program_is_an_error(self) -> None:
        result = _invoke("run")
        assert result.exit_code == 2
        assert "Missing argument '(SCRIPT | -m MODULE) [ARGS]...'" in result.stderr


class TestTheRealCommand:
    """Tests that need a process: no traceback, and the commands of plugins."""

    def test_an_error_is_one_line_and_exit_code_2(self) -> None:
        done = _polyxla("run", "--runtime", "xrt", "script.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"polyxla: error: {XRT_MISSING.format('--runtime xrt')}\n"

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (["--bad"], "No such option: --bad (from polyxla)"),
            (["devices", "--bad"], "No such option: --bad (from polyxla devices)"),
            (["env", "more"], "Got unexpected extra argument(s) (more) (from polyxla env)"),
            (["run", "--dry-run"], "Missing argument '(SCRIPT | -m MODULE) [ARGS]...' (from polyxla run)"),
        ],
    )
    def test_a_wrong_command_line_is_an_error_like_any_other(self, arguments: list[str], what: str) -> None:
        done = _polyxla(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        path = what.rpartition("(from ")[2].removesuffix(")")
        assert done.stderr.replace("python -m ", "") == (
            f"polyxla: error: {what}. `{path} --help` shows how it is used.\n"
        )
        with_json = _polyxla(*arguments, "--json")
        assert with_json.returncode == 2
        assert f"polyxla: error: {json.loads(with_json.stdout)['error']}\n" == with_json.stderr

    def test_the_output_of_a_program_is_no_place_for_a_document(self) -> None:
        assert _polyxla("run", "--bad", "script.py", "--json").stdout == ""

    def test_a_full_disk_is_named(self) -> None:
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "polyxla", "env"]
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
            )
        assert done.returncode == 1
        assert done.stderr == "polyxla: error: the output cannot be written (No space left on device)\n"

    def test_a_usage_error_of_launch_names_the_scripts_line(self, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("from polyxla import launch\n\n\nlaunch(print, devices=9)\n")
        done = _polyxla("run", "script.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "polyxla: error: devices=9 asks for 9 devices, but runtime toy has 8 here (from devices=9). "
            "Write a count from 1 to 8, or devices='auto' for all of them.\n"
            f"  at {tmp_path / 'script.py'}:4\n"
        )

    def test_plugins_add_commands_even_if_another_plugin_is_broken(
        self, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("broken", "raise RuntimeError('at import')")
        install_plugin.listener("hello", (PROGRAMS / "hello_plugin.py").read_text())
        done = _polyxla("hello")
        assert (done.returncode, done.stdout, done.stderr) == (0, "hello from a plugin\n", "")

    # Plugins are asked in an order that depends on their names.
    @pytest.mark.parametrize("name", ["a-broken", "z-broken"])
    def test_a_plugin_whose_commands_cannot_be_loaded_hides_no_others(
        self, install_plugin: PluginInstaller, name: str
    ) -> None:
        install_plugin.listener("hello", (PROGRAMS / "hello_plugin.py").read_text())
        install_plugin.listener(
            name,
            "import polyxla\n@polyxla.hookimpl\ndef polyxla_add_commands(app): import no_such_module\n",
        )
        done = _polyxla("hello")
        assert (done.returncode, done.stdout) == (0, "hello from a plugin\n")
        assert done.stderr == (
            f"polyxla: the commands of plugin '{name}' are left out: "
            "ModuleNotFoundError: No module named 'no_such_module'\n"
        )

    def test_the_version_is_printed(self) -> None:
        done = _polyxla("--version")
        assert (done.returncode, done.stdout) == (0, f"polyxla {polyxla.__version__}\n")

    def test_a_misspelt_command_is_answered_with_the_nearest(self) -> None:
        done = _polyxla("runtime")
        assert done.returncode == 2
        assert "No such command 'runtime'. Did you mean 'runtimes'" in done.stderr

    def test_bash_completes_the_commands_of_plugins(self, install_plugin: PluginInstaller) -> None:
        install_plugin.listener("hello", (PROGRAMS / "hello_plugin.py").read_text())
        script = (
            'eval "$(polyxla --show-completion)"\n'
            "COMP_WORDS=(polyxla h) COMP_CWORD=1\n"
            '_polyxla_completion polyxla\necho "${COMPREPLY[@]}"'
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        assert done.stdout == "hello\n"

    def test_broken_hook_specs_are_reported_and_the_commands_work(
        self, install_plugin: PluginInstaller
    ) -> None:
        install_plugin("moon-specs", "raise ImportError('no cheese')", group=HOOKSPECS, name="moon")
        text = (
            "the module of hook specs 'moon' cannot be imported: ImportError: no cheese "
            "(from moon_specs of moon-specs). Repair or remove it: pip install --force-reinstall moon-specs"
        )
        done = _polyxla("--help")
        assert done.returncode == 0
        assert "\n  runtimes " in done.stdout
        assert done.stderr == f"polyxla: the commands of plugins are left out: {text}\n"
        done = _polyxla("runtimes", "--json")
        document = json.loads(done.stdout)
        assert done.returncode == 2
        assert document["warnings"] == [text]
        assert [row["why_not"] for row in document["runtimes"]] == [text]

    def test_help_lists_the_commands(self) -> None:
        done = _polyxla("--help")
        assert done.returncode == 0
        for command in ("runtimes", "devices", "env", "run"):
            assert f"\n  {command} " in done.stdout

    def test_an_arrow_that_the_terminal_cannot_show_is_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
        done = _polyxla("runtimes")
        assert done.returncode == 0, done.stderr
        assert _lines(done.stdout)[1][:3] == [r"\u2192", "toy", "yes"]

    @pytest.mark.parametrize("program", [["script.py"], ["-m", "script"]])
    def test_a_deleted_working_directory_is_named(self, program: list[str], tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        line = 'rmdir "$PWD"; exec "$@"'
        command = ["sh", "-c", line, "", sys.executable, "-m", "polyxla", "run", *program]
        done = subprocess.run(
            command, cwd=gone, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 2
        text = "the working directory has been deleted. Change to a directory that exists, and start again."
        assert done.stderr == f"polyxla: error: {text}\n"

    @pytest.mark.parametrize("command", ["env", "runtimes"])
    def test_a_diagnosis_shows_an_error_of_any_kind(
        self, command: str, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fails = (
            "def polyxla_environment(devices):\n    raise __import__('polyxla').ReplicaLostError('gone')\n"
        )
        code = _toy_runtime("FAILING").replace("def polyxla_environment(", f"{fails}def unused(")
        install_plugin("failing", code)
        monkeypatch.setenv("FAILING", "2")
        monkeypatch.setenv("POLYXLA_RUNTIME", "failing")
        done = _polyxla(command)
        assert "Traceback" not in done.stderr
        assert done.returncode == 0, done.stderr
        assert ("error: gone" in done.stdout) == (command == "env")


class TestUnknownCommands:
    """Names of other tools' commands, and of commands whose package is not installed."""

    @pytest.mark.parametrize(("name", "meant"), [("launch", "run"), ("test", "doctor"), ("config", "env")])
    def test_a_command_of_another_tool_names_the_command_that_is_meant(self, name: str, meant: str) -> None:
        done = _invoke(name, "x.py", "--steps", "3")
        assert done.exit_code == 2
        assert done.stderr == f"polyxla: error: there is no command {name}. Did you mean polyxla {meant}?\n"

    @pytest.mark.parametrize(
        ("name", "package"),
        [("doctor", "tools"), ("pod", "pod"), ("worker", "runtime-xrt"), ("check-replicas", "training")],
    )
    def test_a_command_of_a_package_that_is_not_installed_names_it(self, name: str, package: str) -> None:
        done = _invoke(name, "train.py", "--on", "v5e-8")
        assert done.exit_code == 2
        assert f"there is no command {name}. Install the package that brings it: pip" in done.stderr
        assert f"./packages/{package}" in done.stderr

    def test_they_are_not_listed(self) -> None:
        listed = _invoke("--help").stdout
        assert re.search(r"^  run ", listed, re.MULTILINE)
        assert not re.search(r"^  (launch|test|config|doctor) ", listed, re.MULTILINE)

    def test_any_other_name_is_an_error(self) -> None:
        assert "error: No such command 'nothing' (from " in _invoke("nothing").stderr
