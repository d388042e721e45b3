"""Touch the device before the launch, which must be refused."""

import torch
import torch_xla

weights = torch.zeros(2).to("xla")


def train(index: int) -> None:
    print("never")


if __name__ == "__main__":
    torch_xla.launch(train)
