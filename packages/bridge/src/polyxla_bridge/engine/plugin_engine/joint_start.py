"""Starting a program on all devices of this process in one call."""

from __future__ import annotations

from collections.abc import Sequence

from polyxla_bridge.engine.plugin_engine.compiler import JointProgram, PluginCompiler, PluginProgram
from polyxla_bridge.engine.plugin_engine.meeting import Part, Started
from polyxla_bridge.plugin_client import buffers
from polyxla_bridge.plugin_client.buffers import DeviceArray
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_bridge.programs.executable import ArrayType


class JointStart:
    """Starts programs on all local devices.

    Args:
        client: of the devices.
        compiler: joins programs that differ.
    """

    def __init__(self, client: PluginClient, compiler: PluginCompiler) -> None:
        self._client = client
        self._compiler = compiler
        self._indices = {device.handle: index for index, device in enumerate(client.devices)}
        self._zeros: dict[tuple[int, ArrayType], DeviceArray] = {}

    def __call__(self, parts: dict[int, Part]) -> dict[int, Started]:
        """Start the devices' programs, as one if they differ; return each device's share."""
        joint = self._compiler.join([parts[index].executable for index in sorted(parts)])
        program: PluginProgram = joint.executable.native["program"]
        # In the order of the program.
        order = [self._indices[handle] for handle in program.loaded.devices]
        rows = [self._arguments(joint, index, parts[index].arguments) for index in order]
        kept: frozenset[int] = frozenset().union(*(part.keep for part in parts.values()))
        # A joint program takes no memory of its arguments, which have other numbers.
        keep = frozenset() if joint.arguments else kept
        results, ends = program.loaded.launch(rows, program.sizes, keep, None)
        return {index: Started(row, end) for index, row, end in zip(order, results, ends, strict=True)}

    def _arguments(
        self, joint: JointProgram, index: int, arguments: Sequence[DeviceArray]
    ) -> Sequence[DeviceArray]:
        if not joint.arguments:
            return arguments
        return [
            self._zero(index, type_) if mine is None else arguments[mine]
            for mine, type_ in zip(joint.arguments[index], joint.executable.parameters, strict=True)
        ]

    def _zero(self, index: int, type_: ArrayType) -> DeviceArray:
        """Return an array for an argument that does not matter."""
        if (index, type_) not in self._zeros:
            data = memoryview(bytearray(type_.size_bytes))
            device = self._client.devices[index]
            self._zeros[index, type_] = buffers.put(self._client, device, type_.dtype, type_.dims, data)
        return self._zeros[index, type_]

    def close(self) -> None:
        """Release the arrays."""
        self._zeros.clear()
