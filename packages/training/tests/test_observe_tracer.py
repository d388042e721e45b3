"""The tracer finds lines that read the device, and leaves other modes, forks and torch.compile alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import polyxla
import polyxla_training
from polyxla_training.observe.compilations import is_torch_compiled, warm_up_steps
from polyxla_training.observe.tracer import Tracer

TIMEOUT_S = 60.0


HERE = Path(__file__).name


def modes() -> list[Any]:
    found: list[Any] = _get_current_function_mode_stack()
    return found


def test_the_line_that_falls_back_is_found(counters: Any, fallback_op: Callable[[Any], Any]) -> None:
    tracer = Tracer(counters)
    tracer.start()
    for _ in range(3):
        fallback_op(torch.zeros(1))
    assert tracer.stop()
    [(finding, count)] = tracer.found.items()
    assert (finding.kind, finding.op, count) == ("fallback", "polyxla_test::slow", 3)
    assert finding.line.endswith(
        f"{HERE}:{test_the_line_that_falls_back_is_found.__code__.co_firstlineno + 4}"
    )


def test_calls_before_start_and_after_stop_are_not_seen(
    counters: Any, fallback_op: Callable[[Any], Any]
) -> None:
    tracer = Tracer(counters)
    fallback_op(torch.zeros(1))
    tracer.start()
    tracer.stop()
    fallback_op(torch.zeros(1))
    assert not tracer.found


class Other(TorchFunctionMode):
    """A mode of the user."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_users_mode_ends_with_its_own_block(counters: Any, fallback_op: Callable[[Any], Any]) -> None:
    tracer, other = Tracer(counters), Other()
    with other:
        tracer.start()
        fallback_op(torch.zeros(1))
    assert modes() == [tracer], "it began within the other, and continues after its end"
    with other:
        assert tracer.stop()
        fallback_op(torch.zeros(1))
        assert modes() == [other], "it ended within the other"
    assert sum(tracer.found.values()) == 1


def test_a_default_device_ends_with_its_own_block(counters: Any, fallback_op: Callable[[Any], Any]) -> None:
    tracer = Tracer(counters)
    with torch.device("meta"):
        tracer.start()
        assert torch.zeros(1).is_meta
    assert modes() == [tracer]
    torch.set_default_device("meta")
    try:
        fallback_op(torch.zeros(1, device="cpu"))
        assert tracer.stop()
        tracer.start()
    finally:
        torch.set_default_device(None)
        # Which torch 2.9's get_default_device does not take for an answer.
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
    assert modes() == [tracer]
    assert tracer.stop()


def test_a_read_in_a_backward_hook_is_found(counters: Any, fallback_op: Callable[[Any], Any]) -> None:
    tracer = Tracer(counters)
    weight = torch.ones(1, requires_grad=True)
    tracer.start()
    loss = weight * 2
    loss.register_hook(lambda gradient: fallback_op(gradient.detach()))
    loss.backward()
    assert tracer.stop()
    assert weight.grad is not None
    [finding] = tracer.found
    assert (finding.kind, finding.op) == ("fallback", "polyxla_test::slow")
    assert finding.line.endswith(
        f"{HERE}:{test_a_read_in_a_backward_hook_is_found.__code__.co_firstlineno + 6}"
    )


def test_an_error_in_the_backward_pass_leaves_one_tracer_on_the_stack(counters: Any) -> None:
    tracer = Tracer(counters)
    tracer.start()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(1).backward()
    assert modes() == [tracer]
    assert tracer.stop()


def test_of_calls_in_threads_only_readers_are_blamed(counters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counters.counts

    def count_after_a_read() -> Any:
        counters.reads += 1
        return counts()

    monkeypatch.setattr(counters, "counts", count_after_a_read)
    found = {}
    for is_shared in (False, True):
        tracer = Tracer(counters, is_shared=is_shared)
        tensor = torch.zeros(1)
        tracer.start()
        tensor.item()
        tensor.neg()
        tracer.stop()
        found[is_shared] = [finding.op for finding in tracer.found]
    assert found == {
        False: ["torch.Tensor.item", "torch.Tensor.neg"],
        True: ["torch.Tensor.item"],
    }


def test_tracing_ends_before_torch_compile_compiles(counters: Any) -> None:
    tracer, seen = Tracer(counters), []

    def compiler(graph: Any, _: Any) -> Any:
        seen.append((tracer.is_on, modes()))
        return graph.forward

    double = torch.compile(lambda value: value * 2, backend=compiler, fullgraph=True)
    assert warm_up_steps() == 2
    tracer.start()
    try:
        assert [double(torch.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
        assert not tracer.stop(), "it did not see every call"
        assert double(torch.ones(1)).item() == 2.0
        assert seen == [(False, [])], "and it is compiled once"
        assert is_torch_compiled()
        assert warm_up_steps() == 3
    finally:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()


def test_no_dispatch_mode_is_ever_entered() -> None:
    # Under a dispatch mode, torch_xla's collectives return wrong values.
    directories = [*polyxla.__path__, *polyxla_training.__path__]
    sources = {path: path.read_text() for directory in directories for path in Path(directory).rglob("*.py")}
    assert len(sources) > 100
    assert not [
        path for path, text in sources.items() if "TorchDispatchMode" in text or "FlopCounter" in text
    ]


def test_a_forked_child_is_not_traced(counters: Any) -> None:
    tracer = Tracer(counters)
    tracer.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if not modes() else 1)
    deadline = time.monotonic() + TIMEOUT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ended[1] == 0
    assert tracer.stop()
