"""`Trainer`: training without writing the loop, built on `polyxla.launch` and `Replica` alone."""

from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla import UsageError, launch
from polyxla.plugin import pip_install, say, say_once, tensors_in
from polyxla_training.checkpoint.stop_signal import SIGNALLED, forward_signals
from polyxla_training.lightning.callbacks import check_callbacks
from polyxla_training.lightning.hooks import (
    DataModule,
    check_datamodule,
    check_module,
    find_hook,
    is_data_module,
    is_module,
)
from polyxla_training.lightning.trainer_arguments import FIXES, METHOD_FIXES, check_names
from polyxla_training.loop.call import Stage, TrainerCall, TrainerOutcome, merge_predictions
from polyxla_training.options import FitOptions, LaunchOptions, TrainerOptions

EVALUATION_NAMES = ("module", "data", "datamodule")
"""Arguments of `Trainer.validate`, `Trainer.test` and `Trainer.predict`."""


class Trainer(TrainerOptions):
    """Trains any module that has ``training_step`` and ``configure_optimizers``.

    ``validation_step``, ``test_step``, ``predict_step`` and ``on_post_move_to_device`` are used if the module
    has them, so a LightningModule works unchanged. Options that are not given come from the environment, as
    in `polyxla.launch`.

    Attributes:
        metrics: the latest metrics of `fit`, `validate`, `test` or `predict`, by name.
        outcome: the result of the last run: epochs, steps, runtime, device, world size.
    """

    metrics: dict[str, float]
    outcome: TrainerOutcome | None

    # Type checkers see the dataclass's own, with the options.
    if not TYPE_CHECKING:

        @wraps(TrainerOptions.__init__)
        def __init__(self, *values: Any, **options: Any) -> None:
            known = [field.name for field in fields(TrainerOptions) if field.init]
            check_names("Trainer", options, known, FIXES)
            super().__init__(*values, **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callbacks(self.callbacks)
        self.metrics = {}
        self.outcome = None

    def fit(
        self,
        module: Any,
        train: Iterable[Any] | DataModule | None = None,
        val: Iterable[Any] | None = None,
        datamodule: Any = None,
        **unknown: Any,
    ) -> dict[str, float]:
        """Train `module`; afterwards it is on the host and holds the trained parameters.

        Args:
            module: has ``training_step(batch[, index])`` and ``configure_optimizers()``.
            train: the training batches, or a LightningDataModule; default: the module's
                ``train_dataloader()``.
            val: the validation batches, run after each epoch; default: ``val_dataloader()`` or none.
            datamodule: a LightningDataModule, or another object with ``train_dataloader()``, in place of
                `train` and `val`.
            unknown: refused.

        Returns:
            The last epoch's metrics: means over all replicas' records, by name.

        Raises:
            UsageError: nothing was started, or the module's steps cannot be trained on.
            Exception: what the module or the loaders raised.
        """
        check_names("Trainer.fit", unknown, ("module", "train", "val", "datamodule"), METHOD_FIXES)
        required = ["training_step", "configure_optimizers"]
        return self._run("fit", module, (train, val), datamodule, required)

    def test(
        self,
        module: Any,
        data: Iterable[Any] | DataModule | None = None,
        datamodule: Any = None,
        **unknown: Any,
    ) -> dict[str, float]:
        """Run the module's ``test_step`` over `data` and return the means of its logged values.

        Args:
            module: has ``test_step(batch[, index])``.
            data: the batches, or a LightningDataModule; default: the module's ``test_dataloader()``.
            datamodule: as for `fit`, with ``test_dataloader()``.
            unknown: refused.
        """
        check_names("Trainer.test", unknown, EVALUATION_NAMES, METHOD_FIXES)
        return self._run("test", module, (data,), datamodule, ["test_step"])

    def validate(
        self,
        module: Any,
        data: Iterable[Any] | DataModule | None = None,
        datamodule: Any = None,
        **unknown: Any,
    ) -> dict[str, float]:
        """Run the module's ``validation_step`` over `data` and return the means of its logged values.

        Args:
            module: has ``validation_step(batch[, index])``.
            data: the batches, or a LightningDataModule; default: the module's ``val_dataloader()``.
            datamodule: as for `fit`, with ``val_dataloader()``.
            unknown: refused.
        """
        check_names("Trainer.validate", unknown, EVALUATION_NAMES, METHOD_FIXES)
        return self._run("validate", module, (data,), datamodule, ["validation_step"])

    def predict(
        self,
        module: Any,
        data: Iterable[Any] | DataModule | None = None,
        datamodule: Any = None,
        **unknown: Any,
    ) -> list[Any]:
        """Run the module's ``predict_step`` over `data` and return what it returns, for each batch.

        With several replicas, each predicts every n-th batch of a DataLoader, and the list has the loader's
        order. Records of an iterable dataset are divided one by one: the batches are those of the replicas in
        turn. Of replicas on other hosts, or that torchrun started in other processes, the predictions stay
        there.

        Args:
            module: has ``predict_step(batch[, index])``. A LightningModule's own one calls its ``forward``.
            data: the batches, or a LightningDataModule; default: the module's ``predict_dataloader()``.
            datamodule: as for `fit`, with ``predict_dataloader()``.
            unknown: refused.

        Returns:
            The predictions on the host, in float32 if the precision policy computes in less; without those of
            padding, if the step takes ``valid``.
        """
        check_names("Trainer.predict", unknown, EVALUATION_NAMES, METHOD_FIXES)
        self._run("predict", module, (data,), datamodule, ["predict_step"])
        return self.outcome.predictions if self.outcome else []

    def _run(
        self,
        stage: Stage,
        module: Any,
        loaders: tuple[Any, ...],
        datamodule: Any,
        required: list[str],
    ) -> dict[str, float]:
        # Imported here: it imports torch, which `import polyxla_training` must not.
        from polyxla_training.loop.training import run

        check_module(module, required)
        if is_data_module(loaders[0]):
            # As in Lightning, a data module may be passed in the place of the first loader.
            datamodule, loaders = loaders[0], (None, *loaders[1:])
        check_datamodule(datamodule, loaders)
        options = self.fit_options(self._new_log_dir() if stage == "fit" else None)
        # The process id tells replicas whether they run in this process, and so train the caller's own
        # module.
        call = TrainerCall(stage, module, loaders, datamodule, options, os.getpid())
        # Only a fit saves on a signal; an evaluation has nothing to save, and ends at once.
        with forward_signals(options.checkpoint_dir if stage == "fit" else None) as asked:
            outcomes: list[TrainerOutcome] = launch(run, (call,), **self.launch_options())
        # Metrics are the same in all outcomes; one of them has the parameters.
        outcome = next((outcome for outcome in outcomes if outcome.state is not None), outcomes[0])
        if outcome.state is not None:
            _take_state(module, outcome.state)
        self.metrics = outcome.metrics
        self.outcome = replace(outcome, predictions=merge_predictions(outcomes))
        if outcome.stopped == SIGNALLED:
            # If this process has received none, another host's launcher has.
            number = asked.received or signal.SIGTERM
            say(f"ended by {number.name} after step {outcome.steps}, which is saved")
            # The state is safe: now act on the signal that was held back.
            asked.raise_signal(number)
        elif outcome.stopped:
            say(f"training ended after step {outcome.steps}: {outcome.stopped}")
        return self.metrics

    def _new_log_dir(self) -> str | None:
        if self.log_dir != "auto":
            return self.log_dir
        if self.loggers is None and importlib.util.find_spec("tensorboard") is None:
            say_once(
                "TensorBoard is not installed, so nothing is logged: "
                f"{pip_install('polyxla-training[tensorboard]')}"
            )
            return None
        return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def _take_state(module: Any, state: Mapping[str, Any]) -> None:
    """Load parameters that were trained in another process into the caller's module.

    Raises:
        UsageError: the module was given other layers there.
    """
    # Layers that configure_model makes exist only in the replicas' copies so far.
    hook = find_hook(module, "configure_model") if is_module(module) else None
    if hook and set(state) != set(module.state_dict()):
        # The replicas have called it on their copies, and not on this module.
        hook()
    if other := sorted(set(state) ^ set(module.state_dict())):
        raise UsageError(
            f"the replicas' modules and the caller's differ in {', '.join(other[:3])}",
            where=f"{type(module).__name__}.setup",
            fix="Make all layers in __init__ or in configure_model.",
        )
    # A module on the meta device has nothing to copy into. The extra state of a module may be any object.
    module.load_state_dict(state, assign=any(tensor.is_meta for tensor in tensors_in(module.state_dict())))


# help(Trainer) includes the descriptions of the options, which are written once, in options.py.
Trainer.__doc__ = "\n\n".join(
    inspect.cleandoc(described.__doc__ or "") for described in (Trainer, LaunchOptions, FitOptions)
)
