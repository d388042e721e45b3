"""What attributes of Fabric and of Accelerate are called here, for the error about a missing one."""

from __future__ import annotations

from collections.abc import Mapping

_HOST = "replica.world.host_index"
_LOADER = "replica.loader(loader)"
_LOGGED = 'replica.step(optimizer, {"loss": loss})'
_ONCE = "nothing: replica.step averages the gradients, once"
_SAVE = "polyxla_training.save(state, path), if replica.is_first"
_LOAD = "polyxla_training.load(path)"
_SETUP = "model = replica.setup(model, optimizer)"
_DIVIDED = 'model = replica.setup(model, optimizer, mesh={"fsdp": 4})'
_CLIPPED = "replica.step(optimizer, clip_norm=1.0)"
_FIRST = "replica.is_first"
_LOCAL = "replica.world.local_ordinal"

OTHER_NAMES: Mapping[str, str] = {
    # Tests compare them with those of the installed Fabric.
    "accelerator": "replica.kind",
    "autocast": "with replica.precision.forward_context()",
    "backward": "loss.backward()",
    "call": "replica.hook.NAME()",
    "clip_gradients": _CLIPPED,
    "global_rank": "replica.ordinal",
    "init_module": "with torch.device('meta'): model = Net(), and replica.setup with a mesh",
    "init_tensor": "torch.zeros(2, device=replica.device)",
    "is_global_zero": _FIRST,
    "launch": "polyxla.launch(train)",
    "load": _LOAD,
    "load_raw": _LOAD,
    "local_rank": _LOCAL,
    "log": _LOGGED,
    "log_dict": _LOGGED,
    "logger": _LOGGED,
    "loggers": _LOGGED,
    "no_backward_sync": _ONCE,
    "node_rank": _HOST,
    "rank_zero_first": "if replica.is_first: ..., then replica.barrier()",
    "run": "polyxla.launch(train)",
    "save": _SAVE,
    "setup_dataloaders": _LOADER,
    "setup_module": _SETUP,
    "setup_optimizers": _SETUP,
    "sharded_model": _DIVIDED,
    "strategy": _DIVIDED,
    # Tests look whether the installed Accelerate has them.
    "accumulate": _ONCE,
    "clip_grad_norm_": _CLIPPED,
    "clip_grad_value_": "replica.step(optimizer, clip_value=1.0)",
    "gather": "replica.all_gather(value)",
    "gather_for_metrics": "replica.all_reduce(value)",
    "is_local_main_process": f"{_LOCAL} == 0",
    "is_main_process": _FIRST,
    "load_state": _LOAD,
    "local_process_index": _LOCAL,
    "no_sync": _ONCE,
    "num_processes": "replica.world_size",
    "prepare": f"{_SETUP}, and {_LOADER}",
    "prepare_data_loader": _LOADER,
    "prepare_model": _SETUP,
    "prepare_optimizer": _SETUP,
    "process_index": "replica.ordinal",
    "save_state": _SAVE,
    "sync_gradients": _ONCE,
    "unwrap_model": "model: replica.setup returns the module itself",
    "wait_for_everyone": "replica.barrier()",
}
"""Name there: what to write here. `Replica` has neither the one nor anything else of that name."""
