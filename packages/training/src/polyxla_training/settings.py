"""What a Trainer was told, as it travels to the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FitSettings:
    """One call's settings. Light: listeners read it without torch.

    Attributes:
        max_epochs: passes over the training data.
        max_steps: optimizer updates after which training ends; None for no such limit.
        strategy: ``auto`` or ``debug``.
        log_dir: where this run's files go; None for none.
        log_every_n_steps: how often logged tensors are read, which waits for the device.
        progress: whether to show progress.
        parent_pid: the launching process, to know whether its module is trained in place.
        accumulate: micro-steps, each a batch, whose gradients make one optimizer update.
        clip_norm: the largest norm of all gradients together; None to leave them.
        clip_value: the largest absolute value of a gradient's element; None to leave them.
        seed: where every replica's random numbers come from; None for whatever they are.
        prefetch: how far to copy batches ahead, in the runtime's own words.
        save_every_n_steps: how often the state is saved; None for at the end of each epoch only.
        checkpoint_dir: where; None for nowhere.
        keep: how many checkpoints stay; None for all.
        resume: ``auto`` for the newest whole checkpoint of `checkpoint_dir` where there is one, or a path.
        profile_steps: the first and the last step to profile; None for none.
        compile_budget: programs that may be compiled after the first step; None for any number.
        on_budget: ``warn`` or ``raise``, when there are more.
    """

    max_epochs: int
    max_steps: int | None
    strategy: str
    log_dir: str | None
    log_every_n_steps: int
    progress: bool
    parent_pid: int
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    seed: int | None = None
    prefetch: Mapping[str, int] = field(default_factory=dict)
    save_every_n_steps: int | None = None
    checkpoint_dir: str | None = None
    keep: int | None = 2
    resume: str | None = None
    profile_steps: tuple[int, int] | None = None
    compile_budget: int | None = None
    on_budget: str = "warn"
