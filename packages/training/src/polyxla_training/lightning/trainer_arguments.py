"""The arguments of Lightning's Trainer that polyxla's does not have, and what to write here.

A test compares the names with the installed Lightning's. Light: imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from polyxla import UsageError

_DEVICES = "Write devices=."
_NONE_MADE = "Leave it out: there is none here."
_SHARDED = "Leave it out: polyxla-sampler divides the records among the replicas."
_REDUCED = "Write reduce_fx= in self.log; its values stay on the device."

FIXES: Mapping[str, str] = {
    # Arguments of the installed Lightning; a test compares them.
    "accumulate_grad_batches": "Write accumulate=.",
    "barebones": "Write progress=False, log_dir=None.",
    "benchmark": "Leave it out: it is for cuDNN.",
    "check_val_every_n_epoch": "Write val_every_n_epochs=.",
    "default_root_dir": "Write log_dir= and checkpoint_dir=.",
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True) in on_fit_start.",
    "deterministic": "Write seed=0.",
    "enable_autolog_hparams": "Leave it out: log_dir has the Trainer's options; log others with self.log.",
    "enable_checkpointing": "Write checkpoint_dir='checkpoints', or leave it out to save none.",
    "enable_model_summary": "Write summary=.",
    "enable_progress_bar": "Write progress=.",
    "gradient_clip_algorithm": "Write clip_norm= or clip_value=.",
    "gradient_clip_val": "Write clip_norm=, or clip_value= for gradient_clip_algorithm='value'.",
    "inference_mode": "Leave it out: evaluations compute no gradients.",
    "logger": "Write log_dir= and loggers=['tensorboard'], or log_dir=None for no files.",
    "max_time": "Set self.trainer.should_stop = True in a hook when the time is over.",
    "min_epochs": "Leave it out: training ends earlier only if self.trainer.should_stop is set.",
    "min_steps": "Leave it out: training ends earlier only if self.trainer.should_stop is set.",
    "model_registry": _NONE_MADE,
    "num_nodes": "Leave it out: start the script on every host; the runtime knows the hosts.",
    "num_sanity_val_steps": _NONE_MADE,
    "overfit_batches": "Write limit_train_batches=; without shuffling, these are the same batches.",
    "plugins": "Write precision= for a precision policy; other plugins are installed, see docs/plugins.md.",
    "profiler": "Write profile_steps=(10, 12).",
    "reload_dataloaders_every_n_epochs": "Leave it out: a loader may change when it is iterated.",
    "sync_batchnorm": "Put torch_xla.core.functions.SyncBatchNorm into the module.",
    "use_distributed_sampler": _SHARDED,
    # Arguments of earlier versions, which scripts for torch_xla still use.
    "amp_backend": "Write precision='bf16-mixed'.",
    "amp_level": "Write precision='bf16-mixed'.",
    "auto_lr_find": _NONE_MADE,
    "auto_scale_batch_size": _NONE_MADE,
    "auto_select_gpus": _DEVICES,
    "checkpoint_callback": "Write checkpoint_dir='checkpoints', or leave it out to save none.",
    "distributed_backend": _DEVICES,
    "early_stop_callback": "Write callbacks=[polyxla_training.EarlyStopping('val_loss')].",
    "gpus": _DEVICES,
    "hpus": _DEVICES,
    "ipus": _DEVICES,
    "move_metrics_to_cpu": _REDUCED,
    "multiple_trainloader_mode": "Leave it out: there is one loader.",
    "num_processes": _DEVICES,
    "num_tpu_cores": _DEVICES,
    "prepare_data_per_node": "Set it in the module or data module.",
    "progress_bar_refresh_rate": "Write progress=.",
    "replace_sampler_ddp": _SHARDED,
    "resume_from_checkpoint": "Write resume=.",
    "stochastic_weight_avg": "Use torch.optim.swa_utils in the module.",
    "terminate_on_nan": "Leave it out: a line reports NaN.",
    "tpu_cores": _DEVICES,
    "track_grad_norm": "Log it with self.log in on_before_optimizer_step.",
    "weights_save_path": "Write checkpoint_dir=.",
    "weights_summary": "Write summary=.",
}
"""Argument of Lightning's Trainer: what to write in polyxla's."""

METHOD_FIXES: Mapping[str, str] = {
    "ckpt_path": "For fit: Trainer(resume=...). Else: module.load_state_dict(load(path)['module']).",
    "dataloaders": "Write data=.",
    "model": "Write module=, or pass it first without a name.",
    "return_predictions": "Leave it out: they are returned.",
    "test_dataloaders": "Write data=.",
    "train_dataloader": "Write train=.",
    "train_dataloaders": "Write train=.",
    "val_dataloaders": "Write val=.",
    "verbose": "Leave it out: the metrics are returned.",
    "weights_only": "Leave it out: a checkpoint holds no code.",
}
"""Argument of the methods of Lightning's Trainer: what to write here."""


def check_names(where: str, given: Iterable[str], known: Iterable[str], fixes: Mapping[str, str]) -> None:
    """Refuse arguments that do not exist.

    Args:
        where: what they were passed to.
        given: their names, which may have their values.
        known: the names that exist.
        fixes: what to write for Lightning's names.

    Raises:
        UsageError: a name is not known.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        if name in fixes:
            fix = fixes[name]
            # The number of cores, chips or processes that the script asks for is the number of devices here.
            if fix is _DEVICES and isinstance(given, Mapping):
                fix = f"Write devices={given[name]!r}."
            raise UsageError(f"{name} is Lightning's", where=f"{where}({name}=...)", fix=fix)
        # A name of Lightning's may be misspelt too, and its fix is more useful than the name.
        near = difflib.get_close_matches(name, [*known, *fixes], n=1)
        fix = fixes.get(near[0], f"Write {near[0]}=.") if near else f"Write one of {', '.join(known)}."
        raise UsageError(f"there is no option {name!r}", where=f"{where}({name}=...)", fix=fix)
