"""Build hook: compiles the C library that torch_xla opens, for wheels and for editable installs."""

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

FLAGS = ["-fPIC", "-O3", "-pthread", "-Wall", "-Wextra", "-Werror"]
LANGUAGES = {
    "*.c": ("CC", "cc", ["-std=c11"]),
    # Without sized operator delete, of GCC 5, the wheel fits manylinux_2_17.
    "*.cc": ("CXX", "c++", ["-std=c++17", "-fno-sized-deallocation"]),
}
"""By file pattern: the variable that chooses the compiler, the default compiler, the language's flags."""
C_TYPES = {
    ctypes.c_void_p: "void *",
    ctypes.c_size_t: "size_t ",
    ctypes.c_int: "int ",
    ctypes.c_int64: "int64_t ",
    ctypes.c_bool: "bool ",
}


class LibraryBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the library; the wheel is for this platform and any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the library next to its source, from where the build takes it as an artifact."""
        package = Path(self.root) / "src" / "polyxla_bridge"
        native = package / "native"
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "abi.h").write_text(header(package / "abi.py"))
            objects = []
            for pattern, (variable, default, flags) in LANGUAGES.items():
                for source in sorted(native.glob(pattern)):
                    objects.append(f"{made}/{source.name}.o")
                    what = [*flags, f"-I{made}", "-c", "-o", objects[-1], str(source)]
                    compiler(variable, default, *what)
            # Replaced atomically: programs that use an editable install may be starting meanwhile.
            new = native / "library.so.new"
            compiler("CXX", "c++", "-shared", "-o", str(new), *objects)
            new.replace(native / "library.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiler(variable: str, default: str, *arguments: str) -> None:
    """Run the compiler that the environment or the default chooses."""
    command = [*shlex.split(os.environ.get(variable, default)), *FLAGS, *arguments]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        message = (
            f"polyxla-bridge needs a C and a C++ compiler, but {command[0]!r} was not found. "
            f"Install gcc and g++, or set {variable} to another compiler"
        )
        raise SystemExit(message) from None


def header(path: Path) -> str:
    """Return a C header with the declarations of abi.py, which is their only source."""
    abi = runpy.run_path(str(path))
    structs = {name: abi[name] for name in ("Tiled", "MemoryLayout", "Record")}
    structs |= {f"PJRT_{name}_Args": args for name, args in abi["ARGS"].items()} | abi["HOST_MEMORY"]
    names = {struct: name for name, struct in structs.items()}
    codes = {name: code for name, code in vars(abi["Code"]).items() if name.isupper()}
    codes["HOST_MEMORY_ALLOCATOR"] = abi["EXTENSION_TYPE_HOST_MEMORY_ALLOCATOR"]
    widths = ", ".join(f'{{"{name}", {abi["width"](name)}}}' for name in abi["DTYPES"])
    lines = [
        f"typedef struct {{ {' '.join(members(struct, names))} }} {name};" for name, struct in structs.items()
    ]
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
