"""Compare the variables that polyxla gives to the processes of a TPU with what the real libtpu reads.

    python .ci/variables.py

libtpu needs no TPU for this: when it is initialized, it logs what it has read. Each comparison is a process,
which also has variables that contradict ours: those of its host, as GKE sets them. Prints the differences;
exit code 1 when there are any.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyxla.plugin import AcceleratorType, join, process_environments
from polyxla.tpu.parts import read_part
from polyxla_bridge import abi

API = "0.75"
"""The version of the PJRT API that torch_xla 2.9.0 speaks."""
TYPES = {
    "v2": (8,),
    "v3": (8, 32, 2048),
    "v4": (8, 32, 256),
    "v5litepod": (1, 4, 8, 16),
    "v5p": (8, 128),
    "v6e": (4, 8, 256),
    "tpu7x": (2, 8, 128),
}
FLAGS = {
    "TPU_PROCESS_BOUNDS": "host_bounds",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "chips_per_host_bounds",
    "TPU_VISIBLE_CHIPS": "hal_included_devs",
    "TPU_PROCESS_ADDRESSES": "slice_builder_worker_addresses",
    "TPU_PROCESS_PORT": "slice_builder_worker_port",
}
"""Names of our variables' values in the log of libtpu 0.0.21."""
PARTS = [
    {"TPU_VISIBLE_CHIPS": "2", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"},
    {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"},
    {"TPU_VISIBLE_DEVICES": "2,3", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"},
    {
        "TPU_VISIBLE_CHIPS": "1,3",
        "TPU_VISIBLE_DEVICES": "0",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,2",
    },
]
"""Variables that select chips of a v4-8."""


def initialize(library: str) -> None:
    """Load libtpu, print the version of its API, and make it read the variables."""
    get_api = ctypes.CDLL(library).GetPjrtApi
    get_api.restype = ctypes.c_void_p
    api = abi.Api.from_address(get_api())
    print(f"{api.pjrt_api_version.major_version}.{api.pjrt_api_version.minor_version}")
    arguments = abi.ARGS["Plugin_Initialize"]()
    arguments.struct_size = ctypes.sizeof(arguments)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(api.Plugin_Initialize)
    sys.exit(function(ctypes.byref(arguments)) is not None)


def read_by_libtpu(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what libtpu reads in a process with these variables, by our names; and its version, as API."""
    with tempfile.TemporaryDirectory() as directory:
        environ = {"TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": directory, **variables}
        command = [sys.executable, __file__, library_path()]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
        log = (Path(directory) / "tpu_driver.INFO").read_text()
    flags = dict(re.findall(r"argv\[\d+\]: '--[0-9a-f]{7}_(\w+)=(.*)'", log))
    found = {name: flags[flag] for name, flag in FLAGS.items() if flag in flags}
    return {**found, "API": done.stdout.strip()}


def library_path() -> str:
    """Return the path of the installed libtpu."""
    found = importlib.util.find_spec("libtpu")
    if found is None or found.origin is None:
        sys.exit("libtpu is not installed")
    return str(Path(found.origin).with_name("libtpu.so"))


def processes() -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """Yield a label, a process's variables and what libtpu should read: the last process of some hosts."""
    for name in [f"{prefix}-{size}" for prefix, sizes in TYPES.items() for size in sizes]:
        kind = AcceleratorType.parse(name, "TYPES")
        names = [f"h{i}" for i in range(kind.hosts)]
        for worker_id in sorted({0, kind.hosts - 1}):
            ours = process_environments(kind, worker_id=worker_id, hostnames=names)[-1]
            host = {
                "TPU_ACCELERATOR_TYPE": kind.name,
                "TPU_HOST_BOUNDS": join(kind.bounds.hosts),
                "TPU_CHIPS_PER_HOST_BOUNDS": join(kind.bounds.chips_per_host),
                "TPU_VISIBLE_DEVICES": join(range(kind.chips_per_host)),
                "TPU_WORKER_ID": str(worker_id),
                "TPU_WORKER_HOSTNAMES": ",".join(names),
            }
            yield f"{name} worker {worker_id}", {**host, **ours}, {name: ours[name] for name in FLAGS}


def parts() -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """Yield a label, a user's variables, and what libtpu should read, as polyxla reads them."""
    whole = AcceleratorType.parse("v4-8", "PARTS").bounds
    for variables in PARTS:
        part = read_part(variables, "v4", whole, whole.chips_per_host)
        expected = {
            "TPU_PROCESS_BOUNDS": join(part.bounds.hosts),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": join(part.bounds.chips_per_host),
            "TPU_VISIBLE_CHIPS": join(part.chips or ()),
        }
        described = {
            "TPU_ACCELERATOR_TYPE": "v4-8",
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        yield str(variables), {**described, **variables}, expected


def main() -> int:
    """Compare, print, and return the exit code."""
    compared = [*processes(), *parts()]
    wrong = []
    for label, variables, expected in compared:
        read = read_by_libtpu(variables)
        differences = {name: (value, read.get(name)) for name, value in {**expected, "API": API}.items()}
        wrong += [
            f"{label}: {name} is {value} here, {there} in libtpu"
            for name, (value, there) in differences.items()
            if value != there
        ]
    print("\n".join([*wrong, f"{len(compared)} processes compared, {len(wrong)} values differ"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        initialize(sys.argv[1])
    sys.exit(main())
