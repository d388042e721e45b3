"""Count the replicas, then use a device in several ways without a launch: each must end the program."""

from collections.abc import Callable

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

WAYS: list[Callable[[], object]] = [
    lambda: torch_xla.device(0),
    lambda: xm.get_xla_supported_devices(1),
    lambda: print(torch_xla.device()),
    lambda: print(xr.addressable_device_count()),
    lambda: print(xr.global_ordinal()),
    lambda: torch_xla.sync(wait=True),
]

print("COUNT", xr.world_size(), xr.global_device_count())
for use in WAYS:
    try:
        use()
    except SystemExit as end:
        print("LINE", use.__code__.co_firstlineno, "CODE", end.code)
# Not caught.
print(torch.zeros(2, device="xla"))
