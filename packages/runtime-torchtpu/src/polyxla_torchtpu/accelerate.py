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
from polyxla.plugin import snapshot, tpu_env
from polyxla_torchtpu.framework import BACKEND

TESTED = "1.15"
"""The release of Accelerate that the tests run with: what is changed below are its private parts."""
TRAINER_METHODS = ("_save_rng_state", "_load_rng_state", "_move_model_to_device")
"""The private methods of transformers' Trainer that are changed."""
_OWN_DEVICE = 0
"""TorchTPU's index of a process's only device, whatever its local rank."""


def teach(module: ModuleType) -> None:
    """Change `accelerate` or `transformers.trainer`, which was imported just now, for the device tpu."""
    distribution = module.__name__.partition(".")[0]
    version = importlib.metadata.version(distribution)
    if distribution == "accelerate":
        state = module.state.PartialState
        if version.rpartition(".")[0] == TESTED:
            _teach_state(state, module.DistributedType)
            _teach_utilities(module.utils)
            _teach_accelerator(module.accelerator)
        else:
            fix = f"pip install 'accelerate=={TESTED}.*', or Accelerator(cpu=True)"
            _refuse(state, f"{distribution} {version}", fix, lambda cpu=False, **_: cpu)
    elif all(hasattr(module.Trainer, method) for method in TRAINER_METHODS):
        _teach_trainer(module.Trainer)
    else:
        fix = "pip install 'transformers==5.24.*', or TrainingArguments(use_cpu=True)"
        _refuse(
            module.Trainer,
            f"{distribution} {version}",
            fix,
            lambda _model=None, args=None, **_: args is not None and args.use_cpu,
        )


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
        if tpu_env.LOCAL_RANK in snapshot() and uses_tpu(cpu):
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


def _teach_accelerator(module: Any) -> None:
    prepare = module.Accelerator.prepare_model
    save, load = module.save_accelerator_state, module.load_accelerator_state

    @functools.wraps(prepare)
    def prepare_model(self: Any, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        if self.device.type != "tpu":
            return prepare(self, model, *args, **options)
        rank = self.local_process_index
        # `DistributedDataParallel` gets the local rank as the device's index, which it is on GPUs only. Each
        # AcceleratorState that Accelerate makes on the way copies PartialState.
        states = (module.PartialState(), self.state)
        try:
            for state in states:
                state.local_process_index = _OWN_DEVICE
            with _same_parameters(model):
                return prepare(self, model, *args, **options)
        finally:
            for state in states:
                state.local_process_index = rank

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

    module.Accelerator.prepare_model = prepare_model
    module.save_accelerator_state = save_accelerator_state
    module.load_accelerator_state = load_accelerator_state


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
