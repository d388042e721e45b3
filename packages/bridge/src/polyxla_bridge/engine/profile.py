"""Profiles of what jaxlib runs. Importing this module imports jaxlib."""

from __future__ import annotations

from typing import Any

from jaxlib import _profiler  # type: ignore[attr-defined]

from polyxla_bridge.programs.xspace_pb2 import XSpace

OPERATIONS = "/device:CUSTOM:polyxla"
"""Name of the plane with the operations of all local devices.
Source: of the prefixes in tsl/profiler/utils/xplane_schema.cc, the one for devices that XLA does not know."""
_NAMES = {"/host:CPU": OPERATIONS, "/host:metadata": "/host:metadata"}
"""The planes to keep, and their new names: the framework has a plane of its own for the host."""


class Profile:
    """A profile of this process, which begins when it is made. Another profile of jaxlib makes it empty."""

    def __init__(self) -> None:
        options = _profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._session: Any = _profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """Stop, and return the operations and the programs as a serialised XSpace."""
        space = XSpace()
        space.ParseFromString(self._session.stop())
        kept = [plane for plane in space.planes if plane.name in _NAMES]
        for plane in kept:
            plane.name = _NAMES[plane.name]
        return XSpace(planes=kept).SerializeToString()
