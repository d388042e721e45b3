"""Modules of which some stay in float32 while the others change: which, and how they get their inputs.

What is attached to a module is part of it: it moves, is copied and is pickled with it.
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

# Of each module that something is attached to: the hook's handle, which torch copies along with the hook.
_HANDLE = "_polyxla_precision_handle"


class CastInputs:
    """A forward pre-hook: floating-point inputs come in one dtype, by default the module's parameters'."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, cast."""
        # Asked for each time: a person may convert a trained module by hand.
        dtype = self.dtype or next(one.dtype for one in module._parameters.values() if one is not None)
        return cast_floats(args, dtype), cast_floats(kwargs, dtype) if kwargs else kwargs


class Float32Forward:
    """In place of a module's forward: the same, where autocast does not reach.

    Not a pair of hooks, which a KeyboardInterrupt would leave half done.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does."""
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("xla")
        with Autocast(enabled=False) if is_cast else nullcontext(), DefaultDtype(torch.float32):
            return self.forward(*args, **kwargs)


def find(module: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    """Return the submodules of these names or patterns, and all modules inside them.

    Raises:
        ValueError: a name or pattern matches no submodule.
    """
    known = {name: one for name, one in module.named_modules(remove_duplicate=False) if name}
    matches = (one for name in names for one in _matching(known, name))
    return list(dict.fromkeys(inner for one in matches for inner in one.modules()))


def _matching(known: dict[str, torch.nn.Module], name: str) -> list[torch.nn.Module]:
    found = [known[one] for one in known if one == name or fnmatch.fnmatchcase(one, name)]
    if not found:
        near = [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
        near += [one for one in difflib.get_close_matches(name, known, n=5) if one not in near]
        said = (
            f"near it: {', '.join(near[:5])}"
            if near
            else f"there are: {', '.join(list(known)[:10]) or 'none'}"
        )
        raise ValueError(
            f"keep_float32 names {name!r}, which no submodule is called; {said}. "
            "Write a submodule's whole dotted name, or a pattern such as '*norm*'."
        )
    return found


def attach(module: torch.nn.Module, kept: Iterable[torch.nn.Module], *, cast_others: bool) -> None:
    """Make the `kept` modules compute in float32; give others with parameters inputs in their dtype, or not.

    Others need that where autocast does not cast. What was attached before is replaced.
    """
    release(module)
    kept = set(kept)
    for one in module.modules():
        if one in kept:
            _hook(one, CastInputs(torch.float32))
            one.forward = Float32Forward(one.forward)
        elif cast_others and any(True for _ in one.parameters(recurse=False)):
            # On XLA a float32 input would turn a bfloat16 product into a float32 one without a word.
            _hook(one, CastInputs())


def release(module: torch.nn.Module) -> None:
    """Take off the module, and the modules inside it, what `attach` put on them."""
    for one in module.modules():
        handle = one.__dict__.pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
        wrapped = one.__dict__.get("forward")
        if isinstance(wrapped, Float32Forward):
            one.forward = wrapped.forward
            if getattr(wrapped.forward, "__func__", None) is type(one).forward:
                del one.forward


def _hook(module: torch.nn.Module, hook: CastInputs) -> None:
    # First, so that a person's own hooks see what forward will see.
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    module.__dict__[_HANDLE] = handle


def convert(module: torch.nn.Module, dtype: torch.dtype, kept: Iterable[torch.nn.Module]) -> None:
    """Bring floating-point parameters and buffers into `dtype`, those of `kept` modules into float32.

    In place; parameters and buffers that were one stay one, also where modules share a buffer.

    Raises:
        ValueError: a kept module shares a parameter with one that is not kept.
    """
    kept = set(kept)
    if dtype != torch.float32:
        _refuse_sharing(module, kept)
    wide = [tensor for one in kept for tensor in own_tensors(one)]
    # A gradient is converted by itself, and has its parameter's dtype.
    wide += [tensor.grad for tensor in wide if tensor.grad is not None]
    ids = {id(tensor) for tensor in wide}
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor, tensor.to(torch.float32 if id(tensor) in ids else dtype)
        return made[id(tensor)][1]

    # What module.to() calls, whose dtype is one for all.
    module._apply(change)


def _refuse_sharing(module: torch.nn.Module, kept: set[torch.nn.Module]) -> None:
    inside = {id(tensor) for one in kept for tensor in own_tensors(one)}
    for name, one in module.named_modules():
        if one not in kept and any(id(tensor) in inside for tensor in own_tensors(one)):
            raise ValueError(
                f"keep_float32 keeps a module that shares a parameter with {name or 'the module itself'!r}, "
                "which is not kept. Name both, or neither."
            )


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Give the floating-point parameters and buffers that the module holds itself."""
    yield from (one for one in module.parameters(recurse=False) if one.is_floating_point())
    yield from (one for one in module.buffers(recurse=False) if one.is_floating_point())
