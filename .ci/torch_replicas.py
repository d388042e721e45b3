"""A plugin of pytest with which PyTorch's distributed tests run in replicas that are there already.

PyTorch's test starts processes of its own, and accepts some backends only, without TorchTPU's. Here
all replicas of ``polyxla run --each`` run the same test, on TorchTPU's device and backend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist  # noqa: TID253  (this plugin is for tests of torch)
from torch.testing._internal import common_distributed  # noqa: TID253
from torch.testing._internal.common_utils import TestCase  # noqa: TID253
from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: TID253

from polyxla.plugin import snapshot

DEVICE, BACKEND = "tpu", "tpu_dist"
RANK, REPLICAS = int(snapshot()["RANK"]), int(snapshot()["WORLD_SIZE"])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let one replica report."""
    if RANK:
        config.option.xmlpath = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Skip a test that ends its process, as PyTorch's do where they do not apply."""
    try:
        return (yield)
    except SystemExit as end:
        skips = common_distributed.TEST_SKIPS.items()
        pytest.skip(
            next((name for name, skip in skips if skip.exit_code == end.code), f"exit code {end.code}")
        )


def _set_up(self: Any) -> None:
    TestCase.setUp(self)
    self.processes, self.pid_to_pipe = [], {}
    self.rank = RANK


def _init_group(*_: object, **__: object) -> None:
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)


def _destroy_group(*_: object) -> None:
    dist.barrier()
    dist.destroy_process_group()


def _do_nothing(*_: object) -> None:
    pass


case: Any = common_distributed.MultiProcessTestCase
tensor_case: Any = common_dtensor.DTensorTestBase
for base in (case, tensor_case):
    base.setUp, base._spawn_processes = _set_up, _do_nothing  # noqa: SLF001
tensor_case.init_pg, tensor_case.destroy_pg = _init_group, _destroy_group
tensor_case.device_type = property(lambda _: DEVICE)
common_dtensor.DEVICE_TYPE, common_dtensor.PG_BACKEND, common_dtensor.NUM_DEVICES = DEVICE, BACKEND, REPLICAS
