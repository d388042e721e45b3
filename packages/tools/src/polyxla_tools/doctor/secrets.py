"""Keeping secrets out of what is printed: an issue is public.

A secret is recognised by its name, by its context, and by its look, because no list has the names of all
variables. Hiding too much costs a question; showing a secret cannot be undone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

_WORD = (
    r"TOKEN|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|APIKEY|COOKIE|SESSION|BEARER|SIGNATURE|WEBHOOK"
    r"|AUTHORI[SZ]ATION|(?<![A-Z])(?:KEYS?|AUTH|PASS|JWT|DSN|SALT|SIG|PIN)(?![A-Z])"
)
_NAME = re.compile(_WORD, re.IGNORECASE)
_HARMLESS = re.compile(r"(OLD)?PWD$|XDG_|DESKTOP_|DBUS_|SESSION_MANAGER|GDMSESSION|SSH_AUTH_SOCK")
"""Variables of a login session that have names like secrets, and harmless values."""
_OF_FILE = re.compile(r"FILE|PATH|DIR|KEY|CERT", re.IGNORECASE)
_PATH = re.compile(r"(?:~|\.{1,2})?/[^=:\s]*$")
_ARGUMENT = re.compile(
    rf"(?P<before>(?:\b|--?)[\w.-]*?(?:{_WORD})[\w.-]*[\"']?[ \t]*(?:=|:(?!/))[ \t]*[\"']?)"
    r"(?P<secret>[^\s\"'&,;()]+)"
    rf"|(?P<flag>--?[\w.-]*?(?:{_WORD})[\w.-]*[ \t]+)(?P<word>(?!-)[^\s\"',;()]+)",
    re.IGNORECASE,
)
"""``--token=x``, ``--token x``, ``?key=x``, ``password: x``."""
_SCHEME = re.compile(r"(?P<before>\b(?:[Bb]earer|BEARER|Basic)[ \t]+)(?P<secret>[\w.~+/=-]{8,})")
_LOGIN = re.compile(r"(?P<before>://)(?P<secret>[^/@\s]+)(?=@)")
_ISSUED = re.compile(
    r"(?P<secret>\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-|AKIA|ASIA|ya29\.|eyJ|AIza|npm_|pypi-)"
    r"[\w.-]{6,})"
)
"""Tokens that their issuers mark, so that scanners recognise a leaked token."""
_PRIVATE = re.compile(r"(?P<secret>-----BEGIN [^-]*PRIVATE KEY-----(?:.*?-----END [^-]*-----|.*))", re.DOTALL)
_CONTEXTS = (_PRIVATE, _SCHEME, _LOGIN, _ARGUMENT, _ISSUED)
_RUN = re.compile(r"(?<![\w./~-])[A-Za-z0-9+_=-]{20,}(?![\w./-])")
_LEAST_CHANGES = 6
"""Fewest changes between letters, capitals and digits in a random text of twenty characters."""
_SHORTEST = 6
"""Shorter values are parts of other words."""
HIDDEN = "(hidden)"
"""Replaces each secret."""


def shown(name: str, value: str) -> str:
    """Return a variable's value without the secrets in it; the path of a file with one is shown."""
    if _is_secret(name, value):
        return HIDDEN
    return _RUN.sub(lambda found: HIDDEN if _is_random(found[0]) else found[0], _hidden(value))


def scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without secrets, including the environment's, and without the home directory.

    Args:
        text: any text.
        environ: the environment.
    """
    # Start with the longest, because replacing a secret inside of another would leave the rest visible.
    for secret in sorted(_secrets(environ), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    home = environ.get("HOME", "").rstrip("/")
    # The slash protects the directory of a user whose name only begins with this user's.
    return _hidden(re.sub(rf"{re.escape(home)}(?=/)", "~", text) if home else text)


def scrubbed_document(document: Any, environ: Mapping[str, str]) -> Any:
    """Return a document of JSON-compatible values with all of its texts scrubbed."""
    if isinstance(document, str):
        return scrubbed(document, environ)
    if isinstance(document, list | tuple):
        return [scrubbed_document(item, environ) for item in document]
    if isinstance(document, dict):
        return {name: scrubbed_document(value, environ) for name, value in document.items()}
    return document


def _is_secret(name: str, value: str) -> bool:
    if not value or not _NAME.search(name) or _HARMLESS.match(name):
        return False
    # The name decides as well as the value, because a secret may begin with a slash.
    return not (_OF_FILE.search(name) and _PATH.match(value))


def _hidden(text: str) -> str:
    for context in _CONTEXTS:
        text = context.sub(_without_secret, text)
    return text


def _without_secret(found: re.Match[str]) -> str:
    groups = found.groupdict()
    secret = groups["secret"] or groups.get("word") or ""
    before = groups.get("before") or groups.get("flag") or ""
    return found[0] if _PATH.match(secret) else f"{before}{HIDDEN}"


def _secrets(environ: Mapping[str, str]) -> set[str]:
    """Return the secrets in the values of variables."""
    found = set()
    for name, value in environ.items():
        if _is_secret(name, value):
            found.add(value)
        for context in _CONTEXTS:
            for match in context.finditer(value):
                groups = match.groupdict()
                secret = groups["secret"] or groups.get("word") or ""
                found |= set() if _PATH.match(secret) else {secret}
        found |= {run for run in _RUN.findall(value) if _is_random(run)}
    return found


def _is_random(text: str) -> bool:
    """Return whether a text looks random: hexadecimal digits only, or letters and digits in no order."""
    plain = re.sub(r"[^A-Za-z0-9]", "", text)
    if not re.search(r"\d", plain) or not re.search(r"[A-Za-z]", plain):
        return False
    if re.fullmatch(r"[0-9a-fA-F]{32,}", plain):
        return True
    kinds = ["d" if character.isdigit() else "u" if character.isupper() else "l" for character in plain]
    return sum(first != second for first, second in itertools.pairwise(kinds)) >= _LEAST_CHANGES
