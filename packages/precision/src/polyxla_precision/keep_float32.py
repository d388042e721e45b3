"""Keep some submodules in float32 while the others are converted, and cast the inputs of both.

The hooks and wrappers that are attached to a module move, copy and pickle with it.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from polyxla_precision.contexts import Autocast, DefaultDtype
from polyxla_precision.pytree import cast_floats

# The attribute with the hook's handle. torch copies the handle along with the hook.
_HANDLE = "_polyxla_precision_handle"


class CastInputs:
    """A forward pre-hook: cast floating-point inputs.

    Args:
        dtype: to what; None stands for the dtype of the module's first floating-point parameter.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, cast."""
        # Read at each call: the user may convert the module by hand later.
        dtype = self.dtype or _float_dtype(module)
        if dtype is None:
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype) if kwargs else kwargs


def _float_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of the module's first floating-point parameter.

    Quantised weights are integers, to which its inputs must not be cast.
    """
    parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
    return next((parameter.dtype for parameter in parameters if parameter.is_floating_point()), None)


class Float32Forward:
    """Replaces a module's forward: computes the same in float32, with autocast switched off.

    It is not a pair of hooks: a KeyboardInterrupt between the two would leave autocast switched off.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward in float32."""
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("xla")
        with Autocast(enabled=False) if is_cast else nullcontext(), DefaultDtype(torch.float32):
            return self.forward(*args, **kwargs)


def find_modules(module: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    """Return the submodules with these names or patterns, and all modules inside them.

    Raises:
        ValueError: a name or pattern matches no submodule.
    """
    known = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    matches = (part for name in names for part in _matching(known, name))
    return list(dict.fromkeys(inner for part in matches for inner in part.modules()))


def _matching(known: dict[str, torch.nn.Module], name: str) -> list[torch.nn.Module]:
    found = [
        known[known_name]
        for known_name in known
        if known_name == name or fnmatch.fnmatchcase(known_name, name)
    ]
    if not found:
        near = [
            known_name for known_name in known if known_name.rpartition(".")[2] == name.rpartition(".")[2]
        ]
        near += [
            known_name for known_name in difflib.get_close_matches(name, known, n=5) if known_name not in near
        ]
        hint = (
            f"did you mean {', '.join(near[:5])}?"
            if near
            else f"submodules are: {', '.join(list(known)[:10]) or 'none'}."
        )
        raise ValueError(
            f"keep_float32: {name!r} matches no submodule; {hint} "
            "Write a submodule's whole dotted name, or a pattern such as '*norm*'."
        )
    return found


def attach_casts(module: torch.nn.Module, kept: Iterable[torch.nn.Module], *, cast_others: bool) -> None:
    """Make the `kept` modules compute in float32. Casts that were attached before are replaced.

    Args:
        module: contains the `kept` modules.
        kept: the modules that stay in float32.
        cast_others: also cast the inputs of every other module with floating-point parameters to their
            dtype; needed unless autocast does it.
    """
    # The module may have been converted by another policy before.
    remove_casts(module)
    kept = set(kept)
    for part in module.modules():
        if part in kept:
            _hook(part, CastInputs(torch.float32))
            part.forward = Float32Forward(part.forward)
        elif cast_others and _float_dtype(part) is not None:
            # On XLA a float32 input would silently turn a bfloat16 product into a float32 one.
            _hook(part, CastInputs())


def remove_casts(module: torch.nn.Module) -> None:
    """Remove from the module, and from the modules inside it, everything that `attach_casts` added."""
    for part in module.modules():
        handle = part.__dict__.pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
        wrapped = part.__dict__.get("forward")
        if isinstance(wrapped, Float32Forward):
            part.forward = wrapped.forward
            # The class's own forward needs no attribute on the instance.
            if getattr(wrapped.forward, "__func__", None) is type(part).forward:
                del part.forward


def _hook(module: torch.nn.Module, hook: CastInputs) -> None:
    # Prepended, so that the user's hooks see the inputs that forward will see.
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    module.__dict__[_HANDLE] = handle


def convert_tensors(module: torch.nn.Module, dtype: torch.dtype, kept: Iterable[torch.nn.Module]) -> None:
    """Convert floating-point parameters and buffers to `dtype`, those of `kept` modules to float32.

    In place. Parameters and buffers that modules share stay shared.

    Raises:
        ValueError: a kept module shares a parameter with one that is not kept.
    """
    kept = set(kept)
    # In float32 both dtypes are the same, so a shared parameter does not conflict.
    if dtype != torch.float32:
        _refuse_sharing(module, kept)
    float32 = [tensor for part in kept for tensor in own_tensors(part)]
    # module._apply calls `change` for a gradient too, as a tensor like any other.
    float32 += [tensor.grad for tensor in float32 if tensor.grad is not None]
    float32_ids = {id(tensor) for tensor in float32}
    # The old tensor is held as well: the id of a freed one could be used again.
    converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if id(tensor) not in converted:
            target = torch.float32 if id(tensor) in float32_ids else dtype
            converted[id(tensor)] = tensor, tensor.to(target)
        return converted[id(tensor)][1]

    # module.to() calls this too, but with one dtype for all tensors.
    module._apply(change)


def _refuse_sharing(module: torch.nn.Module, kept: set[torch.nn.Module]) -> None:
    inside = {id(tensor) for part in kept for tensor in own_tensors(part)}
    for name, part in module.named_modules():
        if part not in kept and any(id(tensor) in inside for tensor in own_tensors(part)):
            raise ValueError(
                f"a module in keep_float32 shares a parameter with {name or 'the module itself'!r}, which is "
                "not in keep_float32. Name both, or neither."
            )


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over the floating-point parameters and buffers of the module, without its submodules'."""
    yield from (parameter for parameter in module.parameters(recurse=False) if parameter.is_floating_point())
    yield from (buffer for buffer in module.buffers(recurse=False) if buffer.is_floating_point())
