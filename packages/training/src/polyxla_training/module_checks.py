"""What a Trainer refuses before it starts, and how trained parameters return to the caller's module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from polyxla import UsageError
from polyxla_training.lightning.hooks import check_hooks, find_hook, is_data_module, is_module


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


def take_state(module: Any, state: Mapping[str, Any]) -> None:
    """Load parameters that were trained in another process into the caller's module.

    Raises:
        UsageError: the module was given other layers there.
    """
    hook = find_hook(module, "configure_model") if is_module(module) else None
    if hook and set(state) != set(module.state_dict()):
        # The replicas have called it on their copies.
        hook()
    if other := sorted(set(state) ^ set(module.state_dict())):
        raise UsageError(
            f"the replicas' modules and the caller's differ in {', '.join(other[:3])}",
            where=f"{type(module).__name__}.setup",
            fix="Make all layers in __init__ or in configure_model.",
        )
    # A module on the meta device has nothing to copy into.
    module.load_state_dict(state, assign=any(one.is_meta for one in module.state_dict().values()))
