"""The conformance tests of a runtime: derive a class, and run pytest with ``--polyxla-runtime``.

The functions that run in replicas are module-level, so that a runtime can send them to any process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from polyxla import ReplicaLostError
from polyxla.plugin import Claim, discover

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla_testing.fixtures import RuntimeUnderTest


class RuntimeConformance:
    """Tests of the contract of `polyxla.hookspecs` and `polyxla.plugin.Replication`.

    Attributes:
        devices: the devices to launch on, as for `polyxla.launch`.
    """

    devices: Any = "auto"

    def test_discovery_names_devices_or_says_why_not(self, runtime: RuntimeUnderTest) -> None:
        from polyxla.plugin import find_runtime

        candidate = discover(find_runtime(runtime.name, "test"), os.environ, "auto")
        found = candidate.discovery
        assert found is not None, candidate.error
        assert found.claim in Claim
        assert found.reason
        assert bool(found.devices) != bool(found.unavailable)
        assert found.fix or not found.unavailable
        assert [device.index for device in found.devices] == list(range(len(found.devices)))

    def test_results_come_back_in_ordinal_order(self, runtime: RuntimeUnderTest) -> None:
        worlds = runtime.launch(_describe, devices=self.devices)
        assert [ordinal for ordinal, *_ in worlds] == list(range(len(worlds)))
        assert {size for _, size, *_ in worlds} == {len(worlds)}

    def test_arguments_reach_every_replica(self, runtime: RuntimeUnderTest) -> None:
        assert set(runtime.launch(_echo, "value", devices=self.devices)) == {"value"}

    def test_tensors_are_made_on_the_replicas_device(self, runtime: RuntimeUnderTest) -> None:
        assert all(runtime.launch(_is_on_device, devices=self.devices))

    @pytest.mark.parametrize(
        ("op", "combine"), [("sum", sum), ("min", min), ("max", max), ("mean", lambda v: sum(v) / len(v))]
    )
    def test_all_reduce(self, runtime: RuntimeUnderTest, op: str, combine: Any) -> None:
        results = runtime.launch(_reduce, op, devices=self.devices)
        expected = combine([ordinal + 1.0 for ordinal in range(len(results))])
        assert results == [(expected, expected)] * len(results)

    def test_all_gather_and_broadcast(self, runtime: RuntimeUnderTest) -> None:
        results = runtime.launch(_gather, devices=self.devices)
        everyone = [{"ordinal": ordinal} for ordinal in range(len(results))]
        assert results == [(everyone, everyone[-1], [float(i) for i in range(len(results))])] * len(results)

    def test_a_loaders_error_reaches_the_loop(self, runtime: RuntimeUnderTest) -> None:
        with pytest.raises(ValueError, match="record 3 is broken"):
            runtime.launch(_read_broken_loader, devices=self.devices)

    def test_an_error_keeps_its_type_and_names_the_replica(self, runtime: RuntimeUnderTest) -> None:
        last = len(runtime.launch(_describe, devices=self.devices)) - 1
        with pytest.raises(ZeroDivisionError) as caught:
            runtime.launch(_fail, devices=self.devices)
        raised = f"raised in the replica with ordinal {last} "
        assert any(note.startswith(raised) for note in caught.value.__notes__)

    def test_a_replica_cannot_end_the_program_with_success(self, runtime: RuntimeUnderTest) -> None:
        with pytest.raises(ReplicaLostError, match=r"^the replica with ordinal \d called sys\.exit\(0\)"):
            runtime.launch(_exit, devices=self.devices)

    def test_a_tensor_of_the_device_can_be_returned(self, runtime: RuntimeUnderTest) -> None:
        results = runtime.launch(_return_tensors, devices=self.devices)
        # A single replica may run in this process, where its tensors can stay on the device.
        if len(results) > 1:
            assert {tensor.device.type for pair in results for tensor in pair} == {"cpu"}
        values = [[tensor.detach().cpu().tolist() for tensor in pair] for pair in results]
        assert values == [[[1.0, index + 1.0], [index + 2.0]] for index in range(len(results))]

    def test_launch_leaves_the_environment_alone(self, runtime: RuntimeUnderTest) -> None:
        # The first launch imports libraries, some of which set variables when they are imported.
        runtime.launch(_describe, devices=self.devices)
        before = dict(os.environ)
        runtime.launch(_describe, devices=self.devices)
        assert dict(os.environ) == before

    def test_what_a_checkpoint_computes_again_draws_the_same_numbers(self, runtime: RuntimeUnderTest) -> None:
        results = runtime.launch(_drop_twice, devices=self.devices)
        assert all(output == gradient for output, gradient in results)
        assert all(0 < sum(output) < 4 * len(output) for output, _ in results)

    def test_training_reduces_the_loss(self, runtime: RuntimeUnderTest) -> None:
        for first, last in runtime.launch(_train, devices=self.devices):
            assert last < first / 10

    @pytest.mark.parametrize("limit", [None, 0.25])
    def test_replicas_that_use_different_parameters_train_as_one(
        self, runtime: RuntimeUnderTest, limit: float | None
    ) -> None:
        results = runtime.launch(_train_branches, limit, devices=self.devices)
        expected = _branches_on_one(len(results), limit)
        for weights in results:
            assert weights.keys() == expected.keys()
            for name, values in weights.items():
                assert values == pytest.approx(expected[name], abs=1e-5), name


def _describe(replica: Replica) -> tuple[int, int, int]:
    return replica.ordinal, replica.world_size, replica.world.process_count


def _echo(replica: Replica, value: str) -> str:
    return value


def _is_on_device(replica: Replica) -> bool:
    import torch

    moved: Any = replica.to_device({"one": [torch.ones(2)], "name": "kept"})
    assert moved["name"] == "kept"
    return bool(moved["one"][0].device.type == replica.device.type)


def _reduce(replica: Replica, op: Any) -> tuple[float, float]:
    import torch

    mine = replica.to_device(torch.tensor([replica.ordinal + 1.0]))
    return replica.all_reduce(mine, op).item(), replica.all_reduce({"x": replica.ordinal + 1.0}, op)["x"]


def _gather(replica: Replica) -> tuple[list[Any], Any, list[float]]:
    import torch

    replica.barrier()
    everyone = replica.all_gather({"ordinal": replica.ordinal})
    tensors = replica.all_gather(replica.to_device(torch.tensor(float(replica.ordinal))))
    last = replica.broadcast({"ordinal": replica.ordinal}, source=replica.world_size - 1)
    return everyone, last, [tensor.item() for tensor in tensors]


class _Broken:
    def __iter__(self) -> Generator[Any]:
        import torch

        for _ in range(3):
            yield torch.zeros(2)
        raise ValueError("record 3 is broken")


def _read_broken_loader(replica: Replica) -> int:
    # An error in the thread that reads ahead must reach the loop, and not only end it early.
    return len(list(replica._replication.upload(iter(_Broken()), {})))


def _fail(replica: Replica) -> None:
    if replica.ordinal == replica.world_size - 1:
        raise ZeroDivisionError("on purpose")
    # The others wait for it, and must be ended.
    replica.barrier()


def _return_tensors(replica: Replica) -> list[Any]:
    import torch

    tensor = replica.to_device(torch.tensor([1.0, replica.ordinal + 1.0]))
    return [tensor, torch.nn.Parameter(tensor[1:] + 1)]


def _exit(replica: Replica) -> None:
    sys.exit(0)


# Replicas that are threads share the generator of the CPU: one that draws changes what another draws again.
_one_at_a_time = threading.Lock()


def _drop_twice(replica: Replica) -> tuple[list[float], list[float]]:
    import torch
    from torch.utils.checkpoint import checkpoint

    x = replica.to_device(torch.ones(64)).requires_grad_()
    dropout = torch.nn.Dropout(0.5)
    with _one_at_a_time if x.device.type == "cpu" else nullcontext():
        y: torch.Tensor = checkpoint(lambda x: dropout(dropout(x)), x, use_reentrant=False)
        y.sum().backward()
    assert x.grad is not None
    return y.tolist(), x.grad.tolist()


def _train(replica: Replica) -> tuple[float, float]:
    import torch

    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    targets = replica.to_device(inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
    inputs = replica.to_device(inputs)
    model = torch.nn.Linear(4, 1).to(replica.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        replica.step(optimizer)
        # Detached, because the graph of each step would stay in memory.
        losses.append(loss.detach())
    # Read after the loop, so that no step waits for the host.
    return losses[0].item(), losses[-1].item()


def _branches() -> Any:
    """Return a module with a branch for each half of the replicas, and one that is not used at first."""
    import torch

    module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("even", "odd", "late")})
    with torch.no_grad():
        for number, value in enumerate(module.parameters()):
            # Not drawn at random: replicas that are threads share torch's generator.
            value.copy_((torch.arange(value.numel()) - number + 0.5).view(value.shape) / 8)
    return module


def _branch_loss(module: Any, step: int, ordinal: int, device: Any) -> Any:
    import torch

    x = torch.tensor([[1.0 + ordinal, 2.0 - step]]).to(device)
    names = ["even", "odd"] if step == 2 else [("even", "odd")[(step + ordinal) % 2]]
    if (step, ordinal) == (3, 0):
        # One replica has all gradients, and need not read which the others have.
        names = list(module)
    return sum(module[name](x).square().sum() for name in names)


def _train_branches(replica: Replica, limit: float | None) -> dict[str, list[float]]:
    import torch

    module = replica.setup(_branches())
    # The decay would change the parameters that no replica uses, if they had gradients of zero.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        # Two parts accumulate.
        for _ in range(2):
            (_branch_loss(module, step, replica.ordinal, replica.device) / 2).backward()
        replica.step(optimizer, clip_norm=limit)
    return {name: value.cpu().flatten().tolist() for name, value in module.state_dict().items()}


def _branches_on_one(replicas: int, limit: float | None) -> dict[str, list[float]]:
    import torch

    module = _branches()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for ordinal in range(replicas):
            (_branch_loss(module, step, ordinal, "cpu") / replicas).backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
    return {name: value.flatten().tolist() for name, value in module.state_dict().items()}
