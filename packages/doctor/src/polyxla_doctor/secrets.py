"""Keeping secrets out of what is printed: an issue is public."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY(?!S?_?FILE)", re.IGNORECASE)
_PATH = re.compile(r"[~./]*/")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST = 6
"""Shorter values are parts of other words."""
HIDDEN = "(hidden)"
"""What stands in the place of a secret."""


def shown(name: str, value: str) -> str:
    """Return a variable's value, or `HIDDEN` for that of a secret; the path of a file with one is shown."""
    if _NAME.search(name) and value and not _PATH.match(value):
        return HIDDEN
    return _LOGIN.sub(f"{HIDDEN}@", value)


def scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without the environment's secrets, logins in addresses, and the home directory.

    Args:
        text: any text.
        environ: the environment.
    """
    secrets = [value for name, value in environ.items() if shown(name, value) == HIDDEN]
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    home = environ.get("HOME", "").rstrip("/")
    return _LOGIN.sub(f"{HIDDEN}@", re.sub(rf"{re.escape(home)}(?=/)", "~", text) if home else text)
