"""Saves step 1 to the URL of a directory, says so, and then step 2, in parts of 5 MiB."""

from __future__ import annotations

import sys

import torch

from polyxla_training import CheckpointFolder, storage

PART_BYTES = 5 * 2**20

if __name__ == "__main__":
    storage.PART_BYTES = PART_BYTES
    folder = CheckpointFolder(sys.argv[1], keep=1)
    folder.save(1, {"weight": torch.ones(4)})
    print("saved 1", flush=True)
    sys.stdin.readline()
    folder.save(2, {"weight": torch.ones(4 * PART_BYTES // 4)})
    print("saved 2", flush=True)
