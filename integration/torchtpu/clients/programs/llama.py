"""A small Llama of transformers, trained on made-up tokens: one device, DDP, or transformers' tensor parallelism.

Run it by python or torchrun: llama.py STRATEGY [DEVICE]

transformers' Trainer is in trainer.py.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

STRATEGY = sys.argv[1] if len(sys.argv) > 1 else "none"
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "tpu"
WORDS, LENGTH, BATCH, STEPS = 96, 32, 16, 20


def new_model():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def place(model):
    """Return the model on the device, under the strategy, and whether each process trains on a part of the batch."""
    if STRATEGY == "tp":
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            # This makes the process group, too.
            return AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto", dtype=torch.float32), False
    if STRATEGY == "ddp":
        dist.init_process_group("tpu_dist")
        return nn.parallel.DistributedDataParallel(model.to(DEVICE)), True
    return model.to(DEVICE), False


def main():
    model, divides = place(new_model())
    model.train()
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    # Beside sharded parameters there are others.
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, foreach=False if STRATEGY == "tp" else None)
    start = torch.randint(0, WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + 7 * torch.arange(LENGTH)) % WORDS
    batch = (tokens.chunk(world)[rank] if divides else tokens).to(DEVICE)
    for _ in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if divides:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0:
            print("loss", mean.item(), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
