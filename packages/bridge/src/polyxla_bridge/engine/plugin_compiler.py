"""Compiling with a PJRT plugin."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import numbering
from polyxla_bridge.engine.memory_accounting import MemoryNeeds
from polyxla_bridge.env import POLYXLA_CPU_KERNELS, BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import programs
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_bridge.plugin_client.programs import LoadedProgram
from polyxla_bridge.programs import arguments, cache, hlo, kernels, merging, numerics, rewrite
from polyxla_bridge.programs.compile_once import CompileOnce
from polyxla_bridge.programs.executable import ArrayType, Executable, pack, unpack
from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto, HloModuleProtoWithConfig

CPU, TPU = "cpu", "tpu"
"""Platform names of XLA's CPU client as a plugin, and of libtpu."""
_LENGTHS = struct.Struct("<QQ")
"""The sizes of a program's options and of its source, at the beginning of its file."""


@dataclass(frozen=True)
class PluginProgram:
    """What `PjrtEngine` attaches to an executable, as ``native["program"]``.

    Attributes:
        loaded: the program on this process's devices.
        options: its options, a serialised CompileOptionsProto with the engine's numbers of the devices.
        source: what was compiled, a serialised HloModuleProto, if all devices must start it together.
        native: the program in the plugin's format, if the plugin cannot serialise it later.
        sizes: size of each result on one device, in bytes.
        meets: whether all devices of this process must start it together.
    """

    loaded: LoadedProgram
    options: bytes
    source: bytes
    native: bytes
    sizes: tuple[int, ...]
    meets: bool


@dataclass(frozen=True)
class JointProgram:
    """A program for all devices of this process.

    Attributes:
        executable: the program.
        arguments: for each device, by index, which argument of the device's own program is each argument of
            this one, or None if the device does not need it; empty if this is the devices' own program.
    """

    executable: Executable
    arguments: Mapping[int, Sequence[int | None]] = field(default_factory=dict)


class PluginCompiler(CompileOnce):
    """Compiles and loads programs for the devices of a plugin's client. Any thread may call it.

    Args:
        settings: of the job.
        client: the client of the plugin.
        on_lookup: called for each program that this process needs, with whether the cache had it.
    """

    def __init__(
        self, settings: BridgeSettings, client: PluginClient, on_lookup: Callable[[bool], None] | None
    ) -> None:
        version = f"{client.platform} ({client.platform_version}) API {abi.MAJOR}.{client.plugin.minor}"
        # One plugin compiles for several models, such as those of TPUs.
        self.name = f"{version} for {', '.join(sorted({device.kind for device in client.devices}))}"
        if settings.has_tpu_numerics:
            self.name += numerics.NAME
        self._settings = settings
        self._flags = cache.flags(settings.xla_flags)
        self._client = client
        self._local = [index for index, device in enumerate(client.devices) if device.is_local]
        self._is_cpu = client.platform == CPU
        self._calls_library = self._calls_torch = False
        options = {"plugin": self.name}
        if self._is_cpu:
            # These modules import jax, which other plugins do not need.
            from polyxla_bridge.engine import custom_calls
            from polyxla_bridge.engine.expansions import torch_library

            self._calls_library = custom_calls.register_all(client.plugin)
            self._calls_torch = self._calls_library and settings.has_torch_kernels
            options[POLYXLA_CPU_KERNELS] = torch_library.NAME if self._calls_torch else ""
        super().__init__(cache.for_job(settings, options, on_lookup), None)
        self._joint: dict[tuple[str, ...], JointProgram] = {}

    def is_serializable(self, executable: Executable) -> bool:
        """Return whether the plugin can serialise programs."""
        functions = ("Executable_Serialize", "Executable_DeserializeAndLoad")
        return all(map(self._client.plugin.has, functions))

    def compile_new(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program, and load it on this process's devices."""
        # This refuses dynamic shapes before the compilation.
        hlo.results(hlo_module)
        # A real TPU runs its kernels, but what computes for an emulated chip cannot.
        if self._settings.places:
            kernels.check(hlo_module)
        asked = CompileOptionsProto.FromString(options)
        build = asked.executable_build_options
        devices = self._devices(hlo.assigned_devices(build.device_assignment.SerializeToString()))
        order = devices or range(len(self._client.devices))
        partitions = max(1, build.num_partitions)
        code = self._rewritten(hlo_module, partitions, len(order))
        if partitions > 1:
            code, may_choose = arguments.keep_result_shardings(code)
            if may_choose:
                build.allow_spmd_sharding_propagation_to_output[:] = may_choose
        chosen = self._options(asked, order, is_portable=self._is_portable(code, partitions, order))
        loaded, chosen = self._compile(code, chosen)
        optimized = _optimized(loaded)
        executable = Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(optimized)),
            num_replicas=len(order) // partitions,
            optimized_hlo=optimized,
            code_size_bytes=loaded.code_size_bytes,
            fingerprint=fingerprint,
            num_partitions=partitions,
            devices=devices,
        )
        # XLA's CPU client can serialise a program that sorts only before it first runs.
        native = loaded.serialize() if self._is_cpu else b""
        return self._attach(executable, loaded, chosen, hlo_module, native)

    def _devices(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the devices of a program that names `numbers`; none for all.

        Raises:
            PjrtError: it is for some of them: all local ones meet in one for several.
        """
        count = len(self._client.devices)
        devices = numbering.in_program(numbers, count, self._local)
        if 1 < len(devices) < count:
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"a program for the devices {list(devices)} is not supported on a plugin, only for one "
                f"device or for all {count}",
            )
        return devices

    def _rewritten(self, hlo_module: bytes, partitions: int, devices: int) -> bytes:
        """Return a framework's program for a TPU as the plugin's compiler takes it."""
        if self._client.platform == TPU:
            return hlo_module
        # These modules import jax, which libtpu does not need.
        from polyxla_bridge.engine.expansions import cpu, tpu

        if self._is_cpu:
            # XLA's partitioner would compute a call of the library as a whole on each device.
            is_whole = partitions == 1
            return cpu.rewritten(
                hlo_module,
                partitions,
                devices // partitions,
                calls_library=is_whole and self._calls_library,
                calls_torch=is_whole and self._calls_torch,
            )
        return tpu.expanded(hlo_module)

    def _is_portable(self, code: bytes, partitions: int, order: Sequence[int]) -> bool:
        """Return whether any single device may run a program, however many the job has.

        XLA's CPU client starts a program for several devices on all of them, and would wait for those that
        do not run it.
        """
        return self._is_cpu and partitions == 1 and len(order) > 1 and not hlo.depends_on_replicas(code)

    def _options(self, asked: CompileOptionsProto, order: Sequence[int], *, is_portable: bool) -> bytes:
        """Return a program's options with the engine's numbers of the devices."""
        chosen = CompileOptionsProto()
        chosen.CopyFrom(asked)
        build = chosen.executable_build_options
        if self._settings.places:
            # These options are for the compiler of the emulated chip. XLA_FLAGS has those of this plugin.
            build.ClearField("debug_options")
            chosen.ClearField("env_option_overrides")
        build.num_partitions = partitions = max(1, build.num_partitions)
        build.num_replicas = 1 if is_portable else len(order) // partitions
        build.device_ordinal = -1
        chosen.compile_portable_executable = is_portable
        build.ClearField("device_assignment")
        if not is_portable:
            assignment = build.device_assignment
            assignment.replica_count, assignment.computation_count = build.num_replicas, partitions
            for partition in range(partitions):
                start = partition * build.num_replicas
                ids = order[start : start + build.num_replicas]
                assignment.computation_devices.add(replica_device_ids=ids)
        for name, value in rewrite.CPU_OPTIONS.items() if self._is_cpu else ():
            if not self._is_users(name):
                chosen.env_option_overrides[name].bool_field = value
        return chosen.SerializeToString()

    def _is_users(self, option: str) -> bool:
        """Return whether the user sets an XLA option, which then takes precedence."""
        return option in self._flags

    def _compile(self, code: bytes, chosen: bytes) -> tuple[LoadedProgram, bytes]:
        """Compile a program; return it with its options."""
        if not self._is_cpu or self._is_users(rewrite.FUSION_OPTION):
            return programs.compile_hlo(self._client, code, self._with_ids(chosen)), chosen
        faster = CompileOptionsProto.FromString(chosen)
        faster.env_option_overrides[rewrite.FUSION_OPTION].string_field = ""
        options = faster.SerializeToString()
        try:
            return programs.compile_hlo(self._client, code, self._with_ids(options)), options
        except PjrtError as error:
            # An older compiler lacks the option, and the kernels that it turns off.
            if rewrite.FUSION_OPTION not in error.message:
                raise
        return programs.compile_hlo(self._client, code, self._with_ids(chosen)), chosen

    def _with_ids(self, options: bytes) -> bytes:
        """Return a program's options with the plugin's numbers of the devices."""
        # Stored options have the engine's numbers, because the plugin may number the devices differently in
        # the process that loads the program.
        chosen = CompileOptionsProto.FromString(options)
        for partition in chosen.executable_build_options.device_assignment.computation_devices:
            numbers = partition.replica_device_ids
            numbers[:] = [self._client.devices[index].id for index in numbers]
        return chosen.SerializeToString()

    def _attach(
        self, executable: Executable, loaded: LoadedProgram, options: bytes, source: bytes, native: bytes
    ) -> Executable:
        is_partitioned = executable.num_partitions > 1
        # XLA's CPU client starts a program for several devices on all of them, or hangs.
        meets = is_partitioned or (self._is_cpu and len(loaded.devices) > 1)
        program = PluginProgram(
            loaded=loaded,
            options=options,
            # Only programs of replicas are ever joined with others, which needs their sources.
            source=source if meets and not is_partitioned else b"",
            native=native,
            sizes=tuple(output.size_bytes for output in executable.outputs),
            meets=meets,
        )
        executable.attach(program, _needs(executable, loaded))
        return executable

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in the plugin's format, with a header for what that format lacks."""
        program: PluginProgram = executable.native["program"]
        lengths = _LENGTHS.pack(len(program.options), len(program.source))
        native = program.native or program.loaded.serialize()
        whole = b"".join((lengths, program.options, program.source, native))
        return pack(executable, whole, self.name)

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process whose plugin is the same and has as many devices."""
        unpacked = unpack(data, len(self._client.devices), self.name)
        whole = unpacked.native
        length, source_length = _LENGTHS.unpack_from(whole)
        middle = _LENGTHS.size + length
        end = middle + source_length
        options, source, native = whole[_LENGTHS.size : middle], whole[middle:end], whole[end:]
        if self._is_cpu:
            from polyxla_bridge.engine.expansions import torch_library

            torch_library.check(unpacked.executable)
        loaded = programs.load(self._client, native, self._with_ids(options))
        return self._attach(unpacked.executable, loaded, options, source, native if self._is_cpu else b"")

    def join(self, executables: Sequence[Executable]) -> JointProgram:
        """Return one program that does on each device what that device's program does.

        Args:
            executables: the program of each local device, by index of the device.

        Raises:
            PjrtError: there is none, because the programs differ too much.
        """
        first = executables[0]
        if all(executable is first for executable in executables):
            return JointProgram(first)
        fingerprints = tuple(executable.fingerprint for executable in executables)
        # Replicas repeat the same programs in each step, so each combination is merged once.
        if fingerprints not in self._joint:
            order = first.devices or range(len(executables))
            found = merging.merged([executables[index].native["program"].source for index in order])
            executable = self.compile(found.module, first.native["program"].options)
            arguments = dict(zip(order, found.arguments, strict=True))
            self._joint[fingerprints] = JointProgram(executable, arguments)
        return self._joint[fingerprints]

    def close(self) -> None:
        """Forget all programs."""
        super().close()
        self._joint.clear()


def _needs(executable: Executable, loaded: LoadedProgram) -> MemoryNeeds:
    """Return what a program needs on one device; temporary arrays count as 0 if the plugin reports none."""
    try:
        return MemoryNeeds.from_xla(loaded.memory(), len(executable.outputs))
    except PjrtError as error:
        if error.code != Code.UNIMPLEMENTED:
            raise
    arguments, results = (
        sum(array.size_bytes for array in arrays) for arrays in (executable.parameters, executable.outputs)
    )
    donated = hlo.donated(executable.optimized_hlo)
    reused = sum(executable.parameters[number].size_bytes for number in donated)
    return MemoryNeeds(arguments, results - reused, 0)


def _optimized(loaded: LoadedProgram) -> bytes:
    """Return the optimised program, a serialised HloModuleProto."""
    form, code = loaded.optimized()
    if form != "hlo_with_config":
        return code
    return HloModuleProtoWithConfig.FromString(code).hlo_module.SerializeToString()
