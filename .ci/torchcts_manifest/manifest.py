"""What TorchTPU declares to TorchCTS, for `suites.py`: TorchCTS reads it in its working directory."""

from __future__ import annotations

import torch  # noqa: TID253  (its keys are dtypes)

DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "bool"),
    *("complex64", "complex128"),
)
CAPABILITIES = (
    *("inference", "training", "serialization", "dataloader", "module_hooks"),
    *("rng", "device_generator", "rng_distributions"),
    *("double_backward", "gradcheck", "gradient_checkpointing", "autocast", "fused_optimizer", "foreach"),
    *("compile", "channels_last", "device_api", "streams", "events", "deterministic"),
)
NOT_DECLARED = (
    *("sparse", "nested", "named_tensor", "fp8", "ieee754", "pinned_memory", "guard_alloc", "multi_device"),
    *("quantized_container_plumbing", "native_quantization", "custom_quantized_decode"),
)
manifest = {
    "manifest_version": 1,
    "device_name": "tpu",
    "supported_dtypes": {getattr(torch, name): True for name in DTYPES},
    "device_count": 1,
    "max_samples": 3,
    "max_samples_ieee754": 1,
    "semantic_level": 8,
    "hardware": {
        "memory_model": "unified",
        "device_memory_gb": [4],
        "system_memory_gb": "auto",
        "oom_recoverable": False,
    },
    "capabilities": {name: name in CAPABILITIES for name in CAPABILITIES + NOT_DECLARED},
}
