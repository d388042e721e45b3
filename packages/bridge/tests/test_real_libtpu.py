"""The real libtpu as a plugin, without a TPU: ``nox -s libtpu``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from polyxla_bridge.pjrt_plugin import LIBTPU, library_path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(LIBTPU) is None, reason="libtpu is not installed; nox -s libtpu installs it"
)
PROGRAM = """
from pathlib import Path
import sys
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import plugin
loaded = plugin.load(Path(sys.argv[1]))
print(loaded.minor, loaded.attributes["stablehlo_minimum_version"], loaded.has("LoadedExecutable_Execute"))
try:
    PjrtEngine(BridgeSettings(), Path(sys.argv[1]))
except PjrtError as error:
    print(error)
"""


def test_a_machine_without_a_tpu_is_reported_in_a_sentence() -> None:
    library = library_path(LIBTPU)
    # In a process of its own, which libtpu may end.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env={
            **os.environ,
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    version, error = done.stdout.splitlines()
    minor, *minimum = version.replace(",", "").split()
    assert int(minor) in (75, 117), "another libtpu: try it, and add its version here"
    assert minimum == ["[0", "9", "0]", "True"]
    assert error.startswith(
        f"the plugin {library} found no devices that it can use: TPU initialization failed: No "
    )
