"""Mends of two defects of Accelerate 1.15 on a TPU."""

from accelerate.data_loader import MpDeviceLoaderWrapper
from accelerate.utils import KwargsHandler


def to_kwargs(handler):
    default = type(handler)().to_dict()
    return {name: value for name, value in handler.to_dict().items() if value != default[name]}


# save_state asks each loader for its dataset, and Accelerate's own loader for XLA has none:
# https://github.com/huggingface/accelerate/pull/2176 lists the tests that fail for it.
MpDeviceLoaderWrapper.dataset = property(lambda loader: loader.dataloader.dataset)
# Accelerator() empties os.environ for a moment, so that defaults do not depend on it
# (https://github.com/huggingface/accelerate/pull/1738). The replicas of a v2 or v3 are threads: another one that
# copies the environment meanwhile gets a KeyError, and two that empty it at the same time leave it empty.
KwargsHandler.to_kwargs = to_kwargs
