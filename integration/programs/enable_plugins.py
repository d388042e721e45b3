"""Enables torch_xla's plugins when it is imported, which torch_xla allows before a device is opened only."""

import torch_xla
import torch_xla.runtime as xr
from torch_xla.experimental import plugins

plugins.use_dynamic_plugins()


def train(index: int) -> None:
    print(f"ORDINAL {xr.global_ordinal()}\n", end="")


if __name__ == "__main__":
    torch_xla.launch(train)
