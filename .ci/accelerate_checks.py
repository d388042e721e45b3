"""Runs what is left of Accelerate's test_script without the faults that Accelerate has on a TPU."""

from typing import Any

from accelerate.test_utils.scripts import test_script
from accelerate.utils import KwargsHandler

GATHER_OBJECTS = ("dataset", "list", "tensor")
check = test_script.training_check


def to_kwargs(handler: Any) -> dict[str, Any]:
    """Return what is not a default. Accelerate's empties os.environ, which other threads of a v3 read."""
    default = type(handler)().to_dict()
    return {name: value for name, value in handler.to_dict().items() if value != default[name]}


def main() -> None:
    """Run the checks that need no gathering of objects, no generator of the program's own, and no float16."""
    KwargsHandler.to_kwargs = to_kwargs
    for kind in GATHER_OBJECTS:
        setattr(test_script, f"test_split_between_processes_{kind}", lambda *_: None)
    test_script.training_check = lambda use_seedable_sampler: use_seedable_sampler and check(True)
    test_script.is_fp16_available = lambda: False
    test_script.main()
