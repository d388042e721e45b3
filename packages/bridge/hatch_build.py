"""Compiles the library that torch_xla opens, for wheels and editable installs alike."""

from __future__ import annotations

import ctypes
import os
import runpy
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c11", "-shared", "-fPIC", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror"]
C_TYPES = {
    ctypes.c_void_p: "void *",
    ctypes.c_size_t: "size_t ",
    ctypes.c_int: "int ",
    ctypes.c_int64: "int64_t ",
    ctypes.c_bool: "bool ",
}


class LibraryBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs the C compiler once; the wheel is for this platform and any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile next to the source; the build picks it up as an artifact."""
        folder = Path(self.root) / "src" / "polyxla_bridge"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        with tempfile.TemporaryDirectory() as generated:
            (Path(generated) / "abi.h").write_text(header(folder / "abi.py"))
            sources = map(str, sorted(folder.glob("*.c")))
            command = [*compiler, *FLAGS, f"-I{generated}", "-o", str(folder / "library.so"), *sources]
            try:
                subprocess.run(command, check=True)
            except FileNotFoundError:
                message = (
                    f"polyxla-bridge needs a C compiler, not found: {compiler[0]!r}. Install gcc or set CC"
                )
                raise SystemExit(message) from None
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def header(path: Path) -> str:
    """Return the declarations of abi.py, which is their only source, for C."""
    abi = runpy.run_path(str(path))
    structs = {name: abi[name] for name in ("Tiled", "MemoryLayout", "Record")}
    structs |= {f"PJRT_{name}_Args": args for name, args in abi["ARGS"].items()}
    names = {struct: name for name, struct in structs.items()}
    codes = {name: code for name, code in vars(abi["Code"]).items() if name.isupper()}
    widths = ", ".join(f'{{"{name}", {abi["width"](name)}}}' for name in abi["DTYPES"])
    lines = [f"typedef struct {{ {' '.join(members(one, names))} }} {name};" for name, one in structs.items()]
    lines.append(f"enum {{ {', '.join(f'{name} = {code}' for name, code in codes.items())} }};")
    lines.append(f"static const struct {{ const char *name; size_t width; }} DTYPES[] = {{{widths}}};")
    return "\n".join(["#include <stdbool.h>", "#include <stddef.h>", "#include <stdint.h>", *lines, ""])


def members(struct: type[ctypes.Structure | ctypes.Union], names: dict[Any, str]) -> Iterator[str]:
    """Yield a declaration for each field of a ctypes struct or union."""
    for field, type_ in struct._fields_:
        if issubclass(type_, ctypes.Union):
            yield f"union {{ {' '.join(members(type_, names))} }} {field};"
        else:
            yield f"{C_TYPES.get(type_) or names[type_] + ' '}{field};"
