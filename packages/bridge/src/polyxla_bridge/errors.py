"""The exception that becomes a ``PJRT_Error``."""

from __future__ import annotations

from polyxla_bridge.abi import Code


class PjrtError(Exception):
    """An error with a status code; torch_xla shows its text to the user.

    Args:
        code: one of `polyxla_bridge.abi.Code`.
        message: what went wrong.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


first_failures: list[str] = []
"""Why the first program of this process failed; empty if none has. TorchTPU does not always report it: for a
program that needs the results, it only reports that an argument "is in a failed state".
"""


def keep_first(error: BaseException) -> None:
    """Store an error in `first_failures`, unless there is one."""
    if not first_failures:
        first_failures.append(as_pjrt_error(error).message)


def as_pjrt_error(error: BaseException) -> PjrtError:
    """Convert any exception to one with a status code; its text is preserved."""
    if isinstance(error, PjrtError):
        return error
    text = str(error)
    # jaxlib raises one type of exception for every status, which begins the text:
    # "RESOURCE_EXHAUSTED: Out of memory ...".
    name = text.partition(":")[0]
    code = getattr(Code, name, None) if name.isupper() else None
    if code is not None:
        return PjrtError(code, text.partition(":")[2].strip())
    return PjrtError(Code.INTERNAL, f"{type(error).__name__}: {text}")
