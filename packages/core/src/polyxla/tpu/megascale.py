"""The slices of a job on several (multislice), as the ``MEGASCALE`` variables describe them.

Within a slice, chips are linked (ICI); between slices is the hosts' network (DCN). Each slice has a topology,
worker ids and host names of its own. Its hosts know how many others there are, and where all meet.

Source: the variables that GKE sets on the pods of a JobSet of several slices; the errors of torch_tpu 0.2.0's
``device_mesh`` for what libtpu makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla.errors import UsageError
from polyxla.tpu import env

DEFAULT_PORT = 8080
"""The port of a coordinator's address without one. Source: the ports of GKE's examples of several slices."""


@dataclass(frozen=True)
class Megascale:
    """The place of a slice in a job on several.

    Attributes:
        slices: number of slices, at least 2.
        slice_id: the number of this one.
        coordinator: where the processes of all slices meet, ``host:port``; on the first host of slice 0.
    """

    slices: int
    slice_id: int
    coordinator: str

    @classmethod
    def read(cls, values: Mapping[str, str], source: str = "") -> Megascale | None:
        """Read the place of a slice; None for a job on one.

        Args:
            values: the environment, or the description of a slice.
            source: where the values are from, for the error; empty for the environment.

        Raises:
            UsageError: a value is missing or invalid.
        """
        if not any(
            values.get(name) for name in (env.MEGASCALE_NUM_SLICES, env.MEGASCALE_COORDINATOR_ADDRESS)
        ):
            return None
        slices = _number(values, env.MEGASCALE_NUM_SLICES, source, range(1, 1 << 16))
        if slices == 1:
            return None
        slice_id = _number(values, env.MEGASCALE_SLICE_ID, source, range(slices))
        address = values.get(env.MEGASCALE_COORDINATOR_ADDRESS, "").strip()
        host, colon, port = address.rpartition(":")
        if not colon:
            host, port = address, str(DEFAULT_PORT)
        if not host or not (port.isascii() and port.isdecimal()):
            raise UsageError(
                f"the {slices} slices of the job have no place to meet",
                where=f"{env.MEGASCALE_COORDINATOR_ADDRESS}={address}{source}",
                fix=f"Write the first host of slice 0 and a port of it, such as host:{DEFAULT_PORT}.",
            )
        return cls(slices, slice_id, f"{host}:{port}")

    @property
    def first_host(self) -> str:
        """The name of the first host of slice 0."""
        return self.coordinator.rpartition(":")[0]

    def variables(self) -> dict[str, str]:
        """Return the variables that describe the slice to libtpu."""
        return {
            env.MEGASCALE_NUM_SLICES: str(self.slices),
            env.MEGASCALE_SLICE_ID: str(self.slice_id),
            env.MEGASCALE_COORDINATOR_ADDRESS: self.coordinator,
        }

    def ports(self, local_process: int) -> dict[str, str]:
        """Return the ports of one of a host's processes for other slices; the first has the coordinator's.

        Source: what torch_tpu 0.2.0 sets in its processes (seen by printing C's environment).
        """
        own = int(self.coordinator.rpartition(":")[2]) + 2 * local_process
        return {env.MEGASCALE_PORT: str(own), env.MEGASCALE_DEBUG_PORT: str(own + 1)}


def _number(values: Mapping[str, str], name: str, source: str, allowed: range) -> int:
    text = values.get(name, "").strip()
    # The length is checked first: Python refuses to convert a number of thousands of digits.
    if text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) in allowed:
        return int(text)
    raise UsageError(
        f"{text!r} is not a number from {allowed[0]} to {allowed[-1]}, in a job that has several slices",
        where=f"{name}={text}{source}",
        fix=f"Set {env.MEGASCALE_NUM_SLICES}, {env.MEGASCALE_SLICE_ID} and "
        f"{env.MEGASCALE_COORDINATOR_ADDRESS}, or none of them for a job on one slice.",
    )
