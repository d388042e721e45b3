"""Moving a module to the device in shards, and its parameters back in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from polyxla import Replica, UsageError
from polyxla.plugin import broadcast, hand_over, optimizer_parameters, parameters_of, random_state
from polyxla_training.sharding.blocks import find_blocks
from polyxla_training.sharding.initialisation import check_can_initialise, initialise
from polyxla_training.sharding.mesh_shape import FSDP, TENSOR
from polyxla_training.sharding.tensor_plan import find_styles
from polyxla_training.sharding.torch_sharding import TorchSharding

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
    held = {id(one) for optimizer in optimizers for one in optimizer_parameters(optimizer)}
    places = [(owner, name, id(one)) for owner, name, one in parameters_of(module) if id(one) in held]
    division = _Division(replica, sharding, find_styles(module) if TENSOR in sharding.mesh else {})
    blocks = find_blocks(module) if sharding.sharder else []
    for block in blocks:
        division.add(block, take_first)
    division.add(module, take_first)
    if sharding.sharder and sharding.devices:
        sharding.watch({name: part for name, part in module.named_modules() if part in blocks})
        # Otherwise replicas that use different parameters of a block would add up their gradients.
        cast("Any", module).set_reduce_scatter_unused_params(True)
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)
    hook = getattr(module, "on_post_move_to_device", None)
    if hook is not None:
        hook()
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


class _Division:
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
        seed = random_state.derive(replica.data_seed, "parameters", len(self._done))
        initialise(parts, seed)
        moved = _move(parts, replica.device)
        self._done.update(parts)
        if devices is None:
            return
        if take_first:
            broadcast(replica, moved)
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
                    # With the old one: another could have its id once it is freed.
                    moved[id(old)] = old, _on_device(old, device)
                tensors[name] = moved[id(old)][1]
    return [new for _, new in moved.values()]


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = tensor.detach().to(device)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(there, tensor.requires_grad) if is_parameter else there
