"""A replica's place in a mesh of torch, its gradients and their norm, and the order of its layers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from polyxla import DisagreementError, Replica, UsageError
from polyxla.plugin import (
    Sharding,
    World,
    average_gradients,
    average_in_place,
    optimizer_parameters,
    pip_install,
)
from polyxla_training.sharding.mesh_shape import DDP, FSDP, TENSOR, ZERO1, complete, read_strategy

_NAMED = 1000
"""Number of layers of a step that are recorded by name, for the error."""


class LayerOrder:
    """Compares the order between replicas, in each step with an order that is new.

    A layer is gathered when a replica computes it. Replicas that compute different layers of equal shapes
    gather a mixture of them, which no collective can notice. Layers in a compiled module are left out.

    Args:
        replica: the replica.
        layers: the divided layers, by name.
    """

    def __init__(self, replica: Replica, layers: Mapping[str, torch.nn.Module]) -> None:
        self._replica = replica
        self._names: list[str] = []
        self._digest = 0
        self._compared: set[int] = set()
        for name, layer in layers.items():
            layer.register_forward_pre_hook(lambda *_, name=name: self._add(name))

    def _add(self, name: str) -> None:
        if torch.compiler.is_compiling():
            # torch.compile would guard on the recorded values, and compile again at each step.
            return
        # A running digest costs the same for any number of layers; names are kept for the error only.
        self._digest = zlib.crc32(name.encode(), self._digest)
        if len(self._names) < _NAMED:
            self._names.append(name)

    def compare(self) -> None:
        """Compare what this replica has computed since the last call, unless it has done so before.

        Raises:
            DisagreementError: replicas have computed different layers.
        """
        digest, names = self._digest, self._names
        self._digest, self._names = 0, []
        # Orders repeat: a comparison, which is a collective, is made once for each.
        if digest in self._compared:
            return
        every: list[tuple[int, list[str]]] = self._replica.all_gather((digest, names))
        self._compared.add(digest)
        for other, (theirs, their_names) in enumerate(every):
            if theirs == every[0][0]:
                continue
            pairs = list(zip([*every[0][1], "none"], [*their_names, "none"], strict=False))
            place = next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
            first, second = pairs[place]
            raise DisagreementError(
                f"replicas use different layers: layer {place + 1} of this step is {first} in replica 0, and "
                f"{second} in replica {other}. The mesh divides each layer's parameters among the replicas, "
                "which gather them when they use the layer: call the same layers in the same order in all "
                "replicas, and multiply by 0 what one does not need"
            )


_EPSILON = 1e-6
"""Keeps the division by a norm of zero finite. Source: ``torch.nn.utils.clip_grads_with_norm_``."""


class TorchSharding(Sharding):
    """One replica's place in a `DeviceMesh`.

    Args:
        replica: the replica.
        mesh: as for `Replica.setup`.

    Attributes:
        devices: the mesh; None if there is only one replica.

    Raises:
        UsageError: the mesh is not one of all replicas, or the runtime has no process group of torch.
    """

    def __init__(self, replica: Replica, mesh: Mapping[str, int]) -> None:
        where = f"mesh={dict(mesh)}"
        self.mesh = complete(read_strategy(mesh, where) or {}, replica.world_size, where)
        self.devices: DeviceMesh | None = None
        self.data_world = replica.world
        self._data_group: dist.ProcessGroup | None = None
        self._replica = replica
        self._orders: list[LayerOrder] = []
        if replica.world_size > 1:
            if not (dist.is_available() and dist.is_initialized()) or replica.world.shares_process:
                raise UsageError(
                    f"the replicas of runtime {replica.runtime} are in no process group of torch",
                    where=where,
                    fix=f"Use TorchTPU ({pip_install('polyxla-runtime-torchtpu')}), or leave the mesh out: "
                    "every replica then has all parameters.",
                )
            names = tuple(self.mesh)
            self.devices = init_device_mesh(
                replica.device.type, tuple(self.mesh.values()), mesh_dim_names=names
            )
            self._place(self.devices)

    def _place(self, devices: DeviceMesh) -> None:
        coordinate = devices.get_coordinate()
        assert coordinate is not None
        own = dict(zip(self.mesh, coordinate, strict=True))
        names = [name for name in self.mesh if name != TENSOR]
        if len(names) < len(self.mesh):
            size, number = math.prod(self.mesh[name] for name in names), 0
            for name in names:
                number = number * self.mesh[name] + own[name]
            # Replicas along the tensor dimension compute parts of the same products, so they receive the
            # same records.
            self.data_world = World(size, number, number, size, number, size)
        if names == list(self.mesh):
            self._data_group = dist.group.WORLD
        elif names:
            data = devices[tuple(names)]
            # torch has no public way to make one group of two dimensions.
            self._data_group = (data if data.ndim == 1 else data._flatten("data")).get_group()

    @property
    def sharder(self) -> str | None:
        """The dimension over which `fully_shard` divides the parameters; None if there is none."""
        return next((name for name in (FSDP, ZERO1) if name in self.mesh), None)

    def sharded_mesh(self) -> DeviceMesh:
        """Return the mesh that `fully_shard` takes; it repeats the parameters over a first dimension ddp."""
        assert self.devices is not None
        assert self.sharder is not None
        return self.devices[(DDP, self.sharder) if DDP in self.mesh else self.sharder]

    def watch(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Compare the order in which replicas use these layers of one module, at each step."""
        self._orders.append(LayerOrder(self._replica, layers))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> int:
        """Average the gradients of parameters that `fully_shard` does not hold.

        Raises:
            DisagreementError: the replicas have used different layers since the last call.
        """
        for order in self._orders:
            order.compare()
        for parameter in optimizer_parameters(optimizer):
            grad = parameter.grad
            if (
                isinstance(parameter, DTensor)
                and isinstance(grad, DTensor)
                and grad.placements != parameter.placements
            ):
                # The sum over the tensor dimension is still to be computed.
                parameter.grad = grad.redistribute(placements=parameter.placements)
        # Without other replicas of the data, or with `fully_shard` alone, there is nothing to average.
        if self._data_group is None or self.data_world.world_size == 1:
            return 0
        whole = [
            parameter
            for parameter in optimizer_parameters(optimizer)
            if self.sharder not in _dimensions(parameter)
        ]
        return average_gradients(whole, self._average, self._replica.sync)

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        add_up = partial(dist.all_reduce, group=self._data_group)
        average_in_place(map(_local, tensors), add_up, self.data_world.world_size)

    def clip(self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None) -> None:
        """Limit the norm of all gradients together, over all shards, and the size of their elements."""
        gradients = [
            parameter.grad for parameter in optimizer_parameters(optimizer) if parameter.grad is not None
        ]
        # A replica may hold nothing of a small tensor.
        shards = [local for gradient in gradients if (local := _local(gradient)).numel()]
        if norm is not None:
            factor = (norm / (self._norm(gradients) + _EPSILON)).clamp(max=1.0)
            for shard in shards:
                shard.mul_(factor.to(shard.dtype))
        if value is not None:
            for shard in shards:
                shard.clamp_(-value, value)

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients. A collective."""
        by_placement: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for gradient in gradients:
            by_placement.setdefault(_divided_by(gradient), []).append(_local(gradient))
        total = torch.zeros((), device=self._replica.device)
        # Sorted, so that every replica calls the same collectives in the same order.
        for names, shards in sorted(by_placement.items(), key=lambda pair: pair[0]):
            square = _square(shards, self._replica.device)
            for name in names:
                assert self.devices is not None
                # The squares add up over the dimensions that divide a tensor; over the others, every replica
                # has the same sum already.
                dist.all_reduce(square, group=self.devices[name].get_group())
            total = total + square
        return total.sqrt()


def _square(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    parts = [tensor.detach().float().square().sum() for tensor in tensors if tensor.numel()]
    return torch.stack(parts).sum() if parts else torch.zeros((), device=device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dimensions(tensor: torch.Tensor) -> tuple[str, ...]:
    return (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()


def _divided_by(gradient: torch.Tensor) -> tuple[str, ...]:
    """Return the dimensions among which a gradient's elements are divided."""
    if not isinstance(gradient, DTensor):
        return ()
    placed = zip(_dimensions(gradient), gradient.placements, strict=True)
    return tuple(name for name, placement in placed if not isinstance(placement, Replicate))
