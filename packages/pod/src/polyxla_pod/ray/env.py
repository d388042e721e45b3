"""The environment variables of this package; each constant is spelt as its variable."""

from __future__ import annotations

RAY_ADDRESS = "RAY_ADDRESS"
"""The Ray cluster to use, as for ``ray.init``: ``host:6379``, or ``ray://host:10001``.
Default: the cluster of this machine.
"""

POLYXLA_RAY_CALL = "POLYXLA_RAY_CALL"
"""Set on each host of `polyxla.launch` with ``pod="ray"``: the file that holds the pickled call."""

POLYXLA_RAY_OUTCOME = "POLYXLA_RAY_OUTCOME"
"""Set on each host of `polyxla.launch` with ``pod="ray"``: the file for the results or the error."""
