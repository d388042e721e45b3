"""Compiling for jaxlib's CPU clients, once for all replicas of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxlib import _jax, xla_client

from polyxla_bridge.abi import Code
from polyxla_bridge.engine import custom_calls, numbering, partitioning
from polyxla_bridge.engine.clients import Clients, JaxProgram
from polyxla_bridge.engine.expansions import cpu, torch_library
from polyxla_bridge.engine.memory_accounting import MemoryNeeds
from polyxla_bridge.env import POLYXLA_CPU_KERNELS, POLYXLA_SHARED_MEMORY, BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import arguments, cache, hlo, kernels, numerics, rewrite, shared_collectives
from polyxla_bridge.programs.compile_once import CompileCoordinator, CompileOnce
from polyxla_bridge.programs.executable import ArrayType, Executable, pack, unpack

COMPILER_OPTIONS: dict[str, str | bool] = {**rewrite.CPU_OPTIONS, rewrite.FUSION_OPTION: ""}
"""XLA options that replace XLA's defaults and the framework's."""
COMPILER = f"jaxlib {version('jaxlib')}"
"""Name and version of the compiler, for the files of its programs."""


class Compiler(CompileOnce):
    """Compiles and loads the programs of one process of a job. Any thread may call it.

    Args:
        settings: of the job.
        clients: jaxlib's clients, on which programs are loaded.
        coordinator: decides which process compiles a program; None in a job of one replica.
        on_lookup: called for each program that this process needs, with whether the cache had it.
    """

    def __init__(
        self,
        settings: BridgeSettings,
        clients: Clients,
        coordinator: CompileCoordinator | None,
        on_lookup: Callable[[bool], None] | None,
    ) -> None:
        options = {
            **COMPILER_OPTIONS,
            POLYXLA_SHARED_MEMORY: clients.memory.is_shared,
            POLYXLA_CPU_KERNELS: torch_library.NAME if settings.has_torch_kernels else "",
        }
        kept = cache.for_job(settings, options, on_lookup)
        super().__init__(kept, coordinator if settings.processes > 1 else None)
        self._settings = settings
        self._flags = cache.flags(settings.xla_flags)
        self._name = COMPILER + (numerics.NAME if settings.has_tpu_numerics else "")
        self._clients = clients
        for target in custom_calls.TARGETS:
            custom_calls.register(target)

    def is_serializable(self, executable: Executable) -> bool:
        """Return whether jaxlib can serialise a program: any."""
        return True

    def compile_new(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program for all replicas, and load it on the first."""
        # These refuse dynamic shapes and kernels before the compilation.
        hlo.results(hlo_module)
        kernels.check(hlo_module)
        compile_options = xla_client.CompileOptions.ParseFromString(options)
        devices = self.devices_of(compile_options)
        self._complete(compile_options, devices)
        partitions = compile_options.num_partitions
        first = self._first(devices)
        replica, shardings = hlo_module, b""
        if partitions > 1:
            compile_ = functools.partial(self._clients.compile, first, devices=devices)
            replica, shardings = partitioning.divided(hlo_module, compile_options, compile_)
        code = arguments.for_jaxlib(replica, is_partitioned=False)
        code = cpu.expanded(
            code, is_partitioned=False, calls_library=True, calls_torch=self._settings.has_torch_kernels
        )
        if self._clients.memory.is_shared:
            code = shared_collectives.rewritten(code, compile_options.num_replicas, devices)
        code = rewrite.for_jaxlib(code, compile_options.num_replicas)
        native = self._clients.compile(first, _jax.mlir.hlo_to_stablehlo(code), compile_options)
        # Two messages, one after the other, are read as one that has the fields of both.
        optimized = native.hlo_modules()[0].as_serialized_hlo_module_proto() + shardings
        executable = Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(optimized)),
            num_replicas=compile_options.num_replicas // partitions,
            optimized_hlo=optimized,
            code_size_bytes=native.size_of_generated_code_in_bytes(),
            fingerprint=fingerprint,
            num_partitions=partitions,
            devices=devices,
            meets=hlo.meets(replica),
        )
        # Serialise the program now: its first execution resolves the comparator of a sort, and jaxlib cannot
        # serialise that.
        data = self._clients.serialize(first, native)
        program = JaxProgram(self._clients, {first: native}, data, executable.outputs)
        return self._attach(executable, program)

    def _attach(self, executable: Executable, program: JaxProgram) -> Executable:
        found = program.on(self._first(executable.devices)).get_compiled_memory_stats()
        executable.attach(program, MemoryNeeds.from_xla(found, len(executable.outputs)))
        return executable

    def devices_of(self, options: Any) -> tuple[int, ...]:
        """Return the devices that a program's options name; none for all of the job's, in their order.

        Raises:
            PjrtError: as for `numbering.in_program`.
        """
        assignment = options.device_assignment
        numbers = hlo.assigned_devices(assignment.serialize()) if assignment is not None else ()
        return numbering.in_program(numbers, self._settings.replicas, self._clients.local)

    def _first(self, devices: Sequence[int]) -> int:
        """Return the local replica on which a program is loaded first."""
        local = self._clients.local
        return next(index for index in local if index in devices) if devices else local[0]

    def _complete(self, options: Any, devices: Sequence[int]) -> None:
        """Write the devices and this engine's own options into a program's options."""
        partitions = options.num_partitions
        # The order lists all replicas of the first partition, then those of the next.
        order = list(devices or range(self._settings.replicas))
        options.num_replicas = len(order) // partitions
        # `arguments.for_jaxlib` unpacks the tuple.
        options.parameter_is_tupled_arguments = False
        # jaxlib gives each client a block of ids.
        ids = np.array(self._clients.global_ids, dtype=np.int32)
        placed = ids[order].reshape(partitions, -1).T
        options.device_assignment = xla_client.DeviceAssignment.create(np.ascontiguousarray(placed))
        # A flag that the user sets takes precedence.
        options.env_option_overrides = [
            (name, value) for name, value in COMPILER_OPTIONS.items() if name not in self._flags
        ]

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in jaxlib's format, with a header for what that format lacks."""
        return pack(executable, executable.native["program"].data, self._name)

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process of a job with as many devices."""
        unpacked = unpack(data, self._settings.replicas, self._name)
        program = JaxProgram(self._clients, {}, unpacked.native, unpacked.executable.outputs)
        if not self._clients.memory.is_shared and hlo.shares_memory(unpacked.executable.optimized_hlo):
            raise PjrtError(
                Code.INVALID_ARGUMENT,
                f"{unpacked.executable.name} was compiled for replicas that share memory, and these do not",
            )
        torch_library.check(unpacked.executable)
        try:
            program.on(self._first(unpacked.executable.devices))
        except Exception as error:
            raise PjrtError(
                Code.INVALID_ARGUMENT, f"jaxlib cannot load {unpacked.executable.name}: {error}"
            ) from error
        return self._attach(unpacked.executable, program)
