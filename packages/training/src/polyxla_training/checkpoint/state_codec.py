"""A state as a file stores it: its pytree as JSON, and its tensors. All types are preserved.

Numbers, text, None and lists are those of JSON. Every other value is an object with its ``type``. NumPy's
numbers become Python's, so that reading a checkpoint does not need NumPy.
"""

from __future__ import annotations

import base64
import json
import math
import numbers
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.tensors import (
    StoredTensor,
    TensorNode,
    checkpoint_group,
    is_divided,
    map_shard,
    stored,
    stored_tensors,
)

MAX_DEPTH = 100
"""Maximum depth of nested containers: one that contains itself has no end."""
_JSON_INTEGERS = range(-(2**63), 2**64)
"""The numbers that every JSON reader takes for integers."""
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass
class EncodedState:
    """A state to be written.

    Attributes:
        tree: the pytree as JSON.
        tensors: those with the largest items first, so that each is aligned to its item size in the file.
    """

    tree: str
    tensors: list[StoredTensor]

    @property
    def is_divided(self) -> bool:
        """Whether tensors are divided among replicas, each of which has encoded its shards."""
        return any(is_divided(stored.tensor) for stored in self.tensors)


def encode_state(state: Any) -> EncodedState:
    """Encode a state; its tensors stay where they are. A collective, if tensors are divided among replicas.

    Raises:
        CheckpointError: it has a value of an unsupported type.
    """
    encoder = Encoder()
    tree = encoder.encode(state)
    # Largest items first: the format has no padding between tensors, so this keeps each of them aligned.
    tensors = sorted(stored_tensors(encoder.tensors), key=lambda stored: -stored.tensor.itemsize)
    encoded = EncodedState(json.dumps(tree, separators=(",", ":")), tensors)
    if encoded.is_divided:
        # Made here, because a background thread may not make a process group: making one is a collective of
        # the threads that train.
        checkpoint_group()
    return encoded


def decode_state(tree: str, tensor: Callable[[str, torch.dtype], torch.Tensor]) -> Any:
    """Return the state that `encode_state` encoded; arguments as for `decode`."""
    return decode(json.loads(tree), tensor)


def snapshot(state: Any) -> EncodedState:
    """Encode a state with copies of its tensors in host memory, so that the state may change afterwards.

    Blocks until every tensor is computed and copied, one after another.

    Raises:
        CheckpointError: it has a value of an unsupported type.
    """
    encoded = encode_state(state)
    for stored_tensor in encoded.tensors:
        stored_tensor.tensor = _copied(stored_tensor.tensor)
    return encoded


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if is_divided(tensor):
        return map_shard(_copied, tensor)
    copied = on_host(tensor)
    # `on_host` returns a contiguous host tensor itself, and training would go on to change it.
    is_same = tensor.device.type == "cpu" and copied.data_ptr() == tensor.data_ptr()
    return copied.clone() if is_same else copied


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a contiguous one in host memory: itself if it is one, otherwise a copy."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


class Encoder:
    """Encodes one pytree.

    Attributes:
        tensors: its tensors, in order. Their nodes still lack the name in the file.
    """

    def __init__(self) -> None:
        self.tensors: list[TensorNode] = []

    def encode(self, value: Any, where: str = "state", name: str = "", depth: int = 0) -> Any:
        """Return a value that `json` can write.

        Args:
            value: the pytree.
            where: the expression that reaches it, for errors.
            name: the same with dots, for the names of tensors.
            depth: number of containers that it is in.

        Raises:
            CheckpointError: it has a value of an unsupported type.
        """
        if depth > MAX_DEPTH:
            raise _error(f"{where[:60]}... is nested more than {MAX_DEPTH} deep, or contains itself")
        # Exact types from here on: a subclass could not be restored, and saving it as its base would lose it
        # silently.
        value = _plain(value)
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _TENSORS or is_divided(value):
            return self._tensor(value, where, name)
        if kind in _DICTS:
            return self._dict(value, where, name, depth + 1)
        if kind is list or kind in _SEQUENCES:
            items = [
                self.encode(item, f"{where}[{index}]", _dotted(name, index), depth + 1)
                for index, item in enumerate(value)
            ]
            return items if kind is list else {"type": _SEQUENCES[kind], "items": items}
        raise _error(f"{where} is {_article(kind)}")

    def _dict(self, value: dict[Any, Any], where: str, name: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int, bool):
                raise _error(f"{where} has a key that is {_article(type(key))}: {key!r:.60}")
        items = [
            [_scalar(key), self.encode(item, f"{where}[{key!r}]", _dotted(name, key), depth)]
            for key, item in value.items()
        ]
        node = {"type": _DICTS[type(value)], "items": items}
        # torch.nn.Module.state_dict() attaches the versions of its modules; load_state_dict() reads them to
        # convert old states.
        versions = getattr(value, "_metadata", None)
        if versions is not None:
            node["_metadata"] = self.encode(versions, f"{where}._metadata", _dotted(name, "_metadata"), depth)
        return node

    def _tensor(self, tensor: torch.Tensor, where: str, name: str) -> dict[str, Any]:
        odd = [kind for kind in ("sparse", "quantized", "nested", "meta") if _is(tensor, kind)]
        if odd or stored(tensor.dtype, ()) is None:
            what = f"a {odd[0]} tensor" if odd else f"a tensor of {tensor.dtype}"
            raise _error(f"{where} is {what}")
        node = {"type": "tensor", "dtype": dtype_name(tensor.dtype)}
        self.tensors.append(TensorNode(node, name or "tensor", tensor))
        return node


def decode(node: Any, tensor: Callable[[str, torch.dtype], torch.Tensor]) -> Any:
    """Return the value that `Encoder.encode` encoded.

    Args:
        node: as `json` read it.
        tensor: returns the file's tensor of this name, in this dtype.

    Raises:
        Exception: of any type, if polyxla did not write the node.
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node["type"]
    if kind == "tensor":
        found = tensor(node["name"], read_dtype(node["dtype"]))
        return _view(found, *node["view"]) if "view" in node else found
    if kind in _READ:
        return _READ[kind](node["value"])
    if kind in _DICTS.values():
        return _read_dict(node, tensor)
    make = {name: sequence for sequence, name in _SEQUENCES.items()}[kind]
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
        # It has unpaired surrogates, and JSON readers join two of them that meet.
        return {"type": "text", "value": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _integer(value: int) -> Any:
    # In hexadecimal, because Python limits the number of digits that it converts in decimal.
    return value if value in _JSON_INTEGERS else {"type": "int", "value": hex(value)}


def _float(value: float) -> Any:
    # JSON has no infinity, and would lose the bits of a NaN.
    return value if math.isfinite(value) else {"type": "float", "value": struct.pack(">d", value).hex()}


def dtype_name(value: torch.dtype) -> str:
    """Return a dtype's name, such as ``bfloat16``."""
    return str(value).removeprefix("torch.")


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        AttributeError: torch has nothing of this name.
        TypeError: it is not a dtype.
    """
    # The name comes from a file: only dtypes may be looked up by it.
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _text,
    int: _integer,
    float: _float,
    bytes: lambda value: {"type": "bytes", "value": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"type": "dtype", "value": dtype_name(value)},
    torch.device: lambda value: {"type": "device", "value": str(value)},
}
_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": read_dtype,
    "device": torch.device,
}


def _plain(value: Any) -> Any:
    """Convert a number of NumPy's, such as a computed learning rate, to one of Python's."""
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


def _error(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where="save",
        fix="A checkpoint holds tensors, numbers, text, bytes, None, torch's dtypes, devices and sizes, in "
        "lists, tuples and dicts with text or integers as keys: convert the value, or leave it out.",
    )
