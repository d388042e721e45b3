"""What Accelerate, and transformers' Trainer that trains through it, lack for the device `tpu`.

Accelerate 1.15 knows no TorchTPU: processes of torchrun each train alone (`DistributedType.NO`), on the CPU.
`polyxla_torchtpu.before_torch` calls `teach` when a program has imported accelerate or transformers' Trainer.
Nothing here opens a device before the program asks Accelerate for one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

from polyxla import UsageError
from polyxla.plugin import EmulatedTpu, attached_chips, snapshot, tpu_env
from polyxla_torchtpu.framework import BACKEND

TESTED = "1.15"
"""The release of Accelerate that the tests run with: what is changed below are its private parts."""
TRAINER_METHODS = ("_save_rng_state", "_load_rng_state", "_move_model_to_device")
"""The private methods of transformers' Trainer that are changed."""
_OWN_DEVICE = 0
"""TorchTPU's index of a process's only device, whatever its local rank."""


def teach(module: ModuleType) -> None:
    """Change a module that was imported just now, one of those in `MODULES`, for the device tpu."""
    MODULES[module.__name__](module)


def _teach_accelerate(module: Any) -> None:
    state = module.state.PartialState
    if _is_tested(version := importlib.metadata.version("accelerate")):
        _teach_state(state, module.DistributedType)
        _teach_utilities(module.utils)
        _teach_preparation(module.Accelerator, state)
        _teach_checkpoints(module.accelerator)
        return
    fix = f"pip install 'accelerate=={TESTED}.*', or Accelerator(cpu=True)"
    _refuse(state, f"accelerate {version}", fix, lambda cpu=False, **_: cpu)


def _teach_transformers(module: Any) -> None:
    trainer = module.Trainer
    if all(hasattr(trainer, method) for method in TRAINER_METHODS):
        _teach_trainer(trainer)
        return
    release = f"transformers {importlib.metadata.version('transformers')}"
    fix = "pip install 'transformers==5.24.*', or TrainingArguments(use_cpu=True)"
    _refuse(trainer, release, fix, lambda _model=None, args=None, **_: args is not None and args.use_cpu)


def _is_tested(version: str) -> bool:
    return version.startswith(f"{TESTED}.")


def uses_tpu(cpu: bool = False) -> bool:
    """Return whether Accelerate is to use TorchTPU's device, unless the program asks for the CPU."""
    device = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type == "tpu"


def _refuse(owner: Any, release: str, fix: str, is_on_cpu: Callable[..., bool]) -> None:
    """Refuse a release that was not tested, once a program trains on a TPU with it; others only import it."""
    created = owner.__init__

    @functools.wraps(created)
    def init(self: Any, *args: Any, **options: Any) -> None:
        if uses_tpu(is_on_cpu(*args, **options)):
            raise UsageError(
                f"{release} was not tested on TorchTPU, and may train each process alone or resume wrongly",
                where=f"{owner.__module__}.{owner.__name__}",
                fix=f"Write {fix} for the CPU.",
            )
        created(self, *args, **options)

    owner.__init__ = init


def _teach_state(state: Any, members: Any) -> None:
    prepare, place, wait = state._prepare_backend, state.set_device, state.wait_for_everyone

    @functools.wraps(prepare)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        # Accelerate asks the packages of each vendor, and calls what none of them claims a single process.
        # ACCELERATE_TORCH_DEVICE may have chosen another device.
        is_others = self.device is not None and self.device.type != "tpu"
        if tpu_env.LOCAL_RANK in snapshot() and not is_others and uses_tpu(cpu):
            # Its enumeration cannot be extended. What Accelerate does for this member is right for any device
            # of torch.distributed; for MULTI_GPU, it and programs call torch.cuda.
            return BACKEND, members.MULTI_NEURON
        return prepare(self, cpu, sagemaker_dp, backend)

    @functools.wraps(place)
    def set_device(self: Any) -> None:
        if self.device is None and uses_tpu(self._cpu):
            self.device = torch.device("tpu", _OWN_DEVICE)
        place(self)

    @functools.wraps(wait)
    def wait_for_everyone(self: Any) -> None:
        if self.backend == BACKEND:
            # Accelerate names the local rank. TorchTPU refuses all but the process's own device.
            dist.barrier(device_ids=[_OWN_DEVICE])
        else:
            wait(self)

    state._prepare_backend = prepare_backend
    state.set_device = set_device
    state.wait_for_everyone = wait_for_everyone


def _teach_utilities(module: Any) -> None:
    operations = module.operations
    gather, is_fp16_available = operations._gpu_gather, module.is_fp16_available

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.clone()[None] if tensor.ndim == 0 else tensor.contiguous()
        gathered = source.new_empty((dist.get_world_size() * source.shape[0], *source.shape[1:]))
        dist.all_gather_into_tensor(gathered, source)
        return gathered

    @functools.wraps(gather)
    def gather_tensors(tensors: Any) -> Any:
        if operations.PartialState().backend != BACKEND:
            return gather(tensors)
        # Accelerate gathers into one dimension whatever the tensor's are, which TorchTPU refuses.
        return operations.recursively_apply(gather_one, tensors, error_on_other_type=True)

    operations._gpu_gather = gather_tensors
    # `Accelerator` refuses fp16 on this device, and this says yes for all but one.
    module.is_fp16_available = lambda: is_fp16_available() and not uses_tpu()


def _teach_preparation(accelerator: Any, process_state: Any) -> None:
    prepare, prepare_fsdp2 = accelerator.prepare_model, accelerator._prepare_fsdp2

    @functools.wraps(prepare)
    def prepare_model(self: Any, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        if self.device.type != "tpu":
            return prepare(self, model, *args, **options)
        rank = self.local_process_index
        # `DistributedDataParallel` gets the local rank as the device's index, which it is on GPUs only. Each
        # AcceleratorState that Accelerate makes on the way copies PartialState.
        states = (process_state(), self.state)
        try:
            for state in states:
                state.local_process_index = _OWN_DEVICE
            with _same_parameters(model):
                return prepare(self, model, *args, **options)
        finally:
            for state in states:
                state.local_process_index = rank

    @functools.wraps(prepare_fsdp2)
    def move_and_prepare_fsdp2(self: Any, *args: Any) -> Any:
        # `fully_shard` moves parameters by setting their data, which torch refuses from the CPU to TorchTPU.
        # With this option, Accelerate fills the parts itself.
        if self.device.type == "tpu" and not self.state.fsdp_plugin.cpu_ram_efficient_loading:
            for model in (each for each in args if isinstance(each, torch.nn.Module)):
                with _same_parameters(model):
                    model.to(self.device)
        return prepare_fsdp2(self, *args)

    accelerator.prepare_model = prepare_model
    accelerator._prepare_fsdp2 = move_and_prepare_fsdp2


def _teach_checkpoints(module: Any) -> None:
    save, load = module.save_accelerator_state, module.load_accelerator_state

    @functools.wraps(save)
    def save_accelerator_state(*args: Any, **options: Any) -> Any:
        directory = save(*args, **options)
        _keep_generator(module.PartialState(), directory)
        return directory

    @functools.wraps(load)
    def load_accelerator_state(*args: Any, **options: Any) -> Any:
        call = inspect.signature(load).bind(*args, **options)
        state = module.PartialState()
        if state.device.type == "tpu":
            # safetensors knows no device of this name. What it reads is copied to the device afterwards.
            call.arguments["map_location"] = "cpu"
        overridden = load(*call.args, **call.kwargs)
        _restore_generator(state, call.arguments["input_dir"])
        return overridden

    module.save_accelerator_state = save_accelerator_state
    module.load_accelerator_state = load_accelerator_state


def _teach_launch(module: Any) -> None:
    # The processes of another release refuse to train.
    if not _is_tested(importlib.metadata.version("accelerate")):
        return
    launch = module.simple_launcher

    @functools.wraps(launch)
    def simple_launcher(args: Any) -> Any:
        # Accelerate starts several processes if it counts several devices of a kind that it knows, and one
        # otherwise, whatever number it was given. torch is not asked: it may open the devices to count them.
        has_tpu = bool(EmulatedTpu.read(snapshot()) or attached_chips())
        is_several = args.num_processes > 1 and not (args.cpu or args.use_cpu)
        return (module.multi_gpu_launcher if is_several and has_tpu else launch)(args)

    module.simple_launcher = simple_launcher


def _teach_trainer(trainer: Any) -> None:
    save, load, move = trainer._save_rng_state, trainer._load_rng_state, trainer._move_model_to_device

    @functools.wraps(move)
    def move_model_to_device(self: Any, model: torch.nn.Module, device: torch.device) -> Any:
        with _same_parameters(model) if device.type == "tpu" else contextlib.nullcontext():
            return move(self, model, device)

    @functools.wraps(save)
    def save_rng_state(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        _keep_generator(self.args.distributed_state, output_dir)

    @functools.wraps(load)
    def load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None:
            _restore_generator(self.args.distributed_state, checkpoint)

    trainer._save_rng_state = save_rng_state
    trainer._load_rng_state = load_rng_state
    trainer._move_model_to_device = move_model_to_device


@contextlib.contextmanager
def _same_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Let a module keep its parameters while it moves to the device.

    TorchTPU's move makes new ones. An optimizer that was made before, as Accelerate's programs do, would
    train the old ones, and each owner of a tied weight would get its own. torch can swap the contents
    instead, but not those of parameters that `DistributedDataParallel` holds, which have moved already.
    """
    future = torch.__future__
    swaps = future.get_swap_module_params_on_conversion()
    moves = any(parameter.device.type != "tpu" for parameter in model.parameters())
    future.set_swap_module_params_on_conversion(swaps or moves)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(swaps)


def _keep_generator(state: Any, directory: str | Path) -> None:
    """Add the state of the device's generator to a checkpoint: otherwise a resumed run drops other values."""
    if state.device.type == "tpu":
        torch.save(_generator().get_state(), _generator_file(state, directory))


def _restore_generator(state: Any, directory: str | Path) -> None:
    """Restore the device's generator from a checkpoint; one that was saved elsewhere does not have it."""
    if state.device.type == "tpu" and (path := _generator_file(state, directory)).exists():
        _generator().set_state(torch.load(path))


def _generator_file(state: Any, directory: str | Path) -> Path:
    return Path(directory, f"random_state_tpu_{state.process_index}.pt")


def _generator() -> torch.Generator:
    module: Any = torch.tpu  # type: ignore[attr-defined]
    # TorchTPU warns that this name may change.
    with warnings.catch_warnings(action="ignore"):
        return cast("torch.Generator", module.default_generators[_OWN_DEVICE])


MODULES: dict[str, Callable[[Any], None]] = {
    "accelerate": _teach_accelerate,
    "accelerate.commands.launch": _teach_launch,
    "transformers.trainer": _teach_transformers,
}
"""What is changed, by the module that a program imports."""
