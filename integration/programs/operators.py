"""Computes torch's own samples of its operators on a device and on the CPU, and stores all numbers.

``operators.py DIRECTORY [--any-size] [NAME ...]`` computes each operator that has no file in the directory
yet, forward and backward, so that it continues where an earlier process ended. All samples of an operator are
one program. With ``--any-size``, the bridge's C library computes what it computes for large arrays only. With
``--vjp``, ``--jvp`` or ``--vmap``, torch.func differentiates or maps the operators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

SAMPLES = 4
"""Samples of each operator, and once more the first that has numbers, with NaN and infinity among them."""
ANY_SIZE = "--any-size"
TRANSFORMS = ("--vjp", "--jvp", "--vmap")
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
Numbers = list[torch.Tensor] | str
"""Results and gradients of one sample, or the error that it raised."""
Compute = Callable[[Any, Any, str], Numbers]
"""A function of an operator, a sample and a device."""


def title(operator: Any) -> str:
    """Return the name of an operator, with that of its variant."""
    variant: str = operator.variant_test_name
    return f"{operator.name}.{variant}" if variant else str(operator.name)


def samples(operator: Any) -> Iterator[Any]:
    """Return some of an operator's samples, and one with numbers that are not finite."""
    dtype = torch.float32 if torch.float32 in operator.dtypes else torch.int64
    has_gradient = dtype == torch.float32 and operator.supports_autograd
    torch.manual_seed(0)
    found = list(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=has_gradient), SAMPLES))
    yield from found
    torch.manual_seed(0)
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=has_gradient):
        numbers = [leaf for leaf in tree_leaves(sample.input) if isinstance(leaf, torch.Tensor)]
        if numbers and numbers[0].is_floating_point() and numbers[0].numel() > 2:
            with torch.no_grad():
                flat = numbers[0].clone(memory_format=torch.contiguous_format).view(-1)
                flat[[0, 1, -1]] = torch.tensor([float("inf"), float("nan"), float("-inf")])
                numbers[0].copy_(flat.view(numbers[0].shape))
            yield sample
            return


def moved(arguments: Any, device: str) -> Any:
    """Return a pytree of arguments on a device."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)

    return tree_map(move, arguments)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def gradients(results: list[torch.Tensor], given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of what was given, as far as the results depend on it."""
    inputs = [x for x in given if x.requires_grad]
    smooth = [result for result in results if result.requires_grad]
    if not inputs or not smooth:
        return []
    # Every element differs, so that a gradient in the wrong place is seen.
    found = torch.autograd.grad(smooth, inputs, list(map(direction, smooth)), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def computed(operator: Any, sample: Any, device: str) -> Numbers:
    """Return the results of a sample, the gradients of its inputs, and the shapes of all of them."""
    try:
        given = moved((sample.input, sample.args, sample.kwargs), device)
        results = tensors(operator(given[0], *given[1], **given[2]))
        results += gradients(results, tensors(given))
        # What is said of a result before it is computed: the next operator relies on it.
        shapes = torch.tensor([number for result in results for number in (result.dim(), *result.shape)])
        return [*(result.detach() for result in results), shapes]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def direction(x: torch.Tensor) -> torch.Tensor:
    """Return numbers that all differ, on the device of a tensor and with its shape and dtype."""
    return torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape).to(x.dtype).to(x.device)


def transformed(transform: str, operator: Any, sample: Any, device: str) -> Numbers:
    """Return what one of torch.func's transforms of an operator computes."""
    try:
        arguments = moved((sample.input, sample.args, sample.kwargs), device)
        leaves, structure = tree_flatten(arguments)
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs = tuple(leaves[place] for place in places)

        def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mine = list(leaves)
            for place, tensor in zip(places, given, strict=True):
                mine[place] = tensor
            first, others, named = tree_unflatten(mine, structure)
            return tuple(tensors(operator(first, *others, **named)))

        if transform == "--vmap":
            return list(torch.func.vmap(function)(*(torch.stack([x, x / 2]) for x in inputs)))
        if transform == "--jvp":
            results, derivatives = torch.func.jvp(function, inputs, tuple(map(direction, inputs)))
        else:
            results, pull = torch.func.vjp(function, *inputs)
            derivatives = pull(tuple(map(direction, results)))
        return [x.detach() for x in (*results, *derivatives)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def on_host(numbers: Numbers) -> Numbers:
    """Return the numbers in the host's memory; this is where an error of the device is raised."""
    if isinstance(numbers, str):
        return numbers
    try:
        return [_plain(tensor.cpu()).resolve_conj().resolve_neg() for tensor in numbers]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be stored: some operators leave a wrapper, or zeros without memory."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
        tensor = torch._from_functional_tensor(tensor)
    return tensor.clone()


def on_device(
    compute: Compute, operator: Any, given: list[Any], device: str, finish: Callable[[], None]
) -> list[Numbers]:
    """Return what a device computes, by one program if it takes all samples together."""
    found = [compute(operator, sample, device) for sample in given]
    try:
        finish()
    except Exception:
        # One of the samples is refused: compute each by itself.
        return [on_host(compute(operator, sample, device)) for sample in given]
    return [on_host(numbers) for numbers in found]


def is_random(operator: Any, given: Iterable[Any]) -> bool:
    """Return whether the CPU computes other numbers the second time."""
    torch.manual_seed(1)
    once = [computed(operator, sample, "cpu") for sample in given]
    torch.manual_seed(2)
    again = [computed(operator, sample, "cpu") for sample in given]
    return any(difference(*pair) for pair in zip(once, again, strict=True))


def difference(ours: Numbers, theirs: Numbers, tolerance: float = 0) -> str:
    """Say how two computations differ; return nothing if they do not by more than a tolerance."""
    if isinstance(ours, str) or isinstance(theirs, str):
        if isinstance(ours, str) and isinstance(theirs, str):
            return ""
        return f"raises {ours}" if isinstance(ours, str) else f"does not raise {theirs}"
    for result, other in itertools.zip_longest(ours, theirs):
        if result is None or other is None or (result.shape, result.dtype) != (other.shape, other.dtype):
            return f"has {_types(ours)}, not {_types(theirs)}"
        wide, expected = (tensor.to(_WIDE.get(tensor.dtype, tensor.dtype)) for tensor in (result, other))
        if not torch.allclose(wide, expected, tolerance, tolerance, equal_nan=True):
            return f"is {result.flatten()[:6].tolist()}, not {other.flatten()[:6].tolist()}"
    return ""


def _types(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def device_and_finish() -> tuple[str, Callable[[], None]]:
    """Return the device of the installed framework, and the function that computes what is queued."""
    with contextlib.suppress(ImportError):
        return "xla", importlib.import_module("torch_xla").sync
    importlib.import_module("torch_tpu")
    # TorchTPU computes each operator by itself.
    return "tpu", lambda: None


def outcome(
    compute: Compute, operator: Any, device: str, finish: Callable[[], None]
) -> tuple[list[Numbers], list[Numbers]] | str:
    """Return what the device and the CPU compute for an operator's samples, or why nothing is compared."""
    try:
        given = list(samples(operator))
        if is_random(operator, given):
            return "is random"
        expected = [on_host(compute(operator, sample, "cpu")) for sample in given]
        return on_device(compute, operator, given, device, finish), expected
    except Exception as error:
        return f"has no samples: {error}"


def main(directory: Path, names: list[str]) -> None:
    """Compute the operators that have no file yet."""
    if ANY_SIZE in names:
        expansions = "polyxla_bridge.engine.expansions"
        for name, least in (
            ("convolution", "LEAST_WORK"),
            ("arithmetic", "LEAST_WORK"),
            ("sums", "LEAST_SIZE"),
        ):
            module = importlib.import_module(f"{expansions}.{name}")
            assert hasattr(module, least), f"{name}.{least}"
            setattr(module, least, 1)
    of_func = (functools.partial(transformed, transform) for transform in TRANSFORMS if transform in names)
    compute: Compute = next(of_func, computed)
    names = [name for name in names if name not in (ANY_SIZE, *TRANSFORMS)]
    # This import takes seconds, and the test that imports this module does not need it.
    from torch.testing._internal import common_methods_invocations

    device, finish = device_and_finish()
    warnings.simplefilter("ignore")
    # torch would seed its generator before each random operator, so that nothing looks random.
    vars(common_methods_invocations)["wrapper_set_seed"] = _unseeded
    # torch's autograd engine serves the devices that exist when it is first used.
    torch.zeros((), device=device)
    for operator in common_methods_invocations.op_db:
        path = directory / f"{title(operator)}.pt"
        if not path.exists() and (not names or title(operator) in names):
            # If this process ends here, the next begins with the operator after this.
            torch.save("ended the process", path)
            torch.save(outcome(compute, operator, device, finish), path)


def _unseeded(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
