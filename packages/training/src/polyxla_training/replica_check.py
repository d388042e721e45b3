"""`check_replicas`: compare training on several replicas, or with a TPU's products, with training on one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyxla import UsageError, launch
from polyxla.plugin import (
    POLYXLA_EMULATE,
    POLYXLA_EMULATE_NUMERICS,
    call_problem,
    snapshot,
    temporary_environ,
    working_directory,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReplicaCheck:
    """The differences between the parameters of the two runs.

    A parameter's difference is the largest absolute difference over its elements and the replicas, divided
    by its largest absolute element after training on one replica. It is infinite if any value is NaN.

    Attributes:
        devices: number of replicas that were compared with one.
        numerics: whether one replica was compared with one whose products of float32 are a TPU's.
        steps: number of optimizer updates in each run.
        tolerance: the largest difference that counts as equal.
        differences: by parameter name, the largest first.
        warnings: parts of the module that make the runs differ by design.
    """

    devices: int
    steps: int
    tolerance: float
    differences: dict[str, float]
    warnings: tuple[str, ...]
    numerics: bool = False

    @property
    def worst(self) -> str:
        """Name of the parameter with the largest difference."""
        return next(iter(self.differences))

    @property
    def difference(self) -> float:
        """The largest difference."""
        return self.differences[self.worst]

    @property
    def within(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.difference <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """Return the result as ``--json`` prints it."""
        return {
            "devices": self.devices,
            "numerics": self.numerics,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "within": self.within,
            "worst": self.worst,
            "difference": self.difference,
            "differences": self.differences,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        verdict = "within" if self.within else "beyond"
        how = "with a TPU's products of float32 and with exact ones"
        return (
            f"{self.steps} steps {how if self.numerics else f'on {self.devices} replicas and on one'}: the "
            "largest relative difference is "
            f"{self.difference:.2g}, of {self.worst}, {verdict} {self.tolerance:g}"
        )


def check_replicas(
    make_module: Callable[[], torch.nn.Module],
    batches: Iterable[Any] | None = None,
    *,
    steps: int = 10,
    devices: int = 4,
    batch_size: int = 32,
    tolerance: float = 1e-5,
    runtime: str | None = None,
    numerics: bool = False,
) -> ReplicaCheck:
    """Train a module on one replica and on several with the same batches, and compare the parameters.

    With `numerics`, train it on one replica twice, and the second time multiply float32 as a TPU does.

    Both start from the same weights, in float32. Each of the several replicas trains on its share of every
    batch, in the order of the ordinals. The module's ``training_step`` and ``configure_optimizers`` are used
    if it has them; a plain module is trained on the mean square of its output, with SGD.

    Args:
        make_module: a module's class, or another function without arguments that returns a module.
        batches: the batches that all replicas share; default: the module's ``train_dataloader()``, or
            random batches in the shape of its ``example_input_array``. Of a DataLoader, the dataset's records
            are taken in their order, `batch_size` at a time; batches of other iterables are used unchanged.
        steps: number of optimizer updates in each run.
        devices: number of replicas to compare with one; in a job of several hosts, those of each host.
        batch_size: number of records in a batch, over all replicas.
        tolerance: the largest relative difference that counts as equal.
        runtime: the name of a runtime; default: chosen from the environment.
        numerics: compare exact products of float32 with those of a TPU; `devices` does not matter then. The
            environment must emulate a TPU.

    Raises:
        UsageError: the module cannot be trained like this, the batches cannot be divided, or no TPU is
            emulated.
        Exception: what the module raised.
    """
    environ = snapshot()
    if numerics and not environ.get(POLYXLA_EMULATE):
        raise UsageError(
            "no TPU is emulated whose products could be compared",
            where="check_replicas(numerics=True)",
            fix=f"Set {POLYXLA_EMULATE}=v5e-1.",
        )
    _check_numbers(steps=steps, devices=devices, batch_size=batch_size)
    # Asked before it is called: a class with arguments is the most frequent mistake here.
    if problem := call_problem(make_module, ()):
        name = getattr(make_module, "__name__", type(make_module).__name__)
        raise UsageError(
            f"{name}() makes no module: {problem}",
            where="check_replicas",
            fix=f"Name a function without arguments: def make(): return {name}(...).",
        )
    # Imported here: it imports torch, which `import polyxla_training` must not.
    from polyxla_training.replica_runs import compare, prepare, train

    workload = prepare(make_module, batches, steps, 1 if numerics else devices, batch_size)

    def train_alone(products: str) -> dict[str, torch.Tensor]:
        # In a process of its own: a device that is opened in this one would block the launch of several
        # replicas.
        with temporary_environ({**environ, POLYXLA_EMULATE_NUMERICS: products}):
            results = launch(train, (workload,), devices=1, runtime=runtime, start_method="forkserver")
        [(_, parameters)] = results
        return dict(parameters)

    alone = train_alone("" if numerics else environ.get(POLYXLA_EMULATE_NUMERICS, ""))
    if numerics:
        differences = compare(alone, [train_alone("tpu")])
        return ReplicaCheck(1, steps, tolerance, differences, workload.warnings, numerics=True)
    # Several hosts may have more replicas than this one has devices, so the replicas return the size of the
    # world.
    sizes, together = zip(*launch(train, (workload,), devices=devices, runtime=runtime), strict=True)
    return ReplicaCheck(sizes[0], steps, tolerance, compare(alone, together), workload.warnings)


def load_factory(name: str) -> Callable[[], torch.nn.Module]:
    """Return the callable that ``module:attribute`` names; modules in the working directory are found too.

    Raises:
        UsageError: there is no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    fix = "Write module:attribute, such as train:Net for the class Net in train.py."
    if not module or not attribute:
        raise UsageError(f"{name!r} does not name a module and an attribute", where=_COMMAND, fix=fix)
    # As `python -m` does: the user's module is usually in the working directory.
    sys.path.insert(0, str(working_directory()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import {module!r}: {error}", where=_COMMAND, fix=fix) from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        what = "has no" if factory is None else "cannot be called:"
        raise UsageError(f"module {module!r} {what} {attribute!r}", where=_COMMAND, fix=fix)
    made: Callable[[], torch.nn.Module] = factory
    return made


_COMMAND = "polyxla check-replicas"


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        least = 2 if name == "devices" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UsageError(
                f"{name}={number!r} is not an integer of at least {least}",
                where="check_replicas",
                fix=f"Write {name}={least}.",
            )
    # Unequal shares would have unequal weights in the average, and differ from one replica for that reason
    # alone.
    if numbers["batch_size"] % numbers["devices"]:
        raise UsageError(
            f"a batch of {numbers['batch_size']} does not divide among {numbers['devices']} replicas",
            where="check_replicas",
            fix=f"Write batch_size={8 * numbers['devices']}.",
        )
