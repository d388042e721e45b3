"""The module's side of training: its steps, hooks and optimizers, as Lightning users write them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from polyxla.errors import UsageError
from polyxla_training.metrics import Meter

if TYPE_CHECKING:
    from polyxla_training.loop import LoopState

_UNSET = object()


class Steps:
    """Calls a module's methods, and lends it ``log``, ``log_dict`` and ``trainer`` meanwhile."""

    def __init__(self, module: Any, meter: Meter, state: LoopState) -> None:
        self._module = module
        self._meter = meter
        self._before: dict[str, Any] = {}
        self._parameters: dict[str, list[str]] = {}
        self._is_lightning = _is_lightning(module)
        for name, value in (("log", meter.log), ("log_dict", meter.log_dict), ("trainer", state)):
            if _is_lightning(module) or not hasattr(module, name):
                self._lend(_slot(module, name), value)

    def _lend(self, slot: str, value: Any) -> None:
        # Into __dict__, past nn.Module.__setattr__ and LightningModule's setters.
        self._before[slot] = self._module.__dict__.get(slot, _UNSET)
        self._module.__dict__[slot] = value

    def release(self) -> None:
        """Take back what was lent, so that the module pickles and copies as before."""
        for slot, value in self._before.items():
            self._module.__dict__.pop(slot, None)
            if value is not _UNSET:
                self._module.__dict__[slot] = value

    def lend_optimizer(self, optimizer: torch.optim.Optimizer, schedulers: Schedulers) -> None:
        """Let a LightningModule find its optimizer and schedules with ``self.optimizers()``."""
        if _is_lightning(self._module):
            found = [config["scheduler"] for config in schedulers.configs]
            self._lend("optimizers", lambda **_: optimizer)
            self._lend("lr_schedulers", lambda: found[0] if len(found) == 1 else found or None)

    def call(self, hook: str, *arguments: Any, only_lightning: bool = False) -> None:
        """Call a hook such as ``on_train_start`` where the module has it.

        Args:
            hook: the method's name.
            arguments: what it is given.
            only_lightning: whether the name means this to a LightningModule only.
        """
        # Asked first, as it is known: looking for what a module does not have takes longer.
        if only_lightning and not self._is_lightning:
            return
        method = getattr(self._module, hook, None)
        if callable(method):
            method(*arguments)

    def wants_valid(self, kind: str) -> bool:
        """Tell whether ``{kind}_step`` has a parameter ``valid``: it reads padded batches with their mask."""
        method = getattr(self._module, f"{kind}_step", None)
        return callable(method) and "valid" in inspect.signature(method).parameters

    def loss(
        self, batch: Any, index: int, real: int | None = None, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call ``training_step`` and return its loss.

        Args:
            batch: the records.
            index: the batch's number in the epoch.
            real: how many records are no padding; None for all.
            valid: which those are.

        Raises:
            UsageError: it returned nothing that can be trained on.
        """
        self._meter.start_batch(batch, is_training=True, real=real, valid=valid)
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
        self._meter.start_batch(batch, is_training=False, real=real, valid=valid)
        self._call_step(kind, batch, index, valid)

    def _call_step(self, kind: str, batch: Any, index: int, valid: Any) -> Any:
        method = getattr(self._module, f"{kind}_step")
        if kind not in self._parameters:
            self._parameters[kind] = list(inspect.signature(method).parameters)
        takes = self._parameters[kind]
        mask = {"valid": valid} if "valid" in takes else {}
        return method(batch, index, **mask) if len(takes) - len(mask) > 1 else method(batch, **mask)

    def require(self, kind: str) -> None:
        """Refuse data for a step that the module does not have.

        Raises:
            UsageError: there is no ``{kind}_step``.
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
        """Advance those that count steps."""
        self._steps += 1
        for config in self._due("step", self._steps):
            config["scheduler"].step()

    def epoch_finished(self, metrics: Mapping[str, float]) -> None:
        """Advance those that count epochs; one with a ``monitor`` is given that metric."""
        self._epochs += 1
        for config in self._due("epoch", self._epochs):
            monitor = config.get("monitor")
            if not isinstance(config["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
                config["scheduler"].step()
            elif isinstance(monitor, str) and monitor in metrics:
                config["scheduler"].step(metrics[monitor])
            else:
                raise UsageError(
                    f"the schedule watches {monitor!r}, which was not logged (logged: {sorted(metrics)})",
                    where="configure_optimizers",
                    fix="Name a logged metric: {'scheduler': ..., 'monitor': 'val_loss'}.",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedules stand, as `polyxla_training.save` takes it."""
        states = [config["scheduler"].state_dict() for config in self.configs]
        return {"steps": self._steps, "epochs": self._epochs, "schedulers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._steps, self._epochs = state["steps"], state["epochs"]
        for config, one in zip(self.configs, state["schedulers"], strict=True):
            config["scheduler"].load_state_dict(one)

    def _due(self, interval: str, count: int) -> list[Mapping[str, Any]]:
        mine = [config for config in self.configs if config.get("interval", "epoch") == interval]
        return [config for config in mine if count % config.get("frequency", 1) == 0]


def configured(module: Any) -> tuple[torch.optim.Optimizer, Schedulers]:
    """Call ``configure_optimizers`` and read its answer in any of the forms Lightning allows.

    Raises:
        UsageError: it gave no optimizer, or several.
    """
    answer = module.configure_optimizers()
    optimizers, schedulers = _unpacked(answer)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers: {answer!r}",
            where=f"{type(module).__name__}.configure_optimizers",
            fix="Return one torch optimizer; for several, write the loop with polyxla.launch.",
        )
    return optimizers[0], Schedulers(schedulers)


def _unpacked(answer: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(answer, list | tuple) and len(answer) == 1 and isinstance(answer[0], Mapping):
        answer = answer[0]
    if isinstance(answer, Mapping):
        schedule = answer.get("lr_scheduler")
        if schedule is not None and not isinstance(schedule, Mapping):
            schedule = {"scheduler": schedule, "monitor": answer.get("monitor")}
        return [answer.get("optimizer")], [] if schedule is None else [schedule]
    if isinstance(answer, list | tuple) and len(answer) == 2 and isinstance(answer[0], list):
        schedules = answer[1]
        return answer[0], schedules if isinstance(schedules, list) else [schedules]
    if isinstance(answer, list | tuple):
        return list(answer), []
    return [] if answer is None else [answer], []


def own_loader(module: Any, loader: Iterable[Any] | None, method: str) -> Iterable[Any] | None:
    """Return the loader that was passed, or else the one the module makes itself."""
    if loader is not None:
        return loader
    made = getattr(module, method, None)
    return made() if callable(made) and _is_overridden(module, method) else None


def check_module(module: Any, methods: Iterable[str]) -> None:
    """Refuse early what cannot be trained.

    Raises:
        UsageError: a method is missing, or the module wants to drive its optimizers itself.
    """
    missing = [name for name in methods if not callable(getattr(module, name, None))]
    if missing:
        raise UsageError(
            f"{type(module).__name__} has no {' and no '.join(missing)}",
            where="the module given to Trainer",
            fix="Write the method, or use polyxla.launch with a loop of your own.",
        )
    if getattr(module, "automatic_optimization", True) is False:
        raise UsageError(
            f"{type(module).__name__} sets automatic_optimization=False, which Trainer does not do",
            where="the module given to Trainer",
            fix="Use polyxla.launch with a loop of your own and replica.step.",
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
