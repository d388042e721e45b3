"""Launch without ``if __name__ == "__main__":``, which must be refused."""

import torch_xla


def train(index: int) -> None:
    print("never")


torch_xla.launch(train)
