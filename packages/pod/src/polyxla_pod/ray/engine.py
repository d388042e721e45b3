"""The engine ``ray``: each host of a slice is a node of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_pod.engines import Engine, Target
from polyxla_pod.ray import cluster, relay
from polyxla_pod.ray.broker import Broker
from polyxla_pod.ray.node import Node
from polyxla_pod.ray.slices import CHIPS, choose, find_slices

OPTIONS = ("address", "type")
"""Names of the options: the cluster's address, and the type of the slice."""


class RayEngine(Engine):
    """Takes a whole slice of a Ray cluster, and runs one actor per host.

    Making one connects this process to the cluster. Blocks for at most `cluster.CONNECT_S` and
    `cluster.RESERVE_S`. The chips are free again after `close`, or with the end of this process.

    Args:
        target: its TPU is the slice's name, its options are ``NAME=VALUE``.
        call: a pickled call for `polyxla_pod.ray.call`; None for commands.

    Raises:
        UsageError: there is no such cluster or slice, or its chips are in use.
    """

    def __init__(self, target: Target, call: bytes | None = None) -> None:
        import ray

        options = _options(target)
        cluster.connect(options.get("address"), snapshot())
        self._slice = choose(find_slices(ray.nodes()), target.tpu, options.get("type"))
        self.hosts = tuple(one.address for one in self._slice.hosts)
        self._group = cluster.reserve(self._slice)
        self._broker = Broker(self._place, call)

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command of a relay, which has neither Ray nor an environment's packages to import."""
        return [sys.executable, "-I", "-S", relay.__file__, self._broker.path, str(host), *program]

    def check_by_hand(self, host: int) -> str:
        """Return ``ray status``."""
        return "ray status"

    def outcome(self, host: int, timeout_s: float) -> bytes:
        """Return what the host's call left; empty if that is nothing, or does not come in time."""
        return self._broker.outcome(host, timeout_s)

    def close(self) -> None:
        """Give the chips back, which ends what runs on them."""
        from ray.util.placement_group import remove_placement_group

        self._broker.close()
        remove_placement_group(self._group)

    def _place(self, host: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)
        chips = {CHIPS: self._slice.hosts[host].chips}
        return ray.remote(Node).options(num_cpus=0, resources=chips, scheduling_strategy=where).remote()


def _options(target: Target) -> dict[str, str]:
    found = {}
    for text in target.options:
        name, equals, value = text.partition("=")
        if name not in OPTIONS or not equals:
            raise UsageError(
                f"{text!r} is not an option of the engine ray",
                where=f"--engine-option={text}",
                fix="Write address=HOST:PORT or type=v4-16.",
            )
        found[name] = value
    if target.hosts:
        raise UsageError(
            "the engine ray finds the hosts in the cluster",
            where=f"--hosts {','.join(target.hosts)}",
            fix="Leave --hosts out, or name the slice with --tpu NAME.",
        )
    return found
