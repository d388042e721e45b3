"""The hooks of LightningModules and data modules: which the Trainer calls, and which it refuses.

A test checks the sets against the installed Lightning. An overridden hook in none of them is refused: no hook
of a newer Lightning is dropped silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from polyxla import UsageError

PLAIN = frozenset(
    {
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_test_epoch_start",
        "on_test_epoch_end",
        "on_predict_epoch_start",
        "on_predict_epoch_end",
        "on_train_end",
        "on_fit_end",
    }
)
"""Hooks of any module. In a module that is not Lightning's, the other names may mean anything."""

CALLED = PLAIN | {
    # once
    "configure_callbacks",
    "configure_model",
    "configure_optimizers",
    "configure_sharded_model",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "predict_dataloader",
    "prepare_data",
    "setup",
    "teardown",
    "test_dataloader",
    "train_dataloader",
    "val_dataloader",
    # every batch
    "backward",
    "configure_gradient_clipping",
    "forward",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_step",
    "transfer_batch_to_device",
    # evaluations
    "on_predict_batch_end",
    "on_predict_batch_start",
    "on_predict_end",
    "on_predict_model_eval",
    "on_predict_start",
    "on_test_batch_end",
    "on_test_batch_start",
    "on_test_end",
    "on_test_model_eval",
    "on_test_model_train",
    "on_test_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "predict_step",
    "test_step",
    "validation_step",
}
"""Hooks of a LightningModule."""

_RENAME = "the Trainer replaces it; give your method another name, and call self.{name} in it"
REFUSED: Mapping[str, str] = {
    name: _RENAME.format(name=name)
    for name in ("all_gather", "clip_gradients", "log", "log_dict", "lr_schedulers", "optimizers")
}
"""Methods of a LightningModule that it must not override, each with what to do instead."""

NOT_CALLED = frozenset(
    {
        # the user's to call
        "freeze",
        "load_from_checkpoint",
        "manual_backward",
        "print",
        "to_onnx",
        "to_tensorrt",
        "to_torchscript",
        "toggle_optimizer",
        "toggled_optimizer",
        "unfreeze",
        "untoggle_optimizer",
    }
)
"""Methods of a LightningModule that Lightning's own Trainer does not call."""

DATA_CALLED = frozenset(
    {
        "load_state_dict",
        "on_after_batch_transfer",
        "on_before_batch_transfer",
        "on_exception",
        "predict_dataloader",
        "prepare_data",
        "setup",
        "state_dict",
        "teardown",
        "test_dataloader",
        "train_dataloader",
        "transfer_batch_to_device",
        "val_dataloader",
    }
)
"""Hooks of a LightningDataModule."""

DATA_NOT_CALLED = frozenset({"from_datasets", "load_from_checkpoint"})
"""Methods of a LightningDataModule that Lightning's own Trainer does not call."""

_BASES = frozenset({"LightningModule", "LightningDataModule", "ModelHooks", "DataHooks", "CheckpointHooks"})


class DataModule(Protocol):
    """The methods that every LightningDataModule has."""

    def prepare_data(self) -> None:
        """Download the data, in one process of each host."""

    def setup(self, stage: str) -> None:
        """Read the data, in every replica."""


def is_module(value: Any) -> bool:
    """Return whether `value` is a LightningModule."""
    return has_base(value, "LightningModule")


def is_data_module(value: Any) -> bool:
    """Return whether `value` is a LightningDataModule."""
    return has_base(value, "LightningDataModule")


def has_base(value: Any, name: str) -> bool:
    """Return whether Lightning's class `name` is among the bases of `value`."""
    # By name: Lightning need not be installed, and has two distributions.
    return any(base.__name__ == name and is_lightnings(base) for base in type(value).__mro__)


def is_lightnings(base: type) -> bool:
    """Return whether a class is one of Lightning's own."""
    return base.__module__.startswith(("lightning.", "pytorch_lightning."))


def is_overridden(value: Any, name: str) -> bool:
    """Return whether `value` has a method `name` of its own, not Lightning's."""
    if name in vars(value):
        return True
    # The first class that defines the name decides: a mixin's method before Lightning's overrides it.
    owner = next((base for base in type(value).__mro__ if name in vars(base)), None)
    return owner is not None and not is_lightnings(owner)


def find_hook(value: Any, name: str) -> Callable[..., Any] | None:
    """Return the method `name` if `value` overrides it."""
    method = getattr(value, name, None) if is_overridden(value, name) else None
    return method if callable(method) else None


def check_hooks(value: Any) -> None:
    """Refuse a LightningModule or data module that overrides what the Trainer does not call.

    Raises:
        UsageError: it overrides such a method.
    """
    # Overriding a method that Lightning's Trainer would not call either is harmless.
    known = CALLED | NOT_CALLED if is_module(value) else DATA_CALLED | DATA_NOT_CALLED
    for name in sorted(_hooks_of(value)):
        if name not in known and is_overridden(value, name):
            raise UsageError(
                f"{type(value).__name__} overrides {name}, which the Trainer would not call",
                where=f"{type(value).__name__}.{name}",
                fix=f"Remove it: {REFUSED.get(name, 'write what it does in another hook')}.",
            )


def _hooks_of(value: Any) -> set[str]:
    """Return the public methods that Lightning's base classes give `value`."""
    # Names are collected from the installed Lightning, so a hook of a newer release is found too.
    bases = [base for base in type(value).__mro__ if base.__name__ in _BASES and is_lightnings(base)]
    return {
        name
        for base in bases
        for name, member in vars(base).items()
        if not name.startswith("_") and callable(getattr(base, name)) and not isinstance(member, property)
    }


def check_module(module: Any, methods: Iterable[str]) -> None:
    """Raise an error early if the module cannot be trained.

    Raises:
        UsageError: a method is missing, or the module does what the Trainer does not support.
    """
    missing = [name for name in methods if not callable(getattr(module, name, None))]
    if missing:
        raise UsageError(
            f"{type(module).__name__} has no {' and no '.join(missing)}",
            where="the module passed to Trainer",
            fix="Write the method, or use polyxla.launch with your own loop.",
        )
    if getattr(module, "automatic_optimization", True) is False:
        raise UsageError(
            f"{type(module).__name__} sets automatic_optimization=False, which Trainer does not support",
            where="the module passed to Trainer",
            fix="Use polyxla.launch with your own loop and replica.step.",
        )
    if not is_module(module):
        return
    check_hooks(module)
    # Lightning passes an iterator to a step with this parameter, and the step fetches its own batches.
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            raise UsageError(
                f"{name} takes dataloader_iter, and the Trainer passes batches",
                where=f"{type(module).__name__}.{name}",
                fix=f"Write {name}(self, batch, batch_idx).",
            )


def check_datamodule(datamodule: Any, loaders: Iterable[Any]) -> None:
    """Raise an error early if the data module cannot be used.

    Raises:
        UsageError: loaders were passed too, it makes none, or overrides what would not be called.
    """
    if datamodule is None:
        return
    name = type(datamodule).__name__
    # Lightning refuses it too; which of them to use would be a guess.
    if any(loader is not None for loader in loaders):
        raise UsageError(
            f"loaders were passed beside {name}",
            where="the arguments of the Trainer's method",
            fix="Pass either loaders or a data module.",
        )
    if not any(
        callable(getattr(datamodule, f"{kind}_dataloader", None))
        for kind in ("train", "val", "test", "predict")
    ):
        raise UsageError(
            f"{name} has no train_dataloader, val_dataloader, test_dataloader or predict_dataloader",
            where="datamodule=",
            fix="Write the method, or pass a loader in place of the data module.",
        )
    if is_data_module(datamodule):
        check_hooks(datamodule)
