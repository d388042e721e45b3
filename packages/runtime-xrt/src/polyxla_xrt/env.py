"""The XRT variables that choose this runtime."""

from __future__ import annotations

XRT_TPU_CONFIG = "XRT_TPU_CONFIG"
"""The TPU workers: ``name;task;host:port``, several joined by ``|``.
Default: unset, which asks for no TPU node.
"""

XRT_DEVICE_MAP = "XRT_DEVICE_MAP"
"""An explicit table of devices; complete only together with `XRT_WORKERS`."""

XRT_WORKERS = "XRT_WORKERS"
"""The addresses of the workers that `XRT_DEVICE_MAP` names."""

ALL = (XRT_TPU_CONFIG, XRT_DEVICE_MAP, XRT_WORKERS)
