"""The one exception that becomes a ``PJRT_Error``."""

from __future__ import annotations

from polyxla_bridge.table.abi import Code


class PjrtError(Exception):
    """An error with a status code; its text reaches the person through torch_xla.

    Args:
        code: one of `polyxla_bridge.table.abi.Code`.
        message: what went wrong.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


def as_pjrt_error(error: BaseException) -> PjrtError:
    """Return any exception as one that has a code, its own text kept."""
    if isinstance(error, PjrtError):
        return error
    text = str(error)
    # XLA's own errors begin with their status: "RESOURCE_EXHAUSTED: Out of memory ...".
    name = text.partition(":")[0]
    code = getattr(Code, name, None) if name.isupper() else None
    if code is not None:
        return PjrtError(code, text.partition(":")[2].strip())
    return PjrtError(Code.INTERNAL, f"{type(error).__name__}: {text}")
