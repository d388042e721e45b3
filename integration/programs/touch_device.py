"""Touch the device before the launch, which must be refused."""

import torch_xla

device = torch_xla.device()


def train(index: int) -> None:
    print("never")


if __name__ == "__main__":
    torch_xla.launch(train)
