"""A nest of Python values as JSON, with its tensors beside it; every type comes back as it was.

Numbers, text, None and lists are what JSON has for them. Everything else is an object with its ``type``.
NumPy's numbers become Python's: who reads a checkpoint need not have NumPy.
"""

from __future__ import annotations

import base64
import math
import numbers
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.safetensors_dtypes import stored
from polyxla_training.checkpoint.tensor_aliasing import Found

MAX_DEPTH = 100
"""Of nests in nests; a nest that contains itself is one without end."""
_JSON_INTEGERS = range(-(2**63), 2**64)
"""What every JSON reader takes for a whole number."""
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Encoder:
    """Encodes one nest.

    Attributes:
        found: its tensors, in order. Their nodes in the encoded nest lack their place in the file.
    """

    def __init__(self) -> None:
        self.found: list[Found] = []

    def encode(self, value: Any, where: str = "state", name: str = "", depth: int = 0) -> Any:
        """Return what `json` can write for a value.

        Args:
            value: the nest.
            where: how a program would reach it, for errors.
            name: the same with dots, for the names of tensors.
            depth: how many nests it is in.

        Raises:
            CheckpointError: something in it is of a type that is not kept.
        """
        if depth > MAX_DEPTH:
            raise _refused(f"{where[:60]}... is nested more than {MAX_DEPTH} deep, or contains itself")
        value = _plain(value)
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _TENSORS:
            return self._tensor(value, where, name)
        if kind in _DICTS:
            return self._dict(value, where, name, depth + 1)
        if kind is list or kind in _SEQUENCES:
            items = [
                self.encode(item, f"{where}[{index}]", _dotted(name, index), depth + 1)
                for index, item in enumerate(value)
            ]
            return items if kind is list else {"type": _SEQUENCES[kind], "items": items}
        raise _refused(f"{where} is {_article(kind)}")

    def _dict(self, value: dict[Any, Any], where: str, name: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int, bool):
                raise _refused(f"{where} has a key that is {_article(type(key))}: {key!r:.60}")
        items = [
            [_scalar(key), self.encode(item, f"{where}[{key!r}]", _dotted(name, key), depth)]
            for key, item in value.items()
        ]
        node = {"type": _DICTS[type(value)], "items": items}
        # The versions that torch.nn.Module.state_dict() notes, and load_state_dict() asks for.
        versions = getattr(value, "_metadata", None)
        if versions is not None:
            node["_metadata"] = self.encode(versions, f"{where}._metadata", _dotted(name, "_metadata"), depth)
        return node

    def _tensor(self, tensor: torch.Tensor, where: str, name: str) -> dict[str, Any]:
        odd = [kind for kind in ("sparse", "quantized", "nested", "meta") if _is(tensor, kind)]
        if odd or stored(tensor.dtype, ()) is None:
            what = f"a {odd[0]} tensor" if odd else f"a tensor of {tensor.dtype}"
            raise _refused(f"{where} is {what}")
        node = {"type": "tensor", "dtype": _word(tensor.dtype)}
        self.found.append(Found(node, name or "tensor", tensor))
        return node


def decode(node: Any, tensor: Callable[[str, torch.dtype], torch.Tensor]) -> Any:
    """Return the value that `Encoder.encode` made this of.

    Args:
        node: what `json` read.
        tensor: returns the tensor of the file that has this name, in this dtype.

    Raises:
        Exception: any that Python raises for a node that polyxla did not write.
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node["type"]
    if kind == "tensor":
        found = tensor(node["name"], _read_dtype(node["dtype"]))
        return _view(found, *node["view"]) if "view" in node else found
    if kind in _READ:
        return _READ[kind](node["value"])
    if kind in _DICTS.values():
        return _read_dict(node, tensor)
    make = {name: one for one, name in _SEQUENCES.items()}[kind]
    return make([decode(item, tensor) for item in node["items"]])


def _view(tensor: torch.Tensor, shape: list[int], stride: list[int], offset: int) -> torch.Tensor:
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)


def _read_dict(node: dict[str, Any], tensor: Callable[[str, torch.dtype], torch.Tensor]) -> Any:
    made = {name: kind for kind, name in _DICTS.items()}[node["type"]]()
    for key, item in node["items"]:
        made[decode(key, tensor)] = decode(item, tensor)
    if "_metadata" in node:
        made._metadata = decode(node["_metadata"], tensor)
    return made


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        # Lone halves of characters: JSON would join two that meet.
        return {"type": "text", "value": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _integer(value: int) -> Any:
    # In hexadecimal, because Python limits the digits of decimal ones.
    return value if value in _JSON_INTEGERS else {"type": "int", "value": hex(value)}


def _float(value: float) -> Any:
    # JSON has no infinity, and a NaN has bits of its own.
    return value if math.isfinite(value) else {"type": "float", "value": struct.pack(">d", value).hex()}


def _word(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _read_dtype(word: str) -> torch.dtype:
    found = getattr(torch, word)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{word} is no dtype")
    return found


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _text,
    int: _integer,
    float: _float,
    bytes: lambda value: {"type": "bytes", "value": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"type": "dtype", "value": _word(value)},
    torch.device: lambda value: {"type": "device", "value": str(value)},
}
_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": _read_dtype,
    "device": torch.device,
}


def _plain(value: Any) -> Any:
    """Return Python's number for one of NumPy's, such as a learning rate that was computed with it."""
    is_numpys = type(value).__module__ == "numpy" and isinstance(value, numbers.Real)
    return value.item() if is_numpys else value


def _scalar(value: Any) -> Any:
    return _SCALARS[type(value)](value)


def _is(tensor: torch.Tensor, kind: str) -> bool:
    if kind == "sparse":
        return tensor.layout is not torch.strided
    return bool(getattr(tensor, f"is_{kind}"))


def _dotted(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _article(kind: type) -> str:
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where="save",
        fix="A checkpoint keeps tensors, numbers, text, bytes, None, torch's dtypes, devices and sizes, in "
        "lists, tuples and dicts with text or whole numbers as keys: convert it, or leave it out.",
    )
