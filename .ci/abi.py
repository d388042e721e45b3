"""Compare the bridge's struct layouts with the C header that a tensorflow-cpu wheel carries.

    python .ci/abi.py WHEEL

Compiles a program that prints every size and offset, and compares each with that of the ctypes structures in
`polyxla_bridge.abi`. Prints the differences; exit code 1 when there are any.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from polyxla_bridge import abi

INCLUDE = "tensorflow/include/"
HEADERS = [
    "xla/pjrt/c/pjrt_c_api.h",
    "xla/pjrt/c/pjrt_c_api_profiler_extension.h",
    "xla/backends/profiler/plugin/profiler_c_api.h",
]
STRUCTS: dict[str, type[ctypes.Structure]] = {
    **{f"PJRT_{name}_Args": struct for name, struct in abi.ARGS.items()},
    "PJRT_Api": abi.Api,
    "PJRT_Api_Version": abi.ApiVersion,
    "PJRT_Buffer_MemoryLayout_Tiled": abi.Tiled,
    "PJRT_ExecuteOptions": abi.ExecuteOptions,
    "PJRT_NamedValue": abi.NamedValue,
    "PJRT_Program": abi.Program,
    **abi.PROFILER,
}
UNNAMED = {"value"}
"""Fields that are an unnamed union in C."""


def ours() -> Iterator[tuple[str, str, int]]:
    """Yield a label, the C expression for it, and our number."""
    profiler = "PJRT_Extension_Type_Profiler"
    yield profiler, f"(size_t){profiler}", abi.EXTENSION_TYPE_PROFILER
    for name, struct in STRUCTS.items():
        yield name, f"sizeof({name})", ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            if field not in UNNAMED:
                c_field = f"PJRT_{field}" if name == "PJRT_Api" and field in abi.FUNCTIONS else field
                yield f"{name}.{field}", f"offsetof({name}, {c_field})", getattr(struct, field).offset


def theirs(directory: Path) -> list[int]:
    """Return the compiler's numbers, in the order of `ours`."""
    lines = "\n".join(f'  printf("%zu\\n", {expression});' for _, expression, _ in ours())
    includes = "\n".join(f'#include "{header}"' for header in HEADERS)
    source = f"#include <stdio.h>\n{includes}\nint main(void) {{\n{lines}\n  return 0;\n}}\n"
    program = directory / "layouts"
    program.with_suffix(".c").write_text(source)
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, f"-I{directory}", "-o", program, program.with_suffix(".c")], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [int(number) for number in printed.split()]


def main() -> int:
    """Compare, print, and return the exit code."""
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(sys.argv[1]) as wheel:
        for header in HEADERS:
            path = Path(directory) / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(INCLUDE + header))
        compared = list(zip(ours(), theirs(Path(directory)), strict=True))
    wrong = [f"{label}: {here} here, {there} in C" for (label, _, here), there in compared if here != there]
    print("\n".join([*wrong, f"{len(compared)} sizes and offsets compared, {len(wrong)} differ"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
