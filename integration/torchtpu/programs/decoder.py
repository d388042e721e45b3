"""A small decoder as in Llama, trained on made-up tokens: one device, DDP, FSDP2 or tensor parallelism.

Run it by python or torchrun: decoder.py STRATEGY [DEVICE]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

STRATEGY = sys.argv[1] if len(sys.argv) > 1 else "none"
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "tpu"
WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 96, 64, 4, 32, 16, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        def heads(y):
            return y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        def rotate(y):
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        q, k, v = rotate(heads(self.q(x))), rotate(heads(self.k(x))), heads(self.v(x))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        size = WIDTH // HEADS
        position = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        angle = position / 10000 ** (torch.arange(0, size, 2, device=tokens.device) / size)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def shard(model):
    """Return the model under the strategy, and whether each process trains on a part of the batch."""
    if STRATEGY == "ddp":
        return nn.parallel.DistributedDataParallel(model), True
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    if STRATEGY.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), True
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
    plan |= {"feed.gate": columns, "feed.up": columns, "feed.down": rows}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model, False


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("tpu_dist" if DEVICE == "tpu" else "gloo")
    torch.manual_seed(0)
    # `fully_shard` itself moves what it divides.
    model = Decoder() if STRATEGY == "fsdp-from-host" else Decoder().to(DEVICE)
    divides = False
    if STRATEGY in ("ddp", "fsdp", "fsdp-from-host", "tp"):
        model, divides = shard(model)
    step_model = torch.compile(model) if STRATEGY == "compile" else model
    # Beside sharded parameters there are others.
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, foreach=False if STRATEGY == "tp" else None)
    random = torch.Generator().manual_seed(1)
    start = torch.randint(0, WORDS, (BATCH, 1), generator=random)
    tokens = (start + 7 * torch.arange(LENGTH + 1)) % WORDS
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world) if divides else slice(None)
    for _ in range(STEPS):
        batch = tokens[mine].to(DEVICE)
        logits = step_model(batch[:, :-1].contiguous())
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if divides:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0:
            print("loss", mean.item(), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
