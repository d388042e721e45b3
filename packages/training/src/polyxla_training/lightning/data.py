"""The sources of a training's batches: loaders, a module's methods or a data module, and their hooks.

Heavy: imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyxla import Replica, UsageError
from polyxla.plugin import Loader
from polyxla_training.lightning.callbacks import LightningCallbacks
from polyxla_training.lightning.hooks import find_hook, is_module, is_overridden
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.long_work import run_while_others_wait


class Data:
    """The data of one call of a method of the Trainer, in one replica.

    Args:
        replica: the replica.
        module: the module; its methods are used without a data module.
        datamodule: an object with ``train_dataloader`` and the other hooks of a LightningDataModule, or None.
        stage: the method's name, as Lightning's hooks receive it.
        view: what the data module sees as ``self.trainer``, until `release`.
        callbacks: Lightning's Callback objects, which have ``setup``, ``teardown`` and ``on_exception`` too.

    Attributes:
        after_transfer: the hook ``on_after_batch_transfer``, if it is overridden.
    """

    def __init__(
        self,
        replica: Replica,
        module: Any,
        datamodule: Any,
        stage: str,
        view: TrainerView,
        callbacks: LightningCallbacks,
    ) -> None:
        self._replica, self._callbacks = replica, callbacks
        self._module = module
        self._datamodule = datamodule
        self._stage = stage
        # In Lightning's order. A module that is not a LightningModule may use the hooks' names for anything.
        self._owners = [
            owner for owner in (datamodule, module if is_module(module) else None) if owner is not None
        ]
        self.after_transfer = self._transfer_hook("on_after_batch_transfer")
        if datamodule is not None:
            self._trainer_before = getattr(datamodule, "trainer", None)
            datamodule.trainer = view

    def release(self) -> None:
        """Take ``trainer`` back from the data module."""
        if self._datamodule is not None:
            self._datamodule.trainer = self._trainer_before

    def prepare(self) -> None:
        """Call ``prepare_data`` in one process of each host, and wait until all have ended. A collective."""
        world = self._replica.world
        for owner in self._owners:
            hook = find_hook(owner, "prepare_data")
            if hook is None:
                continue
            is_per_host = getattr(owner, "prepare_data_per_node", True)
            is_mine = world.local_ordinal == 0 if is_per_host else world.ordinal == 0
            run_while_others_wait(self._replica, hook if is_mine else lambda: None)

    def set_up(self) -> None:
        """Call ``setup`` of the data module, the callbacks and the module."""
        self._call_with_stage("setup")

    def tear_down(self) -> None:
        """Call ``teardown`` of the data module, the callbacks and the module."""
        self._call_with_stage("teardown")

    def _call_with_stage(self, name: str) -> None:
        hooks = [find_hook(owner, name) for owner in self._owners]
        # In Lightning's order: after the data module's.
        hooks.insert(0 if self._datamodule is None else 1, self._callbacks.hook(name))
        for hook in hooks:
            if hook is not None:
                hook(self._stage)

    def report_error(self, error: BaseException) -> None:
        """Call ``on_exception`` of the callbacks and of the data module."""
        if hook := self._callbacks.hook("on_exception"):
            hook(error)
        if self._datamodule is not None and (hook := find_hook(self._datamodule, "on_exception")):
            hook(error)

    def find(self, loader: Any, method: str) -> Iterable[Any] | None:
        """Return the loader that was passed, or else what `method` of the data module or module makes."""
        return resolve_loader(self._module if self._datamodule is None else self._datamodule, loader, method)

    def load(self, data: Iterable[Any], **options: Any) -> Loader:
        """Return ``replica.loader(data, **options)``, with the hooks of the batches' transfer."""
        before, transfer = (
            self._transfer_hook(name) for name in ("on_before_batch_transfer", "transfer_batch_to_device")
        )
        if before is None and transfer is None:
            return self._replica.loader(data, **options)

        def to_device(batch: Any) -> Any:
            if before is not None:
                batch = before(batch, 0)
            if transfer is not None:
                return transfer(batch, self._replica.device, 0)
            return self._replica.to_device(batch)

        return self._replica.loader(data, transfer=to_device, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's state, if it has any."""
        hook = find_hook(self._datamodule, "state_dict") if self._datamodule is not None else None
        state: dict[str, Any] = hook() if hook else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        if state and (hook := find_hook(self._datamodule, "load_state_dict")):
            hook(state)

    def _transfer_hook(self, name: str) -> Callable[..., Any] | None:
        # The data module's hook takes precedence over the module's, as in Lightning.
        return next((hook for owner in self._owners if (hook := find_hook(owner, name))), None)


def divisible_by_batches(loader: Any) -> Any:
    """Return a loader of the same batches, of which each replica receives every n-th, whole.

    The predictions then have the order of the batches. An iterable dataset is still divided by records.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_size is None or loader.batch_sampler is None:
        return loader
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
        "in_order",
    )
    # The batch sampler goes in as it is. polyxla-sampler then divides its batches, not the records in them.
    arguments = {name: getattr(loader, name) for name in names}
    # A subclass may change the batches, unless its constructor takes arguments that are unknown here.
    kind = type(loader) if type(loader).__init__ is DataLoader.__init__ else DataLoader
    return kind(loader.dataset, batch_sampler=loader.batch_sampler, **arguments)


def resolve_loader(source: Any, loader: Any, method: str) -> Iterable[Any] | None:
    """Return the loader that was passed, or else the one that `method` of the module or data module makes.

    Raises:
        UsageError: it is a dataset, whose single records would be taken for batches, or several loaders.
    """
    if loader is None:
        made = getattr(source, method, None)
        loader = made() if callable(made) and is_overridden(source, method) else None
    # An IterableDataset is accepted: it may yield batches.
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"{type(loader).__name__} is a dataset, not a loader of batches",
            where=f"the argument in place of {method}",
            fix="Write DataLoader(dataset, batch_size=32) from torch.utils.data.",
        )
    several = (
        loader.values() if isinstance(loader, dict) else loader if isinstance(loader, list | tuple) else ()
    )
    if any(isinstance(item, DataLoader) for item in several):
        raise UsageError(
            f"there are {len(several)} loaders",
            where=f"the argument in place of {method}",
            fix="Pass one, such as a DataLoader of a torch.utils.data.ConcatDataset or StackDataset.",
        )
    found: Iterable[Any] | None = loader
    return found
