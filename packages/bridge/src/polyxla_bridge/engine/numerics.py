"""Options by which XLA's CPU compiler computes the numbers that torch computes.

XLA's defaults, which torch_xla's own client has, lose NaN in ``max`` and ``min``. TorchTPU sends all options
with each program, and with them such defaults of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

OPTIONS: Mapping[str, bool] = {
    "xla_cpu_enable_fast_math": False,
    "xla_cpu_enable_fast_min_max": False,
    "xla_enable_fast_math": False,
}
"""Options that replace XLA's defaults and those of the framework, by name. An option that the user sets in
``XLA_FLAGS`` is left out.
Source: DebugOptions in xla/xla.proto.
"""
