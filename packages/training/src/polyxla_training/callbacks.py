"""The objects of ``Trainer(callbacks=...)``: which are accepted, and their states. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyxla import UsageError
from polyxla.plugin import PROJECT, say
from polyxla_training.lightning.callbacks import check_callback, is_callback


def is_listener(callback: object) -> bool:
    """Return whether an object has hook implementations, which `polyxla.hookimpl` has marked."""
    methods = (getattr(type(callback), name, None) for name in dir(type(callback)))
    return any(getattr(method, f"{PROJECT}_impl", None) is not None for method in methods)


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse what would never be called.

    Raises:
        UsageError: it is not a list, or an object in it has no hooks, or is a Callback that is not supported.
    """
    if not isinstance(callbacks, list | tuple):
        raise UsageError(
            f"callbacks={callbacks!r} is not a list", where="Trainer", fix="Write callbacks=[...]."
        )
    for one in callbacks:
        if is_callback(one):
            check_callback(one)
        elif isinstance(one, type) or not is_listener(one):
            raise UsageError(
                f"{one!r} has no hook implementations",
                where="Trainer(callbacks=...)",
                fix="Pass an object whose methods are marked with @polyxla.hookimpl, as in docs/plugins.md.",
            )


def _stateful(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the callbacks that have states, by the names of these.

    Raises:
        UsageError: two have one name.
    """
    found: dict[str, Any] = {}
    for one in callbacks:
        if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
            continue
        key = getattr(one, "state_key", None) or type(one).__qualname__
        if key in found:
            raise UsageError(
                f"two callbacks have the name {key!r} in checkpoints",
                where="Trainer(callbacks=...)",
                fix="Give one of them an attribute state_key.",
            )
        found[key] = one
    return found


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the states of those callbacks that have any."""
    states = {key: one.state_dict() for key, one in _stateful(callbacks).items()}
    return {key: state for key, state in states.items() if state}


def load_states(callbacks: Iterable[Any], states: Mapping[str, Any], *, is_first: bool) -> None:
    """Load what `states_of` returned; a callback that has no state there begins anew.

    Args:
        callbacks: the callbacks.
        states: their states by name.
        is_first: whether to print the names of states that belong to no callback.
    """
    found = _stateful(callbacks)
    for key, one in found.items():
        if key in states:
            one.load_state_dict(states[key])
    if is_first and (others := sorted(set(states) - set(found))):
        say(f"the checkpoint has states of callbacks that are not here: {', '.join(others)}")
