"""The module's steps and hooks, as Lightning users write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import map_tensors, say
from polyxla_training.lightning.callbacks import LightningCallbacks
from polyxla_training.lightning.hooks import PLAIN, find_hook, is_module
from polyxla_training.lightning.schedulers import Schedulers
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.metrics import MetricAccumulator

_UNSET = object()


class ModuleAdapter:
    """Finds and calls a module's methods, and lends it ``log``, ``log_dict`` and ``trainer`` until `release`.

    Args:
        module: a LightningModule, or any module with ``training_step``.
        accumulator: receives the logged values.
        view: what the module sees as ``self.trainer``.
        callbacks: Lightning's Callback objects, whose hooks are called before the module's.

    Attributes:
        is_lightning: whether it is a LightningModule.
        extra: what the latest ``training_step`` returned beside the loss.
    """

    def __init__(
        self, module: Any, accumulator: MetricAccumulator, view: TrainerView, callbacks: LightningCallbacks
    ) -> None:
        self._module = module
        self._accumulator = accumulator
        self._view, self._callbacks = view, callbacks
        self._before: list[tuple[Any, str, Any]] = []
        self._takes: dict[str, tuple[bool, bool]] = {}
        self.is_lightning = is_module(module)
        self.extra: dict[str, Any] = {}
        self._keeps_extra = self.hook("on_train_batch_end") is not None
        view.model = module
        for name, value in {"log": accumulator.log, "log_dict": accumulator.log_dict}.items():
            # A plain module may use these names for attributes of its own, and keeps them.
            if self.is_lightning or not hasattr(module, name):
                self._lend(module, name, value)
        for part in module.modules():
            # LightningModules, also those inside the module, keep their trainer behind a property that
            # refuses other classes than Lightning's, so the attribute below it is set.
            if is_module(part):
                self._lend(part, "_trainer", view)
        if not self.is_lightning and not hasattr(module, "trainer"):
            self._lend(module, "trainer", view)

    def _lend(self, module: Any, slot: str, value: Any) -> None:
        if not any(owner is module for owner, _, _ in self._before):
            # A module may copy itself while it trains, for instance to average its weights. The copy must not
            # take the trainer, the loop and the replica with it.
            self._put(module, "__reduce_ex__", partial(self._reduced, module))
        self._put(module, slot, value)

    def _put(self, module: Any, slot: str, value: Any) -> None:
        # Written to __dict__, because nn.Module.__setattr__ would register a module that is lent, and the
        # setters of a LightningModule refuse objects that are not Lightning's.
        self._before.append((module, slot, vars(module).get(slot, _UNSET)))
        vars(module)[slot] = value

    def _reduced(self, module: Any, protocol: Any) -> Any:
        """Return what `copy` and `pickle` make a copy from."""
        kind: Any = type(module)
        made, arguments, *rest = kind.__reduce_ex__(module, protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = dict(rest[0])
            self._take_back(module, rest[0])
        return (made, arguments, *rest)

    def _take_back(self, lent_to: Any, attributes: dict[str, Any]) -> None:
        # Reversed: if a slot was lent twice, what was there first is what is put back last.
        for module, slot, value in reversed(self._before):
            if module is lent_to:
                attributes.pop(slot, None)
                if value is not _UNSET:
                    attributes[slot] = value

    def release(self) -> None:
        """Take the lent attributes back, so that the module pickles and copies as before."""
        for module in {id(module): module for module, _, _ in self._before}.values():
            self._take_back(module, vars(module))
        self._before = []

    def lend_replica(self, replica: Replica) -> None:
        """Make ``self.device`` and ``self.all_gather`` of a LightningModule those of the replica."""
        if not self.is_lightning:
            return
        for part in self._module.modules():
            # Lightning sets it before the move too, and hooks that run before it may make tensors there.
            if "_device" in vars(part):
                vars(part)["_device"] = replica.device

        def all_gather(data: Any, group: None = None, sync_grads: bool = False) -> Any:
            if group is not None or sync_grads:
                raise UsageError(
                    "group= and sync_grads= are not supported",
                    where="self.all_gather",
                    fix="Leave them out, or use torch_xla's xm.all_gather.",
                )
            return map_tensors(gather, data)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if replica.world_size == 1 else torch.stack(replica.all_gather(tensor))

        self._lend(self._module, "all_gather", all_gather)

    def lend_optimizer(
        self, replica: Replica, optimizer: torch.optim.Optimizer, schedulers: Schedulers
    ) -> None:
        """Make the methods of a LightningModule work that use its optimizer or its schedules."""
        if self.is_lightning:
            found = [config["scheduler"] for config in schedulers.configs]
            self._lend(self._module, "optimizers", lambda **_: optimizer)
            self._lend(self._module, "lr_schedulers", lambda: found[0] if len(found) == 1 else found or None)
            self._lend(self._module, "clip_gradients", partial(self._clip_gradients, replica))

    def _clip_gradients(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = self._view.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or self._view.gradient_clip_algorithm or "norm"
        if not limit:
            return
        if algorithm == "norm":
            replica.clip(optimizer, norm=limit)
        elif algorithm == "value":
            replica.clip(optimizer, value=limit)
        else:
            raise UsageError(
                f"gradient_clip_algorithm={algorithm!r}",
                where="self.clip_gradients",
                fix="Write 'norm' or 'value'.",
            )

    def configure_callbacks(self) -> None:
        """Add the callbacks that ``configure_callbacks`` returns.

        Raises:
            UsageError: one of them is not supported.
        """
        hook = self.hook("configure_callbacks")
        if hook is not None and (made := hook()):
            self._callbacks.add(made if isinstance(made, list | tuple) else [made])
            self._keeps_extra = self.hook("on_train_batch_end") is not None

    def start_training(self, replica: Replica) -> None:
        """Put the module into training mode; a LightningModule's parts keep the mode that they are in."""
        if not self.is_lightning:
            self._module.train()
        elif replica.is_first and (frozen := sum(not part.training for part in self._module.modules())):
            say(f"modules that stay in eval mode: {frozen}; call train() on those to be trained")

    def hook(self, name: str) -> Callable[..., Any] | None:
        """Return the hook `name` if the module or a callback overrides it.

        Most hooks of modules are a LightningModule's only.
        """
        is_known = self.is_lightning or name in PLAIN
        return self._callbacks.before(name, find_hook(self._module, name) if is_known else None)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a hook, such as ``on_train_start``, if the module or a callback overrides it."""
        if hook := self.hook(name):
            hook(*arguments)

    def call_last(self, name: str) -> None:
        """Call a hook in which nothing can be logged any more."""
        with self._accumulator.refusing(name):
            self.call(name)

    @contextmanager
    def evaluating(self, kind: str) -> Iterator[None]:
        """Put the module into eval mode for the block, and every part of it back into its mode afterwards."""
        # Modes are saved by part: a module may keep some of its parts, such as a frozen encoder, in eval
        # mode.
        before = {part: part.training for part in self._module.modules()}
        # A LightningModule may replace both changes of mode, for instance to keep dropout on.
        (self.hook(f"on_{kind}_model_eval") or self._module.eval)()
        yield
        if restore := self.hook(f"on_{kind}_model_train"):
            restore()
        else:
            for part, was_training in before.items():
                part.training = was_training

    def own_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers in the module's attributes, also in lists and dicts."""
        found, values = [], list(vars(self._module).values())
        for value in values:
            if isinstance(value, torch.optim.Optimizer):
                found.append(value)
            elif isinstance(value, list | tuple):
                values.extend(item for item in value if isinstance(item, torch.optim.Optimizer))
            elif isinstance(value, dict):
                values.extend(item for item in value.values() if isinstance(item, torch.optim.Optimizer))
        return found

    def accepts_mask(self, kind: str) -> bool:
        """Return whether ``{kind}_step`` has a parameter ``valid``: the mask of a padded batch."""
        # Only a step that can ignore padding gets padded batches.
        method = getattr(self._module, f"{kind}_step", None)
        return callable(method) and "valid" in inspect.signature(method).parameters

    def loss(self, batch: Any, index: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Call ``training_step`` and return its loss.

        Args:
            batch: the records.
            index: the batch's number in the epoch.
            valid: mask of the records that are not padding.

        Raises:
            UsageError: it did not return a loss that depends on the parameters.
        """
        result = self._call_step("training", batch, index, valid)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise UsageError(
                f"training_step returned {_describe(loss)}",
                where=f"{type(self._module).__name__}.training_step",
                fix="Return the loss: a tensor of one element computed from the parameters, "
                "or a dict with it under 'loss'.",
            )
        # Kept only for a hook that reads it: the values may hold the autograd graph, and with it the step's
        # activations.
        self.extra = dict(result) if self._keeps_extra and isinstance(result, Mapping) else {}
        return loss

    def evaluate(self, kind: str, batch: Any, index: int, valid: torch.Tensor | None = None) -> Any:
        """Call ``validation_step``, ``test_step`` or ``predict_step``; arguments as for `loss`."""
        return self._call_step(kind, batch, index, valid)

    def _call_step(self, kind: str, batch: Any, index: int, valid: Any) -> Any:
        method = getattr(self._module, f"{kind}_step")
        # The signature is read once: this runs for every batch.
        if kind not in self._takes:
            self._takes[kind] = _accepted_arguments(method)
        takes_index, takes_mask = self._takes[kind]
        mask = {"valid": valid} if takes_mask else {}
        return method(batch, index, **mask) if takes_index else method(batch, **mask)

    def has_step(self, kind: str) -> bool:
        """Return whether the module has a ``{kind}_step``."""
        # A LightningModule has a predict_step, which calls its forward.
        is_given = self.is_lightning and kind == "predict"
        return is_given or find_hook(self._module, f"{kind}_step") is not None

    def require(self, kind: str) -> None:
        """Raise an error if the module has no ``{kind}_step``.

        Raises:
            UsageError: it has none.
        """
        if not self.has_step(kind):
            raise UsageError(
                f"{type(self._module).__name__} has no {kind}_step, but was given data for it",
                where=f"the {kind} loader",
                fix=f"Write {kind}_step(self, batch), or pass no {kind} data.",
            )


def _accepted_arguments(method: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether a step takes the batch's number, and whether the mask of real records."""
    parameters = inspect.signature(method).parameters
    takes_mask = "valid" in parameters
    is_variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    return is_variadic or len(parameters) - takes_mask > 1, takes_mask


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor that does not depend on the parameters"
    return f"{value!r}, not a tensor"
