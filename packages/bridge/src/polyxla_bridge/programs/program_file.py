"""A compiled program as bytes: what jaxlib's own form leaves out, then that form.

``magic, length of the header, header (JSON), optimised HLO, jaxlib's bytes, SHA-256 of all before``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from polyxla_bridge.engine.engine import ArrayType, Executable
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.abi import Code

VERSION = 1
"""Of this layout; what another one wrote is refused."""
_MAGIC = b"polyxla program\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Packed:
    """What `unpack` finds.

    Attributes:
        executable: without the engine's own objects.
        native: jaxlib's bytes.
    """

    executable: Executable
    native: bytes


def pack(executable: Executable, native: bytes) -> bytes:
    """Return a program as bytes that this version of the engine takes back."""
    header = {
        "version": VERSION,
        "jaxlib": version("jaxlib"),
        "name": executable.name,
        "outputs": [(one.dtype, one.dims) for one in executable.outputs],
        "num_replicas": executable.num_replicas,
        "code_size_bytes": executable.code_size_bytes,
        "fingerprint": executable.fingerprint,
        "optimized_hlo_bytes": len(executable.optimized_hlo),
    }
    text = json.dumps(header).encode()
    whole = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, executable.optimized_hlo, native))
    return whole + hashlib.sha256(whole).digest()


def unpack(data: bytes, num_replicas: int) -> Packed:
    """Return what `pack` was given.

    Raises:
        PjrtError: these bytes are not such a program, are damaged, or are not for this version or this job.
    """
    if not data.startswith(_MAGIC):
        raise _refused("they are not a program that polyxla-bridge wrote")
    whole = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(whole).digest() != data[-_DIGEST_BYTES:]:
        raise _refused(f"they are damaged: the checksum of {len(data)} bytes is wrong")
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(whole[len(_MAGIC) : start])
    header = json.loads(bytes(whole[start : start + length]))
    _check(header, num_replicas)
    middle = start + length + header["optimized_hlo_bytes"]
    executable = Executable(
        name=header["name"],
        outputs=tuple(ArrayType(dtype, tuple(dims)) for dtype, dims in header["outputs"]),
        num_replicas=header["num_replicas"],
        optimized_hlo=bytes(whole[start + length : middle]),
        code_size_bytes=header["code_size_bytes"],
        fingerprint=header["fingerprint"],
    )
    return Packed(executable, bytes(whole[middle:]))


def _check(header: dict[str, Any], num_replicas: int) -> None:
    name = header.get("name", "unnamed")
    expected = {"version": VERSION, "jaxlib": version("jaxlib"), "num_replicas": num_replicas}
    for key, value in expected.items():
        if header[key] != value:
            raise _refused(f"{name} was made with {key} {header[key]}, and this is {key} {value}")


def _refused(reason: str) -> PjrtError:
    return PjrtError(Code.INVALID_ARGUMENT, f"these bytes are no program to load: {reason}")
