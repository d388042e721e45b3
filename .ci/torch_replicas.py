"""A plugin of pytest with which PyTorch's distributed tests run in replicas that are there already.

PyTorch's test starts processes of its own, and accepts some backends only, without TorchTPU's. Here all
replicas of ``polyxla run --each`` run the same tests one after the other, each with a process group of its
own, on TorchTPU's device and backend; without `POLYXLA_EMULATE`, those of torchrun do on the CPU and gloo.
Each replica writes how a test ended to a journal, from which `torch_suite.py` makes a report.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253  (this plugin is for tests of torch)
import torch.distributed as dist  # noqa: TID253

from polyxla.plugin import POLYXLA_EMULATE, snapshot

DEVICE, BACKEND = ("tpu", "tpu_dist") if POLYXLA_EMULATE in snapshot() else ("cpu", "gloo")
RANK, REPLICAS = int(snapshot()["RANK"]), int(snapshot()["WORLD_SIZE"])
CHIPS = 4
"""How many a test finds that asks for their number, and has as many replicas."""


class OfDevice(ast.NodeTransformer):
    """Replaces CUDA by the device: a process has one, so the number of a CUDA device is left out."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Replace it in a string."""
        if isinstance(node.value, str):
            text = DEVICE if node.value in ("cuda:0", "cuda:1") else node.value
            return ast.Constant(text.replace("cuda", DEVICE).replace("nccl", BACKEND))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Replace ``f"cuda:{rank}"``."""
        match node.values:
            case [ast.Constant("cuda:"), ast.FormattedValue()]:
                return ast.Constant(DEVICE)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace ``torch.cuda`` and ``tensor.cuda``."""
        self.generic_visit(node)
        node.attr = DEVICE if node.attr == "cuda" else node.attr
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace ``torch.device("cuda", rank)``, and ``tensor.cuda(rank)``."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(attr="device"), [ast.Constant(value), _]) if value == DEVICE:
                del node.args[1]
            case ast.Call(ast.Attribute(attr=attr), [_]) if attr == DEVICE:
                del node.args[0]
        return node


class Loader(SourceFileLoader):
    """Loads a test for the device."""

    def path_stats(self, path: Any) -> Any:
        """Find no compiled file: it would be without the changes."""
        raise OSError(path)

    def source_to_code(self, data: Any, path: Any, **_: Any) -> Any:
        """Compile the changed source."""
        tree = ast.fix_missing_locations(OfDevice().visit(ast.parse(data)))
        return compile(tree, path, "exec", dont_inherit=True)


class Finder:
    """Finds the modules of PyTorch's directory of tests."""

    @staticmethod
    def find_spec(name: str, path: Any = None, *_: object) -> ModuleSpec | None:
        """Find one of them."""
        spec = PathFinder.find_spec(name, path)
        if spec is None or "/test/distributed/" not in str(spec.origin):
            return None
        spec.loader = Loader(name, str(spec.origin))
        return spec


class Journal:
    """Writes what becomes of each test, and ends this replica after one that failed.

    Attributes:
        directory: in which each replica has a file; ``done.json`` names the tests that are not to run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = (directory / f"{RANK}.jsonl").open("a")
        self.reports: list[Any] = []

    def write(self, **what: object) -> None:
        """Write a line."""
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the tests for as many replicas as there are."""
        done = json.loads((self.directory / "done.json").read_text())
        sizes = {_name(item): _size(item) for item in items}
        self.write(sizes=sizes)
        items[:] = [item for item in items if sizes[_name(item)] == REPLICAS and _name(item) not in done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Write that a test begins, and how it ends."""
        self.reports = []
        self.write(test=_name(item))
        group.begin(_name(item))
        result = yield
        failures = [report for report in self.reports if report.failed]
        skips = [report for report in self.reports if report.skipped]
        outcome = "failed" if failures else "skipped" if skips else "passed"
        text = str(failures[0].longrepr) if failures else ""
        lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        self.write(test=_name(item), outcome=outcome, error=next(iter(lines), text[:200]))
        if failures:
            sys.stderr.write(f"replica {RANK}, {_name(item)}:\n{text}\n")
            sys.stderr.flush()
            # The others write how they failed, before they are ended with this one.
            time.sleep(1)
            os._exit(1)
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember how a part of a test ended."""
        self.reports.append(report)


class Group:
    """The process group of a test."""

    def __init__(self) -> None:
        self.store: Any = None
        self.test, self.count = "", 0

    def begin(self, test: str) -> None:
        """Begin with a test."""
        self.test, self.count = test, 0

    def init(self, *args: Any, **options: Any) -> None:
        """Stand in for ``init_process_group``."""
        backend = options.get("backend", args[0] if args else None)
        if backend in ("fake", "threaded"):
            _init(*args, **options)
        elif not dist.is_initialized():
            if self.store is None:
                self.store = next(dist.rendezvous("env://"))[0]
            self.count += 1
            store = dist.PrefixStore(f"{self.test} {self.count}", self.store)
            _init(BACKEND, store=store, rank=RANK, world_size=REPLICAS)

    def destroy(self, *_: object, **__: object) -> None:
        """Stand in for a base's way to end it."""
        dist.barrier()
        dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the journal's directory."""
    parser.addoption("--journal", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Write the journal."""
    config.pluginmanager.register(Journal(config.getoption("--journal")))


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Any:
    """End the group that a test leaves."""
    result = yield
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _name(item: Any) -> str:
    return str(item.nodeid).partition("::")[2]


def _size(item: Any) -> int:
    """Return in how many replicas a test runs: one if it makes threads, or nothing, of its own."""
    if not (item.cls and issubclass(item.cls, PROCESSES)):
        return 1
    return int(item.cls(item.name).world_size)


def _set_up(self: Any) -> None:
    common_utils.TestCase.setUp(self)
    self.processes, self.pid_to_pipe = [], {}
    self.rank = RANK
    self.file_name = f"/tmp/{snapshot()['MASTER_PORT']}-{self.id()}"  # noqa: S108  (the same for all)
    torch._dynamo.reset()  # noqa: SLF001
    common_utils.set_rng_seed()


def _set_up_with_group(self: Any) -> None:
    _set_up(self)
    group.init()
    type(self).pg = dist.group.WORLD


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _always(*_: object, **__: object) -> Any:
    return lambda function: function


group = Group()
sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
_init = dist.init_process_group
any_torch: Any = torch
module = getattr(any_torch, DEVICE)
for name, function in {
    "device_count": lambda: CHIPS,
    "current_accelerator": lambda *_, **__: torch.device(DEVICE),
    "is_available": lambda: True,
    "set_device_index": _do_nothing,
}.items():
    setattr(torch.accelerator, name, function)
    setattr(module, name, function)
module.set_device = _do_nothing

# These find the device when they are imported.
from torch.testing._internal import common_distributed, common_fsdp, common_utils  # noqa: E402, TID253
from torch.testing._internal.distributed._shard import sharded_tensor  # noqa: E402, TID253
from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: E402, TID253

case: Any = common_distributed.MultiProcessTestCase
continuous: Any = common_distributed.MultiProcContinuousTest
dtensor, fsdp = common_dtensor.DTensorTestBase, common_fsdp.FSDPTest
sharded: Any = sharded_tensor.ShardedTensorTestBase
PROCESSES = (case, continuous)
for any_base, set_up in (
    (case, _set_up),
    (continuous, _set_up_with_group),
    (dtensor, _set_up),
    (fsdp, _set_up_with_group),
    (sharded, _set_up),
):
    base: Any = any_base
    base.setUp, base._spawn_processes = set_up, _do_nothing  # noqa: SLF001
    base.device_type = property(lambda _: DEVICE)
continuous.setUpClass = continuous.tearDownClass = classmethod(_do_nothing)
dist.init_process_group = dist.distributed_c10d.init_process_group = group.init  # type: ignore[assignment]
for any_base in (dtensor, sharded):
    base = any_base
    base.init_pg, base.destroy_pg = group.init, group.destroy
sharded.init_comms, sharded.destroy_comms = group.init, group.destroy
any_sharded: Any = sharded_tensor
any_sharded.with_comms.__defaults__ = (None, False, BACKEND)
any_distributed: Any = common_distributed
# The name in PyTorch 2.6.
any_distributed.MultiProcContinousTest = continuous
any_distributed.skip_if_lt_x_gpu = _always
for name in ("requires_nccl", "requires_accelerator_dist_backend", "requires_nccl_version"):
    setattr(any_distributed, name, _always)
common_dtensor.DEVICE_TYPE, common_dtensor.PG_BACKEND, common_dtensor.NUM_DEVICES = DEVICE, BACKEND, CHIPS
