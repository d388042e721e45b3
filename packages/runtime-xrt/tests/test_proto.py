"""The generated code matches the .proto files, and the versions that the package requires."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import polyxla_xrt

SOURCE = Path(polyxla_xrt.__file__).parent
PACKAGE = Path(__file__).parent.parent
PROTO = "polyxla_xrt/proto/mesh.proto"


def made_with() -> str:
    match = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (SOURCE / "proto/mesh_pb2_grpc.py").read_text())
    assert match
    return match[1]


def installed_tools() -> str | None:
    try:
        return importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        return None


def test_generated_code_comes_from_the_oldest_allowed_grpc_and_protobuf() -> None:
    needs = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"grpcio>={made_with()},<2" in needs
    match = re.search(r"Protobuf Python Version: (\d+\.\d+)", (SOURCE / "proto/mesh_pb2.py").read_text())
    assert match
    assert f"protobuf>={match[1]},<8" in needs


@pytest.mark.skipif(installed_tools() != made_with(), reason=f"needs grpcio-tools=={made_with()}")
def test_generating_the_code_again_gives_the_same_code(tmp_path: Path) -> None:
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE.parent}", *outs, PROTO]
    subprocess.run(command, check=True, timeout=60)
    made = sorted(tmp_path.rglob("*.py*"))
    assert len(made) == 3
    for path in made:
        assert path.read_text() == (SOURCE / "proto" / path.name).read_text()
