"""A plain loop over torch_xla's loader, whose data fail at the fourth batch, at the first, or never.

Prints how many batches the loop got, and what ended it.
"""

from collections.abc import Iterator

import torch
import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader


class Data:
    def __init__(self, end: int, opens: bool = True) -> None:
        self.end, self.opens = end, opens

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.opens:
            raise OSError("cannot be opened")
        return self.batches()

    def batches(self) -> Iterator[torch.Tensor]:
        for number in range(8):
            if number == self.end:
                raise ValueError(f"record {number} is broken")
            yield torch.full((2,), float(number))


def count(batches: Iterator[torch.Tensor]) -> str:
    number = 0
    try:
        for batch in batches:
            assert batch[0].item() == number
            number += 1
    except Exception as error:
        return f"{number} {type(error).__name__}: {error}"
    return str(number)


device = torch_xla.device()
for data in (Data(3), Data(0), Data(8), Data(8, opens=False)):
    print(count(iter(MpDeviceLoader(data, device))))
print(count(ParallelLoader(Data(3), [device], loader_prefetch_size=1).per_device_loader(device)))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2)
print(len(ParallelLoader(loader, [device]).per_device_loader(device)))
