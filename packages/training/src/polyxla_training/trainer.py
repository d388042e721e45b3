"""`Trainer`: training without writing the loop, built on `polyxla.launch` and `Replica` alone."""

from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.console import say, say_once
from polyxla.errors import pip_install
from polyxla.launcher.launch import launch
from polyxla_training.options import FitOptions, LaunchOptions, TrainerOptions
from polyxla_training.stop_request import forward_sigterm

if TYPE_CHECKING:
    from polyxla_training.loop import Outcome


class Trainer(TrainerOptions):
    """Trains any module that has ``training_step`` and ``configure_optimizers``.

    ``validation_step``, ``test_step`` and ``on_post_move_to_device`` are used if the module has them, so a
    LightningModule works unchanged. Options that are not given come from the environment, as in
    `polyxla.launch`.

    Attributes:
        metrics: the latest metrics of `fit` or `test`, by name.
        outcome: the result of the last run: epochs, steps, runtime, device, world size.
    """

    metrics: dict[str, float]
    outcome: Outcome | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics = {}
        self.outcome = None

    def fit(
        self, module: Any, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None
    ) -> dict[str, float]:
        """Train `module`; afterwards it is on the host and holds the trained parameters.

        Args:
            module: has ``training_step(batch[, index])`` and ``configure_optimizers()``.
            train: the training batches; default: the module's ``train_dataloader()``.
            val: the validation batches, run after each epoch; default: ``val_dataloader()`` or none.

        Returns:
            The last epoch's metrics: means over all replicas' records, by name.

        Raises:
            UsageError: nothing was started, or the module's steps cannot be trained on.
            Exception: what the module or the loaders raised.
        """
        # The loop imports torch, which `import polyxla_training` must not.
        from polyxla_training.loop import run_fit

        required = ["training_step", "configure_optimizers"]
        return self._run(run_fit, module, (train, val), required, self._new_log_dir())

    def test(self, module: Any, data: Iterable[Any] | None = None) -> dict[str, float]:
        """Run the module's ``test_step`` over `data` and return the means of its logged values."""
        from polyxla_training.loop import run_test

        return self._run(run_test, module, (data,), ["test_step"], None)

    def _run(
        self,
        main: Callable[..., Outcome],
        module: Any,
        loaders: tuple[Any, ...],
        required: list[str],
        log_dir: str | None,
    ) -> dict[str, float]:
        from polyxla_training.module_adapter import check_module

        check_module(module, required)
        options = self.fit_options(log_dir)
        with forward_sigterm(options.checkpoint_dir):
            outcomes = launch(main, (module, *loaders, options, os.getpid()), **self.launch_options())
        # Metrics are the same in all; the parameters come from one of them.
        self.outcome = outcome = next((one for one in outcomes if one.state is not None), outcomes[0])
        if outcome.state is not None:
            module.load_state_dict(outcome.state)
        self.metrics = outcome.metrics
        if outcome.stopped:
            say(f"ended by {outcome.stopped} after step {outcome.steps}, which is saved")
            # The state is safe: now act on the signal that was held back.
            signal.raise_signal(signal.SIGTERM)
        return self.metrics

    def _new_log_dir(self) -> str | None:
        if self.log_dir != "auto":
            return self.log_dir
        if importlib.util.find_spec("tensorboard") is None:
            say_once(
                "TensorBoard is not installed, so nothing is logged: "
                f"{pip_install('polyxla-training[tensorboard]')}"
            )
            return None
        return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


# help(Trainer) includes the descriptions of the options, which are written once, in options.py.
Trainer.__doc__ = "\n\n".join(
    inspect.cleandoc(one.__doc__ or "") for one in (Trainer, LaunchOptions, FitOptions)
)
