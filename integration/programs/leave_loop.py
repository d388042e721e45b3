"""A loop over torch_xla's loader that is left after one batch, while the loader copies the next ones."""

import itertools

import torch
import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

# 16 MiB each, so that the program ends while one is copied.
batches = (torch.full((1 << 22,), float(number)) for number in itertools.count())
for batch in MpDeviceLoader(batches, torch_xla.device()):
    print(batch.shape[0])
    break
