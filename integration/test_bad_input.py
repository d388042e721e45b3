"""Mistakes on the command line: each prints an error with exit code 2 and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla.plugin import env as polyxla_env
from polyxla.plugin import tpu_env
from polyxla_bridge import env as bridge_env
from polyxla_pjrt import env as pjrt_env
from polyxla_training import env as training_env
from polyxla_xrt import env as xrt_env

TIMEOUT_S = 120
HELLO = "import polyxla\nprint(polyxla.launch(lambda replica: replica.ordinal))\n"


ENVS = (polyxla_env, bridge_env, pjrt_env, tpu_env, training_env, xrt_env)


def polyxla(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return start([sys.executable, "-m", "polyxla", *arguments], **environ)


def start(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PJRT_", "XRT_", "POLYXLA_", "CPU_NUM_"))
    }
    return subprocess.run(
        command,
        env={**clean, "POLYXLA_COMPILE_CACHE": "off", **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "hello.py"
    path.write_text(HELLO)
    return str(path)


EMULATED = {"POLYXLA_EMULATE": "v3-8"}
EIGHT = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}


@pytest.mark.parametrize(
    ("options", "environ", "text"),
    [
        (["--runtime", "pjrtt"], {}, "no runtime is called 'pjrtt'"),
        (["--runtime", "pjrtt"], {}, "Did you mean 'pjrt'?"),
        ([], {"POLYXLA_RUNTIME": "ddp"}, "(from POLYXLA_RUNTIME=ddp)"),
        ([], {"PJRT_DEVICE": "FOO"}, "Write PJRT_DEVICE=CPU or PJRT_DEVICE=TPU."),
        ([], {"CPU_NUM_DEVICES": "0"}, "CPU_NUM_DEVICES=0 is not a positive integer"),
        ([], {"CPU_NUM_DEVICES": "abc"}, "CPU_NUM_DEVICES=abc is not a positive integer"),
        ([], {"PJRT_DEVICE": "TPU"}, "no TPU chip is attached to this machine"),
        ([], {"XRT_TPU_CONFIG": "tpu_worker;0;:8470"}, "':8470' has no host"),
        (["--devices", "9"], EIGHT, "devices=9 asks for 9 devices, but runtime pjrt has 8 here"),
        (["--devices", "[8]"], EIGHT, "runtime pjrt has devices 0 to 7"),
        (["--devices", "0"], EIGHT, "devices=0 asks for no device"),
        (["--devices", "x"], EIGHT, "neither a count, a list of indices nor 'auto'"),
        (["--devices", "[]"], EIGHT, "devices=[] names no device"),
        ([], {"POLYXLA_DEVICES": "9", **EIGHT}, "(from POLYXLA_DEVICES=9)"),
        (["--devices", "99"], EMULATED, "devices=99 asks for 99 devices, but runtime pjrt has 8"),
        (["--devices", "four"], EMULATED, "Write --devices auto, a count such as --devices 8"),
        (["--devices", "3"], EMULATED, "Take both cores of each chip, such as devices=[0, 1]"),
        (["--precision", "bf15"], {}, "no installed plugin knows the precision 'bf15'"),
        ([], {"XRT_TPU_CONFG": "w;0;a:1"}, "Did you mean XRT_TPU_CONFIG? Unset XRT_TPU_CONFG"),
    ],
)
def test_a_wrong_option_or_variable_is_an_error(
    script: str, options: list[str], environ: dict[str, str], text: str
) -> None:
    done = polyxla("run", *options, script, **environ)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_program_names_what_chose_its_runtime(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import polyxla\npolyxla.launch(print, accelerator='gpu')\n")
    for options, origin in [((), "polyxla run, which chose it"), (("--runtime", "pjrt"), "--runtime pjrt")]:
        done = polyxla("run", *options, str(tmp_path / "x.py"))
        assert f"(from {origin}). Write accelerator='tpu'" in done.stderr


def test_a_misspelt_variable_prints_a_warning_once(script: str) -> None:
    done = polyxla("run", script, POLYXLA_DEVICE="4", PJRT_DEVICE="CPU")
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr
    warning = "POLYXLA_DEVICE is not a variable of polyxla and has no effect. Did you mean POLYXLA_DEVICES?"
    assert done.stderr.count(warning) == 1


def test_variables_of_every_package_and_of_others_are_not_called_wrong(script: str) -> None:
    variables = {name: "" for module in ENVS for name in vars(module) if name.startswith("POLYXLA_")}
    done = polyxla(
        "run", "--dry-run", script, PJRT_DEVICE="CPU", XLA_FLAGS="", PJRT_SELECT_DEFAULT="", **variables
    )
    assert done.returncode == 0
    assert "has no effect" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "text", "code"),
    [
        pytest.param(
            {"POLYXLA_DEVICE": "4", "POLYXLA_RUNTIME": "pjrt"},
            "Did you mean POLYXLA_DEVICES?",
            0,
            marks=pytest.mark.long,
        ),
        pytest.param({"POLYXLA_RUNTIM": "xrt"}, "Did you mean POLYXLA_RUNTIME?", 0, marks=pytest.mark.long),
        pytest.param(
            {"XRT_TPU_CONFG": "w;0;a:1"}, "XRT_TPU_CONFG is not an XRT variable", 2, marks=pytest.mark.long
        ),
    ],
)
def test_a_plain_program_gets_them_too(environ: dict[str, str], text: str, code: int) -> None:
    done = start([sys.executable, "-c", "import torch_xla"], **environ)
    assert done.returncode == code
    assert done.stderr.count(text) == 1


def test_a_worker_that_does_not_listen_is_an_error(script: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = polyxla("run", script, XRT_TPU_CONFIG=f"tpu_worker;0;{address}")
    assert done.returncode == 1
    assert f"there is no worker at {address}: Connection refused" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_script_that_does_not_exist_is_an_error() -> None:
    done = polyxla("run", "trian.py")
    assert done.returncode == 2
    assert "there is no file 'trian.py'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_two_variables_that_disagree_print_a_warning(script: str) -> None:
    done = polyxla("run", script, PJRT_DEVICE="CPU", XRT_TPU_CONFIG="tpu_worker;0;10.0.0.2:8470")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0]\n"
    assert "asks for runtime 'xrt' and PJRT_DEVICE=CPU for 'pjrt': 'pjrt' wins" in done.stderr


def test_a_function_that_cannot_be_pickled_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "locked.py"
    path.write_text(
        "import threading, polyxla\n"
        "lock = threading.Lock()\n"
        "polyxla.launch(lambda replica: lock.locked(), start_method='spawn')\n"
    )
    done = polyxla("run", str(path), PJRT_DEVICE="CPU")
    assert done.returncode == 2
    assert "train_fn (<lambda>) cannot be sent to another process" in done.stderr
    assert f"at {path}:3" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_list_of_runtimes_works_if_none_can_be_chosen() -> None:
    done = polyxla("runtimes", "--json", PJRT_DEVICE="FOO")
    assert done.returncode == 2
    assert '"chosen": null' in done.stdout
    assert "PJRT_DEVICE=FOO" in done.stdout
