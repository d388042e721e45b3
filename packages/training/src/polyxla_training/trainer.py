"""`Trainer`: training without writing the loop, on `polyxla.launch` and `Replica` alone."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.console import say, say_once
from polyxla.contracts.job import StartMethod
from polyxla.errors import UsageError
from polyxla.launcher.launch import launch
from polyxla_training.settings import FitSettings
from polyxla_training.stop_request import passed_on

if TYPE_CHECKING:
    from polyxla.contracts.precision import Precision
    from polyxla_training.loop import Outcome

STRATEGIES = ("auto", "debug")
"""``debug`` trains like ``auto`` and prints the runtime's own report afterwards."""


class Trainer:
    """Trains any module that has ``training_step`` and ``configure_optimizers``.

    ``validation_step``, ``test_step`` and ``on_post_move_to_device`` are used where the module has
    them, so a LightningModule works as it is. What is not given is taken from the environment, as in
    `polyxla.launch`.

    Args:
        accelerator: ``"auto"``, or the kind of device to insist on (``"cpu"``, ``"tpu"``).
        devices: ``"auto"``, a count (``8`` or ``"8"``), or indices (``[5]`` is the device with index 5).
        precision: a precision policy's name, or the policy itself.
        strategy: ``"auto"`` or ``"debug"``.
        max_epochs: passes over the training data.
        max_steps: optimizer updates after which training ends even within an epoch.
        runtime: a runtime's name; default: chosen from the environment.
        start_method: as in `polyxla.launch`.
        log_dir: where TensorBoard's files go; ``"auto"`` is a new folder under ``runs`` where
            TensorBoard is installed, None writes none.
        log_every_n_steps: how often logged tensors are read, which waits for the device.
        progress: whether to show progress on standard error.
        accumulate: batches whose gradients make one optimizer update; an epoch's last takes what is left.
        clip_norm: the largest norm of all gradients together, after they are averaged over the replicas.
        clip_value: the largest absolute value of a gradient's element.
        seed: where every replica's random numbers come from, and the order of the records; default: as torch
            was seeded, and the order of seed 0.
        prefetch: how far to copy batches ahead, such as ``{"loader_prefetch_size": 4}``; see
            `Replica.loader`.
        checkpoint_dir: where the whole state is saved at the end of each epoch and when the process is told
            to end (SIGTERM); None saves nothing.
        save_every_n_steps: how often it is saved besides.
        keep: how many checkpoints stay; None for all.
        resume: ``"auto"`` goes on from the newest whole checkpoint of `checkpoint_dir`, where there is one; a
            path from that one.
        profile_steps: the first and the last step of which ordinal 0 writes a profile into `log_dir`.
        compile_budget: programs that may be compiled after the first two steps (three under torch.compile)
            and the first evaluation; None for any number.
        on_budget: ``"warn"`` or ``"raise"``, when there are more.

    Attributes:
        metrics: the last numbers of `fit` or `test`, by name.
        outcome: the whole of the last run: epochs, steps, runtime, device, world size.

    Raises:
        UsageError: an argument cannot be used.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        devices: int | str | Sequence[int] = "auto",
        precision: str | int | Precision | None = None,
        strategy: str = "auto",
        max_epochs: int = 1,
        *,
        max_steps: int | None = None,
        runtime: str | None = None,
        start_method: StartMethod = "auto",
        log_dir: str | None = "auto",
        log_every_n_steps: int = 50,
        progress: bool = True,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        seed: int | None = None,
        prefetch: Mapping[str, int] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_every_n_steps: int | None = None,
        keep: int | None = 2,
        resume: str | os.PathLike[str] | None = None,
        profile_steps: tuple[int, int] | None = None,
        compile_budget: int | None = None,
        on_budget: str = "warn",
    ) -> None:
        if strategy not in STRATEGIES:
            raise UsageError(
                f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}",
                where="Trainer",
                fix="Leave it out: replicas, and how they start, come from devices= and the runtime.",
            )
        counts = {"max_epochs": max_epochs, "log_every_n_steps": log_every_n_steps, "accumulate": accumulate}
        limits = {"max_steps": max_steps, "save_every_n_steps": save_every_n_steps, "keep": keep}
        for name, count in (
            counts | {name: limit for name, limit in limits.items() if limit is not None}
        ).items():
            _check_positive(name, count)
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            _check_limit(name, limit)
        if profile_steps is not None and not 1 <= profile_steps[0] <= profile_steps[1]:
            raise UsageError(
                f"profile_steps={profile_steps!r} are no first and last step",
                where="Trainer",
                fix="Write profile_steps=(10, 12).",
            )
        if resume == "auto" and checkpoint_dir is None:
            raise UsageError(
                "resume='auto' goes on from the newest checkpoint of a folder, and there is none",
                where="Trainer",
                fix="Write checkpoint_dir='checkpoints' too, or the checkpoint's own path.",
            )
        self._launch = {
            "accelerator": accelerator,
            "devices": devices,
            "precision": precision,
            "runtime": runtime,
            "start_method": start_method,
        }
        self._how = {
            "max_epochs": max_epochs,
            "max_steps": max_steps,
            "strategy": strategy,
            "log_every_n_steps": log_every_n_steps,
            "progress": progress,
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "seed": seed,
            "prefetch": dict(prefetch or {}),
            "checkpoint_dir": None if checkpoint_dir is None else os.fspath(checkpoint_dir),
            "save_every_n_steps": save_every_n_steps,
            "keep": keep,
            "resume": None if resume is None else os.fspath(resume),
            "profile_steps": profile_steps,
            "compile_budget": compile_budget,
            "on_budget": on_budget,
        }
        self._log_dir = log_dir
        self.metrics: dict[str, float] = {}
        self.outcome: Outcome | None = None

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
        needed = ["training_step", "configure_optimizers"]
        return self._run("run_fit", module, (train, val), needed, self._new_log_dir())

    def test(self, module: Any, data: Iterable[Any] | None = None) -> dict[str, float]:
        """Run the module's ``test_step`` over `data` and return the means of what it logged."""
        return self._run("run_test", module, (data,), ["test_step"], None)

    def _run(
        self, loop: str, module: Any, loaders: tuple[Any, ...], needed: list[str], log_dir: str | None
    ) -> dict[str, float]:
        # The loop imports torch, which `import polyxla` must not.
        import polyxla_training.loop
        from polyxla_training.module_adapter import check_module

        check_module(module, needed)
        how = FitSettings(**self._how, log_dir=log_dir, parent_pid=os.getpid())  # type: ignore[arg-type]
        with passed_on(how.checkpoint_dir):
            outcomes = launch(getattr(polyxla_training.loop, loop), (module, *loaders, how), **self._launch)  # type: ignore[arg-type]
        self.outcome = outcomes[0]
        if outcomes[0].state is not None:
            module.load_state_dict(outcomes[0].state)
        self.metrics = outcomes[0].metrics
        if outcomes[0].stopped:
            say(f"ended by {outcomes[0].stopped} after step {outcomes[0].steps}, which is saved")
            # What the process was told, now that nothing is lost by it.
            signal.raise_signal(signal.SIGTERM)
        return self.metrics

    def _new_log_dir(self) -> str | None:
        if self._log_dir != "auto":
            return self._log_dir
        if importlib.util.find_spec("tensorboard") is None:
            say_once(
                "TensorBoard is not installed, so nothing is logged: pip install 'polyxla-core[tensorboard]'"
            )
            return None
        return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{name}={value!r} is not a whole number from 1", where="Trainer", fix=f"Write {name}=1."
        )


def _check_limit(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise UsageError(
            f"{name}={value!r} is not a number above 0",
            where="Trainer",
            fix=f"Write {name}=1.0, or leave it out.",
        )
