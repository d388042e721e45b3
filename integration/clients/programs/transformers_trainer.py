"""Train a small BERT with transformers' Trainer: which of four marks stands in a line of other tokens?"""

import argparse
import copy
import json

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    is_torch_xla_available,
)

if is_torch_xla_available():
    import accelerate_mends  # noqa: F401
    import torch_xla.distributed.xla_multiprocessing as xmp
    import torch_xla.runtime as xr

    # The Trainer allows torch.load these types while it resumes, and torch keeps such permissions for all threads:
    # of two replicas that are threads (v2, v3), the first to be done would take the other's away.
    types = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    torch.serialization.add_safe_globals(types)

GLOBAL_BATCH, LENGTH, MARKS, TOKENS = 64, 12, 4, 20


class Lines(Dataset):
    def __init__(self, count, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.lines = torch.randint(MARKS, TOKENS, (count, LENGTH), generator=drawn)
        self.marks = torch.randint(0, MARKS, (count,), generator=drawn)
        places = torch.randint(1, LENGTH, (count,), generator=drawn)
        self.lines[torch.arange(count), places] = self.marks

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"input_ids": self.lines[index], "labels": self.marks[index]}


class FirstStep(TrainerCallback):
    def on_train_begin(self, args, state, control, **more):
        self.step = state.global_step


def train(model, args):
    replicas = xr.world_size() if is_torch_xla_available() else 1
    arguments = TrainingArguments(
        output_dir=args.dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=GLOBAL_BATCH // replicas,
        per_device_eval_batch_size=GLOBAL_BATCH // replicas,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        gradient_checkpointing=True,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        # Several replicas multiply the loss of a classifier by their number:
        # https://github.com/huggingface/transformers/issues/47688
        average_tokens_across_devices=False,
    )
    first = FirstStep()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Lines(1024, seed=1),
        eval_dataset=Lines(384, seed=2),
        compute_metrics=lambda found: {
            "accuracy": (found.predictions.argmax(axis=1) == found.label_ids).mean().item()
        },
        callbacks=[first],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {
            "world_size": arguments.world_size,
            "device": arguments.device.type,
            "first_step": first.step,
            "steps": trainer.state.global_step,
            "accuracy": metrics["eval_accuracy"],
            "weight": trainer.model.classifier.weight.norm().item(),
        }
        print("RESULT", json.dumps(result), flush=True)


def _mp_fn(index, model, args):
    # Replicas may be threads of one process, with the same arguments.
    train(copy.deepcopy(model), args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=MARKS,
        )
    )
    if is_torch_xla_available():
        xmp.spawn(_mp_fn, args=(model, args))
    else:
        train(model, args)
