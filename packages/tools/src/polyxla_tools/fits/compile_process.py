"""``python -m polyxla_tools.fits.compile_process``: compile programs with libtpu, in a process of its own.

Arguments: libtpu's path, the topology and its options in JSON. The first line of the output is the number of
devices. Then a line of input with the paths of a program and its options is answered with a line of JSON: the
seconds, and either the cost or the error. All other output of libtpu goes to standard error.

jaxlib could compile the same with a libtpu of its own age, but crashes on the one that torch_xla 2.9 needs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import plugin
from polyxla_bridge.plugin_client.plugin import HloProgram, NamedValues, Option, Text, read_values
from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto


@dataclass(frozen=True)
class Cost:
    """What a compiled program needs, on each device.

    Attributes:
        argument_bytes: memory of the arguments.
        output_bytes: memory of the results, including results in the memory of donated arguments.
        alias_bytes: memory that a donated argument and a result share, hence in both of the above.
        temporary_bytes: memory in use while the program runs only.
        code_bytes: memory of the program itself.
        flops: floating-point operations; None if the library does not say.
        accessed_bytes: bytes that its operations read and write; None if the library does not say.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    flops: float | None
    accessed_bytes: float | None

    @property
    def total_bytes(self) -> int:
        """Memory while the program runs."""
        needed = self.argument_bytes + self.output_bytes - self.alias_bytes
        return needed + self.temporary_bytes + self.code_bytes


class TopologyCompiler:
    """A PJRT plugin that compiles for a topology. Not safe to use from several threads.

    libtpu may end the process instead of raising, so use it in a process of its own.

    Args:
        library: the plugin's path.
        topology: its name for the topology, such as ``v5e:2x4``.
        options: its options for the topology.

    Raises:
        PjrtError: the plugin does not know the topology.
    """

    def __init__(self, library: Path, topology: str, options: Mapping[str, Option]) -> None:
        self._call = plugin.load(library).call
        # The variables keep the memory alive that the call reads by its address.
        name, values = Text(topology), NamedValues(options)
        self._topology = self._call(
            "TopologyDescription_Create",
            topology_name=name.address,
            topology_name_size=name.size,
            create_options=values.address,
            num_options=values.count,
        ).topology

        found = self._call("TopologyDescription_GetDeviceDescriptions", topology=self._topology)
        described = (ctypes.c_void_p * found.num_descriptions).from_address(found.descriptions)
        # Sorted, because libtpu lists the devices host by host; the numbers count through the coordinates.
        self._ids = sorted(
            int(self._call("DeviceDescription_Id", device_description=device).id) for device in described
        )

    @property
    def device_count(self) -> int:
        """Number of devices of the topology."""
        return len(self._ids)

    def compile(self, hlo: bytes, options: bytes) -> Cost:
        """Compile a program, and return what it needs.

        Args:
            hlo: a serialised HloModuleProto.
            options: a serialised CompileOptionsProto.

        Raises:
            PjrtError: it cannot be compiled, or needs too much memory.
        """
        program, chosen = HloProgram(hlo), Text(self._with_own_ids(options))
        executable = self._call(
            "Compile",
            topology=self._topology,
            program=program.address,
            compile_options=chosen.address,
            compile_options_size=chosen.size,
        ).executable
        try:
            # The executable is needed only for its statistics: it cannot be loaded without a TPU.
            return self._cost(executable)
        finally:
            self._call("Executable_Destroy", executable=executable)

    def _with_own_ids(self, options: bytes) -> bytes:
        """Return compile options for libtpu's numbers of the devices.

        Those of several slices begin with 100000, 200000 and so on, in the order of the emulated devices.
        Source: tried with libtpu 0.0.52, whose error is otherwise "MegaScaleId below minimum value".
        """
        if self._ids == list(range(len(self._ids))):
            return options
        chosen = CompileOptionsProto.FromString(options)
        for devices in chosen.executable_build_options.device_assignment.computation_devices:
            devices.replica_device_ids[:] = [self._ids[number] for number in devices.replica_device_ids]
        return chosen.SerializeToString()

    def _cost(self, executable: int) -> Cost:
        memory = self._call("Executable_GetCompiledMemoryStats", executable=executable)
        found = self._call("Executable_GetCostAnalysis", executable=executable)
        # A library may offer no cost analysis; the memory statistics are required.
        properties = read_values(found.properties, found.num_properties)
        return Cost(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            # XLA leaves out a count that is 0.
            flops=properties.get("flops", 0.0) if properties else None,
            accessed_bytes=properties.get("bytes accessed"),
        )


def main() -> None:
    """Serve until the end of the input."""
    library, topology, options = sys.argv[1:]
    # libtpu also prints on standard output, which would break the lines of JSON.
    # Lines are flushed, because the reader waits for each answer.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            compiler = TopologyCompiler(Path(library), topology, json.loads(options))
        except PjrtError as error:
            answers.write(json.dumps({"error": error.message, "code": error.code}) + "\n")
            return
        answers.write(json.dumps({"devices": compiler.device_count}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(_compile(compiler, *map(Path, json.loads(line)))) + "\n")


def _compile(compiler: TopologyCompiler, hlo: Path, options: Path) -> dict[str, Any]:
    started = time.perf_counter()
    answer: dict[str, Any]
    try:
        answer = {"cost": dataclasses.asdict(compiler.compile(hlo.read_bytes(), options.read_bytes()))}
    except PjrtError as error:
        answer = {"error": error.message, "code": error.code}
    return {**answer, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
