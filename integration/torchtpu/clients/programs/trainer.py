"""Train a small language model with transformers' Trainer: trainer.py DIR MODEL [cpu] [resume] [bf16] [dropout] [fsdp]

By torchrun or `polyxla run --each`. It trains twenty steps on made-up text and saves after ten; with `resume`, it trains
the other ten from that checkpoint. Every step's loss is printed, and that of the test data.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

DIRECTORY, MODEL = Path(sys.argv[1]), sys.argv[2]
WORDS, LENGTH, STEPS = 64, 16, 20
CONFIGS = {
    # Its head is its embedding, and it has dropout where it is asked for.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
}
OPTIONS = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}
SHARDED = OPTIONS if "fsdp" in sys.argv else {}
DROPOUT = 0.1 if "dropout" in sys.argv else 0.0


class Text(Dataset):
    """Lines in which each word follows from the one before, with blocks as a script makes of a tokenised text."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, WORDS, (count, 1), generator=generator)
        self.lines = (start * 5 ** torch.arange(LENGTH) + 3 * torch.arange(LENGTH)) % WORDS

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"input_ids": self.lines[index], "labels": self.lines[index]}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs, **more):
        for name in ("loss", "eval_loss"):
            if name in logs and state.is_world_process_zero:
                print("loss", logs[name], flush=True)


def main():
    arguments = TrainingArguments(
        output_dir=str(DIRECTORY),
        use_cpu="cpu" in sys.argv,
        bf16="bf16" in sys.argv,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=3,
        max_grad_norm=0.5,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=True,
        **SHARDED,
    )
    set_seed(0)
    config = AutoConfig.for_model(MODEL, vocab_size=WORDS, use_cache=False, **CONFIGS[MODEL])
    if MODEL == "gpt2":
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = DROPOUT
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=arguments,
        train_dataset=Text(200, seed=1),
        eval_dataset=Text(37, seed=2),
        callbacks=[Print()],
    )
    checkpoint = DIRECTORY / f"checkpoint-{STEPS // 2}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if "resume" in sys.argv else None)
    trainer.evaluate()
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters())
    assert is_sharded == bool(SHARDED)
    if trainer.is_world_process_zero():
        print("trained on", arguments.device.type, arguments.world_size, flush=True)


if __name__ == "__main__":
    main()
