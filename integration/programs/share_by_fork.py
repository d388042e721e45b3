"""Fork replicas that share a model, as in torch_xla's documentation, and move it one after the other."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp

WRAPPED = xmp.MpModelWrapper(torch.nn.Linear(2, 1, bias=False))
SERIAL = xmp.MpSerialExecutor()


def train(index: int) -> None:
    weight = SERIAL.run(lambda: WRAPPED.to(torch_xla.device())).weight.sum()
    gathered = xm.all_gather(weight[None])
    torch_xla.sync()
    print(f"SAME {bool((gathered == gathered[0]).all())}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(train, start_method="fork")
