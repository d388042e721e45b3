"""The names of torch's dtypes in a safetensors file, and the dtypes that are stored as others."""

from __future__ import annotations

import torch

NAMED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's names. Source: ``Dtype`` in safetensors/src/tensor.rs of safetensors 0.8."""
STORED_AS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Dtypes that the format has no name for, or one that not all readers know: the same bytes are stored under
another dtype. A complex number becomes two real ones, in an additional last dimension of 2."""
if isinstance(bcomplex32 := getattr(torch, "bcomplex32", None), torch.dtype):
    # Two bfloat16, in newer releases of torch.
    STORED_AS[bcomplex32] = torch.bfloat16
_NAMES = {dtype: name for name, dtype in NAMED.items()}


def stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the format's dtype and shape for a tensor, or None if it cannot be stored."""
    target = STORED_AS.get(dtype, dtype)
    if target not in _NAMES:
        return None
    return _NAMES[target], (*shape, 2) if dtype.is_complex else shape


def restored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the original of a tensor that `stored` gave another dtype, over the same memory.

    Raises:
        ValueError: `dtype` is not stored as the tensor's dtype.
    """
    if tensor.dtype is not STORED_AS.get(dtype, dtype):
        raise ValueError(f"{dtype} is not stored as {tensor.dtype}")
    # Not view_as_complex, which knows no pairs of bfloat16.
    return tensor.view(dtype).squeeze(-1) if dtype.is_complex else tensor.view(dtype)
