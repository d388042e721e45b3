"""A program whose processes take a while to end, and fail: Python goes backwards, so TorchTPU ends first."""

from __future__ import annotations

import atexit
import sys
import time

atexit.register(time.sleep, 4)

import torch  # noqa: E402

print(torch.ones(1, device="tpu").item(), flush=True)
sys.exit(3)
