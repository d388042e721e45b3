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
import re
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
ONLY = "tpu:0" if DEVICE == "tpu" else DEVICE
CHIPS = 4
"""How many a test finds that asks for their number, and has as many replicas."""


class OfDevice(ast.NodeTransformer):
    """Replaces CUDA by the device, and the number of a CUDA device by that of the only one in a process."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Replace it in a string."""
        if isinstance(node.value, str):
            text = re.sub(r"cuda:\d", ONLY, node.value)
            return ast.Constant(text.replace("cuda", DEVICE).replace("nccl", BACKEND))
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace what skips a test without CUDA."""
        return ast.Constant(True) if node.id in ("TEST_CUDA", "TEST_MULTIGPU") else node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        """Leave the numbers of devices out: a process has one."""
        self.generic_visit(node)
        if node.arg == "device_ids":
            node.value = ast.Constant(None)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Replace ``f"cuda:{rank}"``, also in a longer text."""
        values: list[ast.expr] = []
        for value in node.values:
            match values[-1:], value:
                case [ast.Constant(str(text)) as before], ast.FormattedValue() if text.endswith("cuda:"):
                    before.value = text.removesuffix("cuda:") + ONLY
                case _:
                    values.append(value)
        node.values = values
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace ``torch.cuda`` and ``tensor.cuda``."""
        self.generic_visit(node)
        if node.attr == "cuda" and ast.unparse(node.value) not in ("torch.backends", "torch.version"):
            node.attr = DEVICE
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace ``torch.device("cuda", rank)``, ``tensor.cuda(rank)`` and ``device_count()``."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(attr="device_count")):
                return ast.Constant(CHIPS)
            case ast.Call(ast.Attribute(attr="device"), [ast.Constant(value), _]) if value == DEVICE:
                node.args = [ast.Constant(ONLY)]
            case ast.Call(ast.Attribute(attr=attr), [_]) if attr == DEVICE:
                del node.args[0]
        return node


class Loader(SourceFileLoader):
    """Loads a test for the device."""

    def path_stats(self, path: Any) -> Any:
        """Find no compiled file: it would be without the changes."""
        raise OSError(path)

    def source_to_code(self, data: Any, path: Any, **_: Any) -> Any:  # type: ignore[override]
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
        file: this replica's.
    """

    def __init__(self, directory: Path) -> None:
        self.file = (directory / f"{RANK}.jsonl").open("a")
        self.reports: list[Any] = []

    def write(self, **what: object) -> None:
        """Write a line."""
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file cannot be imported."""
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", error=str(report.longrepr)[-200:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the tests for as many replicas as there are."""
        sizes = {item.nodeid: _size(item) for item in items}
        self.write(sizes=sizes)
        items[:] = [item for item in items if sizes[item.nodeid] == REPLICAS]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Write that a test begins, and how it ends."""
        self.reports = []
        self.write(test=item.nodeid)
        group.begin(item.nodeid)
        result = yield
        if not any(report.failed for report in self.reports):
            is_skipped = any(report.skipped for report in self.reports)
            self.write(test=item.nodeid, outcome="skipped" if is_skipped else "passed")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Any:
        """End the group that a test leaves."""
        result = yield
        if dist.is_initialized():
            try:
                dist.barrier()
            except Exception:
                if not any(report.failed for report in self.reports):
                    raise
                # The test that failed has spoilt it for the next.
                _end()
            dist.destroy_process_group()
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember how a part of a test ended. One that fails in this replica only, or elsewhere, ends it."""
        self.reports.append(report)
        if not report.failed:
            # A part of a test is a sign of life.
            self.write(test=report.nodeid)
            return
        text = str(report.longrepr)
        lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        self.write(test=report.nodeid, outcome="failed", error=next(iter(lines), text[:200]))
        sys.stderr.write(f"replica {RANK}, {report.nodeid}:\n{text}\n")
        sys.stderr.flush()
        crash = getattr(report.longrepr, "reprcrash", None)
        if REPLICAS > 1 and not group.fails(f"{crash.path}:{crash.lineno}" if crash else text[:200]):
            _end()


class Group:
    """The process group of a test."""

    def __init__(self) -> None:
        self.store: Any = None
        self.test, self.count, self.failures = "", 0, 0
        self.directory = Path()

    def begin(self, test: str) -> None:
        """Begin with a test."""
        self.test, self.count, self.failures = test, 0, 0

    def init(self, *args: Any, **options: Any) -> None:
        """Stand in for ``init_process_group``."""
        backend = options.get("backend", args[0] if args else None)
        if backend == "fake":
            # By its name alone torch makes one for the devices that it knows.
            options["backend"] = ",".join(f"{device}:fake" for device in {"cpu", DEVICE})
            _init(*args[1:], **options)
        elif backend == "threaded":
            _init(*args, **options)
        elif not dist.is_initialized():
            self._meet()
            self.count += 1
            store = dist.PrefixStore(f"{self.test} {self.count}", self.store)
            # Some have a backend for each kind of device.
            ours = backend if DEVICE == "tpu" and ":" in str(backend) else BACKEND
            _init(ours, store=store, rank=RANK, world_size=REPLICAS, device_id=options.get("device_id"))

    def fails(self, where: str) -> bool:
        """Return whether this test fails in the same place in all replicas, so that none waits for others."""
        self._meet()
        self.failures += 1
        key, end = f"{self.test} failed {self.failures} {where}", time.monotonic() + 3
        self.store.add(key, 1)
        while (count := self.store.add(key, 0)) < REPLICAS and time.monotonic() < end:
            time.sleep(0.1)
        return bool(count == REPLICAS)

    def _meet(self) -> None:
        if self.store is None:
            self.store = next(dist.rendezvous("env://"))[0]

    def destroy(self, *_: object, **__: object) -> None:
        """Stand in for a base's way to end it."""
        dist.barrier()
        dist.destroy_process_group()


def _end() -> None:
    # The others write how they failed, before they are ended with this one.
    time.sleep(1)
    os._exit(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the journal's directory."""
    parser.addoption("--journal", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Write the journal."""
    group.directory = config.getoption("--journal")
    config.pluginmanager.register(Journal(group.directory))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Skip a test that ends its process, as PyTorch's do where they do not apply."""
    report = yield
    end = call.excinfo.value if call.excinfo else None
    if isinstance(end, SystemExit):
        skips = common_distributed.TEST_SKIPS.items()
        reason = next((name for name, skip in skips if skip.exit_code == end.code), f"exit code {end.code}")
        report.outcome, report.longrepr = "skipped", (*item.location[:2], reason)
    return report


def _size(item: Any) -> int:
    """Return in how many replicas a test runs: one if it makes threads, or nothing, of its own."""
    if not (item.cls and issubclass(item.cls, PROCESSES)):
        return 1
    return int(item.cls(item.name).world_size)


def _set_up(self: Any) -> None:
    common_utils.TestCase.setUp(self)
    self.processes, self.pid_to_pipe = [], {}
    self.rank = RANK
    self.file_name = str(group.directory / self.id())
    # What a test before it has left in this process.
    torch._dynamo.reset()  # noqa: SLF001
    _random._rng_tracker = None  # noqa: SLF001
    debug._clear_sharding_prop_cache()  # noqa: SLF001
    common_utils.set_rng_seed()


def _set_up_with_group(self: Any) -> None:
    _set_up(self)
    group.init()
    type(self).pg = dist.group.WORLD


def _init_dtensor(self: Any, eager_init: bool = False, backend: str | None = None) -> None:
    group.init(backend or self.backend, device_id=torch.device(DEVICE, 0) if eager_init else None)


def _set_up_class(cls: Any) -> None:
    cls.rank = RANK


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _skip_if_less(chips: int, **_: object) -> Any:
    return pytest.mark.skipif(chips > max(CHIPS, REPLICAS), reason=f"needs {chips} chips")


def _always(*_: object, **__: object) -> Any:
    return lambda function: function


group = Group()
sys.meta_path.insert(0, Finder())
_init = dist.init_process_group
any_torch: Any = torch
module = getattr(any_torch, DEVICE)
module.is_available, module.set_device = lambda: True, _do_nothing
if DEVICE == "tpu":
    torch.accelerator.device_count = lambda: CHIPS
    torch.accelerator.set_device_index = _do_nothing
    # TorchTPU has what CUDA's tests call, and lets torch alone call it.
    from torch_tpu._internal.utils import annotations as restrictions

    restrictions._internal_apis_allowed_for_testing = True  # noqa: SLF001

# These find the device when they are imported.
from torch.distributed.pipelining import _utils as pipelining  # noqa: E402, TID253
from torch.distributed.tensor import _random, debug  # noqa: E402, TID253
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
continuous.setUpClass, continuous.tearDownClass = classmethod(_set_up_class), classmethod(_do_nothing)
continuous.world_size = 2
dist.init_process_group = dist.distributed_c10d.init_process_group = group.init
any_dtensor: Any = dtensor
any_dtensor.init_pg, sharded.init_pg = _init_dtensor, group.init
any_dtensor.destroy_pg = sharded.destroy_pg = group.destroy
any_dtensor.device_type = property(lambda _: DEVICE)
sharded.init_comms, sharded.destroy_comms = group.init, group.destroy
any_sharded: Any = sharded_tensor
any_sharded.with_comms.__defaults__ = (None, False, BACKEND)
any_distributed: Any = common_distributed
any_common_dtensor: Any = common_dtensor
# The names in PyTorch 2.6.
any_distributed.MultiProcContinousTest = continuous
# Tests delay a stream of CUDA so, to see what waits for it; here nothing is late.
module._sleep = _do_nothing  # noqa: SLF001
any_utils: Any = common_utils
any_utils.get_cycles_per_ms = lambda *_: 1.0
any_fsdp: Any = common_fsdp
any_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test
any_pipelining: Any = pipelining
any_pipelining.PipeliningShapeError = pipelining.PipeliningMetadataError
any_distributed.skip_if_lt_x_gpu = any_common_dtensor.skip_if_lt_x_gpu = _skip_if_less
for name in ("requires_nccl", "requires_accelerator_dist_backend", "requires_nccl_version"):
    setattr(any_distributed, name, _always)
common_fsdp.DEVICE_COUNT = CHIPS
common_dtensor.DEVICE_TYPE, common_dtensor.PG_BACKEND, common_dtensor.NUM_DEVICES = DEVICE, BACKEND, CHIPS
