"""The multi-device MNIST loop with torch_xla.launch and MpDeviceLoader: a plain torch_xla script."""

import sys

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.utils.utils as xu
from torch import nn, optim
from torch_xla import runtime as xr

BATCH_SIZE = 128
SAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 60000


class MNIST(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 10, kernel_size=5), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, kernel_size=5), nn.BatchNorm2d(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images):
        hidden = self.bn1(F.relu(F.max_pool2d(self.conv1(images), 2)))
        hidden = self.bn2(F.relu(F.max_pool2d(self.conv2(hidden), 2)))
        hidden = F.relu(self.fc1(torch.flatten(hidden, 1)))
        return F.log_softmax(self.fc2(hidden), dim=1)


train_loader = xu.SampleGenerator(
    data=(torch.zeros(BATCH_SIZE, 1, 28, 28), torch.zeros(BATCH_SIZE, dtype=torch.int64)),
    sample_count=SAMPLES // BATCH_SIZE // xr.world_size(),
)


def _mp_fn(index):
    device = torch_xla.device()
    mp_device_loader = pl.MpDeviceLoader(train_loader, device)
    model = MNIST().train().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    losses = []
    for data, target in mp_device_loader:
        optimizer.zero_grad()
        loss = loss_fn(model(data), target)
        loss.backward()
        xm.optimizer_step(optimizer)
        losses.append(loss.detach())
    first, last = losses[0].item(), losses[-1].item()
    # One string: replicas may be threads, and print writes its arguments one by one.
    print(f"ordinal {index} steps {len(losses)} first {first} last {last}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(_mp_fn, args=())
