"""Prints what torch_xla answers to questions about the TPU host that it runs on."""

import json

import torch_xla.runtime as xr
from torch_xla._internal import tpu

QUESTIONS = {
    tpu: (
        "num_available_chips",
        "num_available_devices",
        "num_expected_global_devices",
        "num_tpu_workers",
        "get_worker_ips",
        "worker_id",
        "version",
        "get_tpu_type",
    ),
    xr: ("host_index", "device_type"),
}

if __name__ == "__main__":
    print(json.dumps({name: getattr(asked, name)() for asked, names in QUESTIONS.items() for name in names}))
