"""Print the variables that torch_xla sets for each process; standard input describes the hosts."""

from __future__ import annotations

import json
import os
import sys

from torch_xla._internal import tpu

NAMES = (
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "CLOUD_TPU_TASK_ID",
    "TPU_VISIBLE_CHIPS",
)


def variables(described: dict[str, str], rank: int, count: int) -> dict[str, str]:
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(described)
    tpu.configure_topology(rank, count)
    return {name: os.environ[name] for name in NAMES}


hosts = json.load(sys.stdin)
print(
    json.dumps([[variables(described, rank, count) for rank in range(count)] for described, count in hosts])
)
