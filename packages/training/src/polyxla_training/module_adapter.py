"""The module's steps, hooks and optimizers, as Lightning users write them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset

from polyxla.errors import UsageError
from polyxla_training.metrics import MetricAccumulator

if TYPE_CHECKING:
    from polyxla_training.trainer_view import TrainerView

_UNSET = object()


class ModuleAdapter:
    """Calls a module's methods, and lends it ``log``, ``log_dict`` and ``trainer`` until `release`.

    Args:
        module: a LightningModule, or any module with ``training_step``.
        accumulator: receives the logged values.
        view: what the module sees as ``self.trainer``.
    """

    def __init__(self, module: Any, accumulator: MetricAccumulator, view: TrainerView) -> None:
        self._module = module
        self._accumulator = accumulator
        self._before: dict[str, Any] = {}
        self._parameters: dict[str, list[str]] = {}
        self._is_lightning = _is_lightning(module)
        lent = {"log": accumulator.log, "log_dict": accumulator.log_dict, "trainer": view}
        for name, value in lent.items():
            # A plain module keeps attributes of its own; a LightningModule's raise without a trainer.
            if _is_lightning(module) or not hasattr(module, name):
                self._lend(_slot(module, name), value)

    def _lend(self, slot: str, value: Any) -> None:
        # Into __dict__, past nn.Module.__setattr__ and LightningModule's setters.
        self._before[slot] = self._module.__dict__.get(slot, _UNSET)
        self._module.__dict__[slot] = value

    def release(self) -> None:
        """Take the lent attributes back, so that the module pickles and copies as before."""
        for slot, value in self._before.items():
            self._module.__dict__.pop(slot, None)
            if value is not _UNSET:
                self._module.__dict__[slot] = value

    def lend_optimizer(self, optimizer: torch.optim.Optimizer, schedulers: Schedulers) -> None:
        """Make ``self.optimizers()`` and ``self.lr_schedulers()`` work in a LightningModule."""
        if _is_lightning(self._module):
            found = [config["scheduler"] for config in schedulers.configs]
            self._lend("optimizers", lambda **_: optimizer)
            self._lend("lr_schedulers", lambda: found[0] if len(found) == 1 else found or None)

    def call(self, hook: str, *arguments: Any, only_lightning: bool = False) -> None:
        """Call a hook such as ``on_train_start`` if the module has it.

        Args:
            hook: the method's name.
            arguments: its arguments.
            only_lightning: call it on a LightningModule only: in other modules the name may mean anything.
        """
        # Checked first because it is known: looking up a missing attribute of a module is slow.
        if only_lightning and not self._is_lightning:
            return
        method = getattr(self._module, hook, None)
        if callable(method):
            method(*arguments)

    def accepts_mask(self, kind: str) -> bool:
        """Return whether ``{kind}_step`` has a parameter ``valid``: the mask of a padded batch."""
        method = getattr(self._module, f"{kind}_step", None)
        return callable(method) and "valid" in inspect.signature(method).parameters

    def loss(
        self, batch: Any, index: int, real: int | None = None, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call ``training_step`` and return its loss.

        Args:
            batch: the records.
            index: the batch's number in the epoch.
            real: number of records that are not padding; None for all.
            valid: mask of those records.

        Raises:
            UsageError: it did not return a loss that depends on the parameters.
        """
        self._accumulator.start_batch(batch, is_training=True, real=real, valid=valid)
        result = self._call_step("training", batch, index, valid)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise UsageError(
                f"training_step returned {_describe(loss)}",
                where=f"{type(self._module).__name__}.training_step",
                fix="Return the loss: a tensor of one element computed from the parameters, "
                "or a dict with it under 'loss'.",
            )
        return loss

    def evaluate(
        self, kind: str, batch: Any, index: int, real: int | None = None, valid: torch.Tensor | None = None
    ) -> None:
        """Call ``validation_step`` or ``test_step``; arguments as for `loss`."""
        self._accumulator.start_batch(batch, is_training=False, real=real, valid=valid)
        self._call_step(kind, batch, index, valid)

    def _call_step(self, kind: str, batch: Any, index: int, valid: Any) -> Any:
        method = getattr(self._module, f"{kind}_step")
        if kind not in self._parameters:
            self._parameters[kind] = list(inspect.signature(method).parameters)
        takes = self._parameters[kind]
        mask = {"valid": valid} if "valid" in takes else {}
        return method(batch, index, **mask) if len(takes) - len(mask) > 1 else method(batch, **mask)

    def require(self, kind: str) -> None:
        """Raise an error if the module has no ``{kind}_step``.

        Raises:
            UsageError: it has none.
        """
        method = f"{kind}_step"
        if not callable(getattr(self._module, method, None)) or not _is_overridden(self._module, method):
            raise UsageError(
                f"{type(self._module).__name__} has no {kind}_step, but was given data for it",
                where=f"the {kind} loader",
                fix=f"Write {kind}_step(self, batch), or pass no {kind} data.",
            )


class Schedulers:
    """The learning-rate schedules that ``configure_optimizers`` returned."""

    def __init__(self, configs: Iterable[Any]) -> None:
        self.configs = [
            config if isinstance(config, Mapping) else {"scheduler": config} for config in configs
        ]
        self._steps = self._epochs = 0

    def step_finished(self) -> None:
        """Advance the schedules that count steps."""
        self._steps += 1
        for config in self._due("step", self._steps):
            config["scheduler"].step()

    def epoch_finished(self, metrics: Mapping[str, float]) -> None:
        """Advance the schedules that count epochs; ReduceLROnPlateau receives its ``monitor``."""
        self._epochs += 1
        for config in self._due("epoch", self._epochs):
            monitor = config.get("monitor")
            if not isinstance(config["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
                config["scheduler"].step()
            elif isinstance(monitor, str) and monitor in metrics:
                config["scheduler"].step(metrics[monitor])
            else:
                raise UsageError(
                    f"ReduceLROnPlateau monitors {monitor!r}, which was not logged "
                    f"(logged: {sorted(metrics)})",
                    where="configure_optimizers",
                    fix="Name a logged metric: {'scheduler': ..., 'monitor': 'val_loss'}.",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedules, as `polyxla_training.save` takes it."""
        states = [config["scheduler"].state_dict() for config in self.configs]
        return {"steps": self._steps, "epochs": self._epochs, "schedulers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._steps, self._epochs = state["steps"], state["epochs"]
        for config, one in zip(self.configs, state["schedulers"], strict=True):
            config["scheduler"].load_state_dict(one)

    def _due(self, interval: str, count: int) -> list[Mapping[str, Any]]:
        return [
            config
            for config in self.configs
            if config.get("interval", "epoch") == interval and count % config.get("frequency", 1) == 0
        ]


def configure_optimizers(module: Any) -> tuple[torch.optim.Optimizer, Schedulers]:
    """Call ``configure_optimizers`` and read its answer in any of the forms Lightning allows.

    Raises:
        UsageError: it returned no optimizer, or several.
    """
    answer = module.configure_optimizers()
    optimizers, schedules = _unpack(answer)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers: {answer!r}",
            where=f"{type(module).__name__}.configure_optimizers",
            fix="Return one torch optimizer; for several, write the loop with polyxla.launch.",
        )
    return optimizers[0], Schedulers(schedules)


def _unpack(answer: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedules in what ``configure_optimizers`` returned."""
    match answer:
        case None:
            return [], []
        case (Mapping() as config) | [Mapping() as config]:
            return [config.get("optimizer")], _unpack_schedule(config)
        case [list() as optimizers, list() as schedules]:
            return optimizers, schedules
        case [list() as optimizers, schedule]:
            return optimizers, [schedule]
        case list() | tuple():
            return list(answer), []
        case _:
            return [answer], []


def _unpack_schedule(config: Mapping[str, Any]) -> list[Any]:
    match config.get("lr_scheduler"):
        case None:
            return []
        case Mapping() as schedule:
            return [schedule]
        case scheduler:
            return [{"scheduler": scheduler, "monitor": config.get("monitor")}]


def resolve_loader(module: Any, loader: Any, method: str) -> Iterable[Any] | None:
    """Return the loader that was passed, or else the one that the module's `method` makes.

    Raises:
        UsageError: a dataset was passed, whose single records would be taken for batches.
    """
    # An IterableDataset may well yield batches.
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"{type(loader).__name__} is a dataset, not a loader of batches",
            where=f"the argument in place of {method}",
            fix="Write DataLoader(dataset, batch_size=32) from torch.utils.data.",
        )
    if loader is not None:
        given: Iterable[Any] = loader
        return given
    made = getattr(module, method, None)
    return made() if callable(made) and _is_overridden(module, method) else None


def check_module(module: Any, methods: Iterable[str]) -> None:
    """Raise an error early if the module cannot be trained.

    Raises:
        UsageError: a method is missing, or the module sets ``automatic_optimization=False``.
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


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor that does not depend on the parameters"
    return f"{value!r}, not a tensor"


def _is_lightning(module: Any) -> bool:
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)


def _is_overridden(module: Any, method: str) -> bool:
    # A LightningModule has every method; its own data hooks raise until they are overridden.
    owner = next((base for base in type(module).__mro__ if method in vars(base)), None)
    return owner is None or not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _slot(module: Any, name: str) -> str:
    # LightningModule keeps its trainer behind a property.
    return "_trainer" if name == "trainer" and _is_lightning(module) else name
