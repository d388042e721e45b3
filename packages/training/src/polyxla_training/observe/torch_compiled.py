"""Whether torch.compile is at work in this process."""

from __future__ import annotations

import sys


def is_torch_compiled() -> bool:
    """Tell whether torch.compile has taken over a function here."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    # With fullgraph=True, frames are not counted.
    counters = dynamo.counters
    return bool(counters["frames"]["total"] or counters["stats"]["unique_graphs"])
