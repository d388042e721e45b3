"""The generated code matches the versions that the package requires; `nox -s proto` generates it again."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import polyxla_xrt

SOURCE = Path(polyxla_xrt.__file__).parent
PACKAGE = Path(__file__).parent.parent


def made_with() -> str:
    match = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (SOURCE / "proto/mesh_pb2_grpc.py").read_text())
    assert match
    return match[1]


def test_generated_code_comes_from_the_oldest_allowed_grpc_and_protobuf() -> None:
    needs = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"grpcio>={made_with()},<2" in needs
    match = re.search(r"Protobuf Python Version: (\d+\.\d+)", (SOURCE / "proto/mesh_pb2.py").read_text())
    assert match
    assert f"protobuf>={match[1]},<8" in needs
