"""Moving a module to the device in shards: its blocks, their first values, and its tensor plan."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from polyxla import Replica, UsageError
from polyxla.plugin import broadcast, hand_over, optimizer_parameters, parameters_of, random_state
from polyxla_training.sharding.mesh_shape import FSDP, TENSOR
from polyxla_training.sharding.torch_sharding import TorchSharding

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the elements of the outermost lists in `module` that have parameters, such as its layers.

    A block that shares a parameter with another part is left to the rest, which is gathered as a whole: two
    parts would each have their own copy of it.
    """
    found = list(dict.fromkeys(_elements(module)))
    uses = _uses(module)
    return [
        block for block in found if all(uses[parameter] == count for parameter, count in _uses(block).items())
    ]


def _elements(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for part in module.children():
        if isinstance(module, _LISTS) and not isinstance(part, _LISTS):
            if any(True for _ in part.parameters()):
                yield part
        else:
            yield from _elements(part)


def _uses(module: torch.nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, _, parameter in parameters_of(module))


def check_can_initialise(module: torch.nn.Module) -> None:
    """Refuse a module with tensors on the meta device that it cannot give values.

    Raises:
        UsageError: a part with such tensors has no ``reset_parameters``.
    """
    stuck = [
        f"{name or 'the module itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if _own_meta(part) and not callable(getattr(part, "reset_parameters", None))
    ]
    if stuck:
        raise UsageError(
            f"parts with tensors on the meta device have no reset_parameters: {', '.join(stuck[:3])}",
            where=type(module).__name__,
            fix="Write reset_parameters(self) in them, which gives their own parameters and buffers values, "
            "as torch's layers have.",
        )


def initialise(parts: Sequence[torch.nn.Module], seed: int) -> None:
    """Replace the meta tensors of `parts` by tensors on the host with first values; tied ones stay tied.

    Args:
        parts: modules; of each, its own tensors are meant, without those of its submodules.
        seed: makes the same values in every replica; torch's generator is as before afterwards.
    """
    parts = [part for part in parts if _own_meta(part)]
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in parts:
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((tensors, name))
    # The user's own draws must not depend on whether the module was on the meta device.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in parts:
            part.to_empty(device="cpu", recurse=False)
            part.reset_parameters()  # type: ignore[operator]
    # `to_empty` makes a tensor for each place, so tied parameters are tied again here.
    for (first, first_name), *others in places.values():
        for tensors, name in others:
            tensors[name] = first[first_name]


def _own_meta(part: torch.nn.Module) -> bool:
    own = (*part._parameters.values(), *part._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


_STYLES: dict[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence_parallel": SequenceParallel,
}
"""Styles by their names in the plans of transformers. Source: its ``integrations/tensor_parallel.py``."""
_GATHERING = ("colwise_rep", "colwise_gather_output")
"""Their names, in two versions, of a layer whose output every replica has whole."""


def find_styles(module: torch.nn.Module) -> dict[torch.nn.Module, ParallelStyle]:
    """Return how each part of `module` is divided that its attribute ``tp_plan`` names.

    Raises:
        UsageError: there is no plan, or it names a part or a style that does not exist.
    """
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"{type(module).__name__} has no tp_plan: {plan!r}",
            where="the dimension tp-plan of the mesh",
            fix='Give the module an attribute such as tp_plan = {"layers.*.up": "colwise", '
            '"layers.*.down": "rowwise"}, or leave tp-plan out.',
        )
    found: dict[torch.nn.Module, ParallelStyle] = {}
    for pattern, style in plan.items():
        parts = [part for name, part in module.named_modules() if _matches(name, pattern)]
        if not parts:
            raise UsageError(
                f"no part of {type(module).__name__} is called {pattern!r}",
                where=f"{type(module).__name__}.tp_plan",
                fix="Write the names that named_modules() gives, with * for one name between dots.",
            )
        made = _style(style, pattern, type(module).__name__)
        found |= dict.fromkeys(parts, made)
    return found


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _style(style: Any, pattern: str, owner: str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style in _GATHERING:
        return ColwiseParallel(output_layouts=Replicate())
    if style not in _STYLES:
        raise UsageError(
            f"{style!r} is not a style of a part: {', '.join((*_STYLES, _GATHERING[0]))} are",
            where=f"{owner}.tp_plan[{pattern!r}]",
            fix="Write one of them, or a ParallelStyle of torch.distributed.tensor.parallel.",
        )
    return _STYLES[style]()


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that compute with the parameters, beside ``forward``."""


def shard_module(
    replica: Replica,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mapping[str, int],
    take_first: bool,
) -> TorchSharding:
    """Move `module` to the device block by block, and divide each block at once; see `polyxla_shard_module`.

    The device never holds more than its shards and one whole block, nor the host more than it held before and
    one block with first values.

    Raises:
        UsageError: the mesh does not fit, a part cannot be initialised or divided, or an optimizer has made
            steps.
    """
    check_can_initialise(module)
    _refuse_stepped(optimizers)
    sharding = TorchSharding(replica, mesh)
    if replica.sharding is not None and replica.sharding.mesh != sharding.mesh:
        raise UsageError(
            f"another module of this replica is divided over {dict(replica.sharding.mesh)}",
            where=f"replica.setup(mesh={dict(mesh)})",
            fix="Give all modules the same mesh.",
        )
    held = {id(parameter) for optimizer in optimizers for parameter in optimizer_parameters(optimizer)}
    places = [
        (owner, name, id(parameter))
        for owner, name, parameter in parameters_of(module)
        if id(parameter) in held
    ]
    divider = _PartDivider(replica, sharding, find_styles(module) if TENSOR in sharding.mesh else {})
    blocks = find_blocks(module) if sharding.sharder else []
    for block in blocks:
        divider.add(block, take_first)
    # Last, what is in no block: it is gathered as one, around all blocks.
    divider.add(module, take_first)
    if sharding.sharder and sharding.devices:
        sharding.watch({name: part for name, part in module.named_modules() if part in blocks})
        # Parameters that a replica has not used take part in the sum of gradients too. Otherwise replicas
        # that use different parameters of a block would add up gradients of different parameters.
        cast("Any", module).set_reduce_scatter_unused_params(True)
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)
    hook = getattr(module, "on_post_move_to_device", None)
    if hook is not None:
        hook()
    # `fully_shard` makes new parameters, so the optimizers get those that are now in the old ones' places.
    moved = {old: getattr(owner, name) for owner, name, old in places}
    for optimizer in optimizers:
        hand_over(optimizer, moved, replica.device)
    return sharding


def _refuse_stepped(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if optimizer.state:
            raise UsageError(
                f"{type(optimizer).__name__} has made steps, and its state is not divided",
                where="replica.setup(mesh=...)",
                fix="Set up the module first, then load the optimizer's state.",
            )


class _PartDivider:
    """Moves and divides the parts of one module.

    Args:
        replica: the replica.
        sharding: its place in the mesh.
        styles: how parts are divided over the tensor dimension.
    """

    def __init__(
        self, replica: Replica, sharding: TorchSharding, styles: Mapping[torch.nn.Module, ParallelStyle]
    ) -> None:
        self._replica, self._sharding, self._styles = replica, sharding, styles
        self._done: set[torch.nn.Module] = set()

    def add(self, block: torch.nn.Module, take_first: bool) -> None:
        """Move what is left of `block` to the device, and divide it."""
        replica, devices = self._replica, self._sharding.devices
        parts = [part for part in block.modules() if part not in self._done]
        # The same seed in all replicas, and another one for each block, so that equal blocks begin with
        # different values.
        seed = random_state.derive(replica.data_seed, "parameters", len(self._done))
        initialise(parts, seed)
        moved = _move(parts, replica.device)
        self._done.update(parts)
        if devices is None:
            return
        if take_first:
            broadcast(replica, moved)
        # Whole tensors: with this reference, they would stay on the device beside the shards.
        del moved
        for part in parts:
            if part in self._styles:
                parallelize_module(part, devices[TENSOR], self._styles[part])
        if self._sharding.sharder:
            fully_shard(
                block,
                mesh=self._sharding.sharded_mesh(),
                reshard_after_forward=self._sharding.sharder == FSDP,
            )


def _move(parts: Iterable[torch.nn.Module], device: torch.device) -> list[torch.Tensor]:
    """Move the tensors of `parts`, not those of their parts, and return them; tied ones stay tied."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in parts:
        own: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in own:
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in moved:
                    # The old tensor is kept with the new one: once it were freed, another could have its id.
                    moved[id(old)] = old, _on_device(old, device)
                tensors[name] = moved[id(old)][1]
    return [new for _, new in moved.values()]


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = tensor.detach().to(device)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(there, tensor.requires_grad) if is_parameter else there
