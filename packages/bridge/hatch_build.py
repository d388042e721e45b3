"""Compiles the library that torch_xla opens, for wheels and editable installs alike."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibraryBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs the C compiler once; the wheel is for this platform and any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile next to the source; the build picks it up as an artifact."""
        folder = Path(self.root) / "src" / "polyxla_bridge"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [
            *compiler,
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            str(folder / "library.so"),
            str(folder / "library.c"),
        ]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            message = f"polyxla-bridge needs a C compiler, not found: {compiler[0]!r}. Install gcc or set CC"
            raise SystemExit(message) from None
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
