"""The order in which replicas compute the layers whose parameters are divided among them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from polyxla import DisagreementError, Replica

_NAMED = 1000
"""How many layers of a step an error can name."""


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
            # Recorded values would be guards, which compile anew at each step.
            return
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
