"""The objects of ``Trainer(callbacks=...)``: which are accepted, how hooks are called, and their states.

They are listeners, or Lightning's Callback objects. A test checks the sets against the installed Lightning.
Imports no torch and no Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyxla import UsageError
from polyxla.plugin import PROJECT, say
from polyxla_training.lightning.hooks import find_hook, has_base, is_lightnings, is_overridden

AROUND = frozenset(
    {
        "on_after_backward",
        "on_before_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_fit_end",
        "on_fit_start",
        "on_load_checkpoint",
        "on_predict_batch_end",
        "on_predict_batch_start",
        "on_predict_end",
        "on_predict_epoch_end",
        "on_predict_epoch_start",
        "on_predict_start",
        "on_save_checkpoint",
        "on_test_batch_end",
        "on_test_batch_start",
        "on_test_end",
        "on_test_epoch_end",
        "on_test_epoch_start",
        "on_test_start",
        "on_train_batch_end",
        "on_train_batch_start",
        "on_train_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_train_start",
        "on_validation_batch_end",
        "on_validation_batch_start",
        "on_validation_end",
        "on_validation_epoch_end",
        "on_validation_epoch_start",
        "on_validation_start",
    }
)
"""Hooks that are called where the module's hook of the same name is, before it."""
CALLED = AROUND | {"load_state_dict", "on_exception", "setup", "state_dict", "teardown"}
NOT_CALLED = frozenset({"on_sanity_check_end", "on_sanity_check_start"})
"""There is no sanity check, as with Lightning's ``num_sanity_val_steps=0``."""

ACCEPTED = frozenset({"Callback", "LambdaCallback"})
"""Lightning's own classes that a callback may be of, or inherit from."""
_PROGRESS = "Leave it out: progress= shows the bar."
_SUMMARY = "Write Trainer(summary=...)."
REFUSED: Mapping[str, str] = {
    "DeviceStatsMonitor": "Leave it out: the run log and polyxla report have the device's memory.",
    "EarlyStopping": "Write polyxla_training.EarlyStopping(monitor, mode, patience).",
    "GradientAccumulationScheduler": "Write Trainer(accumulate=...).",
    "LearningRateMonitor": "Leave it out: the bar shows it; log it with self.log in on_train_batch_start.",
    "ModelCheckpoint": "Write Trainer(checkpoint_dir='checkpoints', monitor='val_loss').",
    "ModelSummary": _SUMMARY,
    "OnExceptionCheckpoint": "Write Trainer(checkpoint_dir='checkpoints', save_every_n_steps=100).",
    "ProgressBar": _PROGRESS,
    "RichModelSummary": _SUMMARY,
    "RichProgressBar": _PROGRESS,
    "StochasticWeightAveraging": "Use torch.optim.swa_utils in the module.",
    "TQDMProgressBar": _PROGRESS,
    "ThroughputMonitor": "Leave it out: the run log and polyxla report have the throughput.",
    "WeightAveraging": "Use torch.optim.swa_utils in the module.",
}
"""Lightning's own callbacks that reach into its Trainer, each with what to do instead."""
_OTHER = "Write what it does as a Callback of your own, or as hooks of the module."


def is_callback(value: Any) -> bool:
    """Return whether `value` is one of Lightning's Callback objects."""
    return has_base(value, "Callback")


def check_callback(callback: Any) -> None:
    """Refuse a Callback that would not work as in Lightning.

    Raises:
        UsageError: it is of one of Lightning's own classes, or overrides a hook that is not called.
    """
    name = type(callback).__name__
    # A subclass of one of Lightning's own callbacks inherits its calls into Lightning's Trainer.
    own = [base for base in type(callback).__mro__ if is_lightnings(base)]
    for base in own:
        if base.__name__ not in ACCEPTED:
            nearest = next((REFUSED[base.__name__] for base in own if base.__name__ in REFUSED), _OTHER)
            raise UsageError(
                f"{name} needs Lightning's own Trainer", where="Trainer(callbacks=...)", fix=nearest
            )
    # Refused early: a hook that is never called would be noticed after hours of training, if at all.
    for hook in sorted(_hooks_of(own)):
        if hook not in CALLED | NOT_CALLED and is_overridden(callback, hook):
            raise UsageError(
                f"{name} overrides {hook}, which the Trainer would not call",
                where="Trainer(callbacks=...)",
                fix="Remove it: write what it does in another hook.",
            )


def _hooks_of(bases: Iterable[type]) -> set[str]:
    return {
        name
        for base in bases
        for name, member in vars(base).items()
        if not name.startswith("_") and callable(member)
    }


class LightningCallbacks:
    """Calls the hooks of Callback objects.

    Args:
        callbacks: the objects.
        view: what they receive as the trainer; its `model` is the module.
    """

    def __init__(self, callbacks: Iterable[Any], view: Any) -> None:
        self.callbacks, self._view = list(callbacks), view

    def add(self, callbacks: Iterable[Any]) -> None:
        """Add those that the module's ``configure_callbacks`` returned; they replace others of their type."""
        added = list(callbacks)
        for callback in added:
            check_callback(callback)
        # In place: `TrainerView.callbacks` is this list.
        types = {type(callback) for callback in added}
        self.callbacks[:] = [
            *(callback for callback in self.callbacks if type(callback) not in types),
            *added,
        ]

    def hook(self, name: str) -> Callable[..., None] | None:
        """Return what calls the hook `name` of those that override it; None if none does."""
        # Looked up once: `hook` is called before the loop, and what it returns in every step.
        methods = [method for callback in self.callbacks if (method := find_hook(callback, name)) is not None]
        if not methods:
            return None

        def call(*arguments: Any) -> None:
            for method in methods:
                method(self._view, self._view.model, *arguments)

        return call

    def before(self, name: str, hook: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return `hook`, the module's or None, with the callbacks' hooks of that name before it."""
        first = self.hook(name) if name in AROUND else None
        if first is None or hook is None:
            return first or hook

        def call(*arguments: Any) -> Any:
            first(*arguments)
            return hook(*arguments)

        return call


def is_listener(callback: object) -> bool:
    """Return whether an object has hook implementations, which `polyxla.hookimpl` has marked."""
    # Looked up on the class: reading a property of the object could run the user's code.
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
    for callback in callbacks:
        if is_callback(callback):
            check_callback(callback)
        elif isinstance(callback, type) or not is_listener(callback):
            raise UsageError(
                f"{callback!r} has no hook implementations",
                where="Trainer(callbacks=...)",
                fix="Pass an object whose methods are marked with @polyxla.hookimpl, as in docs/plugins.md.",
            )


def _stateful(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the callbacks that have states, by the names of their states.

    Raises:
        UsageError: two have one name.
    """
    found: dict[str, Any] = {}
    for callback in callbacks:
        if not all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")):
            continue
        # Lightning's callbacks have a state_key; it distinguishes two of one class.
        key = getattr(callback, "state_key", None) or type(callback).__qualname__
        if key in found:
            raise UsageError(
                f"two callbacks have the name {key!r} in checkpoints",
                where="Trainer(callbacks=...)",
                fix="Give one of them an attribute state_key.",
            )
        found[key] = callback
    return found


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the states of those callbacks that have any."""
    # An empty state is left out, so that a callback which has nothing to save need not be there on resuming.
    states = {key: callback.state_dict() for key, callback in _stateful(callbacks).items()}
    return {key: state for key, state in states.items() if state}


def load_states(callbacks: Iterable[Any], states: Mapping[str, Any], *, is_first: bool) -> None:
    """Load what `states_of` returned; a callback that has no state there starts from the beginning.

    Args:
        callbacks: the callbacks.
        states: their states by name.
        is_first: whether to print the names of states that belong to no callback.
    """
    found = _stateful(callbacks)
    for key, callback in found.items():
        if key in states:
            callback.load_state_dict(states[key])
    # Printed, not refused: leaving out a callback on resuming is often intended.
    if is_first and (others := sorted(set(states) - set(found))):
        say(f"the checkpoint has states of callbacks that are not here: {', '.join(others)}")
