"""Kernels of Pallas on an emulated TPU.

JAX lowers a kernel for a TPU's cores in the process that calls it, whichever framework the rest of the
program is written in. Here, that process also lowers what JAX's interpreter of kernels does, and the kernel
carries it to the engine. What JAX refuses for a TPU is refused first, as on a chip.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from polyxla_bridge import env
from polyxla_bridge.programs import kernels

_LOWERING = "jax._src.pallas.mosaic.pallas_call_registration"
"""The module that lowers kernels for TPUs; JAX imports it with Pallas, or when it lowers the first one."""


def watch() -> None:
    """Let kernels carry what they compute; call this before the first one is lowered."""
    if _LOWERING in sys.modules:
        _teach(sys.modules[_LOWERING])
    else:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds the module that lowers kernels."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, *_: object) -> ModuleSpec | None:
        """Find the module, with a loader that changes it."""
        if name != _LOWERING:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _teach(module)


def _teach(lowering: Any) -> None:
    lower = lowering.pallas_call_tpu_lowering_rule

    @functools.wraps(lower)
    def lower_with_program(context: Any, *operands: Any, interpret: Any, **kernel: Any) -> Any:
        results = lower(context, *operands, interpret=interpret, **kernel)
        if env.detects_races(env.own_environ()):
            _refuse_races(context, kernel)
        call = _custom_call(results)
        config = call.attributes["backend_config"]
        try:
            carrying = kernels.with_program(config.value, _program(context, kernel))
        # JAX has lowered the kernel for a TPU, so what it raises now says what its interpreter lacks.
        except Exception as error:
            carrying = kernels.with_reason(config.value, f"JAX cannot interpret this one: {error}")
        with context.module_context.context:
            call.attributes["backend_config"] = lowering.ir.StringAttr.get(carrying)
        return results

    lowering.pallas_call_tpu_lowering_rule = lower_with_program
    lowering.pallas_core.register_lowering_rule(lowering.tpu_core.CompilerParams, lower_with_program, "tpu")


def _custom_call(results: Any) -> Any:
    """Return the operation of a kernel, whose results may be converted to booleans."""
    operation = results[0].owner
    while operation.name != "stablehlo.custom_call":
        operation = operation.operands[0].owner
    return operation


def _program(context: Any, kernel: Mapping[str, Any]) -> bytes:
    """Return a serialised HloModuleProto that computes what a kernel does, from the same operands."""
    import jax
    from jax._src.pallas import hlo_interpreter
    from jax.numpy import bool_, int32

    # Kernels have no booleans in their memory: JAX passes them as integers.
    def compute(*operands: Any) -> list[Any]:
        typed = [
            operand.astype(bool_) if aval.dtype == bool_ else operand
            for operand, aval in zip(operands, context.avals_in, strict=True)
        ]
        results = hlo_interpreter.pallas_call_hlo_interpret(*typed, **kernel)
        return [
            result.astype(int32) if aval.dtype == bool_ else result
            for result, aval in zip(results, context.avals_out, strict=True)
        ]

    given = [
        jax.ShapeDtypeStruct(aval.shape, int32 if aval.dtype == bool_ else aval.dtype)  # type: ignore[no-untyped-call]
        for aval in context.avals_in
    ]
    lowered = jax.jit(compute, keep_unused=True).trace(*given).lower(lowering_platforms=("cpu",))
    computation: Any = lowered.compiler_ir("hlo")
    return bytes(computation.as_serialized_hlo_module_proto())


def _refuse_races(context: Any, kernel: Mapping[str, Any]) -> None:
    """Run a kernel once, as on a TPU: with memories that copies fill while the kernel goes on.

    Raises:
        RuntimeError: two accesses to a memory race.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu

    interpreter: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    run = functools.partial(
        interpreter.interpret_pallas_call, interpret_params=tpu.InterpretParams(detect_races=True), **kernel
    )
    # JAX prints what it finds.
    printed = io.StringIO()
    with jax.default_device(jax.devices("cpu")[0]), contextlib.redirect_stdout(printed):
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in context.avals_in]
        try:
            jax.block_until_ready(jax.jit(run)(*zeros))  # type: ignore[no-untyped-call]
            has_races = interpreter.races.races_found
        finally:
            interpreter.reset_tpu_interpret_mode_state()
    if has_races:
        raise RuntimeError(
            f"the Pallas kernel {kernel['jaxpr'].debug_info.func_src_info} has races; wait for a copy, with "
            f"wait() of its descriptor, before its memory is used:\n{printed.getvalue().strip()}"
        )
