"""Explains why programs were compiled, by their inputs and their constants, and limits their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from polyxla import PolyxlaError, UsageError
from polyxla.plugin import is_tensor, leaves_with_paths, location, say, user_line
from polyxla_training.observe.performance import in_seconds

if TYPE_CHECKING:
    import torch

    from polyxla.plugin import Counters, Counts, Loader


class CompileBudgetError(PolyxlaError):
    """A training compiled more programs than its budget allows."""


class CompileBudget:
    """Counts unexpected compilations.

    Args:
        allowed: number of programs; None for no limit.
        on_budget: ``warn`` or ``raise`` when more are compiled.

    Attributes:
        spent: number of programs so far.

    Raises:
        UsageError: `on_budget` is neither, or `allowed` is negative.
    """

    def __init__(self, allowed: int | None, on_budget: str) -> None:
        if on_budget not in {"warn", "raise"}:
            raise UsageError(
                "on_budget is neither 'warn' nor 'raise'",
                where=f"on_budget={on_budget!r}",
                fix="Write on_budget='warn' or 'raise'.",
            )
        if allowed is not None and allowed < 0:
            raise UsageError(
                "compile_budget is negative",
                where=f"compile_budget={allowed}",
                fix="Write compile_budget=0 to allow no compilations.",
            )
        self.allowed = allowed
        self.spent = 0
        self._is_strict = on_budget == "raise"
        self._has_warned = False

    def spend(self, compiles: int, why: str) -> None:
        """Count compilations.

        Args:
            compiles: number of programs.
            why: the cause, for the message.

        Raises:
            CompileBudgetError: the budget is exceeded, and `on_budget` is ``raise``.
        """
        self.spent += compiles
        if self.allowed is None or self.spent <= self.allowed:
            return
        text = (
            f"{self.spent} programs were compiled after the first steps, but compile_budget={self.allowed} "
            f"allows fewer; the last: {why}. Give every batch the same shape (drop_last, pad), or raise the "
            "budget."
        )
        if self._is_strict:
            raise CompileBudgetError(text)
        if not self._has_warned:
            say(text)
        # Warned once: further compilations are in the run log and in the report.
        self._has_warned = True


Signature = tuple[Any, Any]
"""A tensor's shape and dtype; of anything else, its type and None."""
MAX_CHANGES = 4
"""Number of changed inputs that a message names; with more, it would be too long to read."""


def signatures(batch: Any) -> tuple[Signature, ...]:
    """Return the signature of each leaf of `batch`, in a fixed order. Called every step."""
    # Lists of tensors are the most common batches; this runs in every step, and walking a pytree costs more.
    if type(batch) in {list, tuple} and all(map(is_tensor, batch)):
        return tuple([(tensor.shape, tensor.dtype) for tensor in batch])
    return tuple([_signature(leaf) for _, leaf in leaves_with_paths(batch)])


def _signature(leaf: Any) -> Signature:
    return (leaf.shape, leaf.dtype) if is_tensor(leaf) else (type(leaf), None)


def describe_changes(
    batch: Any, before: tuple[Signature, ...], after: tuple[Signature, ...] | None = None
) -> str | None:
    """Describe the inputs that changed, such as ``batch['x'] [32, 64] float32 -> [7, 64] float32``.

    Args:
        batch: the current inputs.
        before: the earlier inputs, as `signatures` returned them.
        after: the later ones; default: those of `batch`, which otherwise gives their names only.

    Returns:
        The changes, or None if the signatures are the same.
    """
    now = {path: _signature(leaf) for path, leaf in leaves_with_paths(batch)}
    if after is not None and len(after) == len(now):
        now = dict(zip(now, after, strict=True))
    if len(now) != len(before):
        return f"batch of {len(before)} parts -> {len(now)}: {', '.join(now)}"
    pairs = zip(now.items(), before, strict=True)
    changes = [f"{path} {_text(old)} -> {_text(new)}" for (path, new), old in pairs if new != old]
    more = f", and {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
    return ", ".join(changes[:MAX_CHANGES]) + more if changes else None


def _text(signature: Signature) -> str:
    shape, dtype = signature
    if dtype is None:
        return str(shape.__name__)
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


_DECOUPLED = ("AdamW", "Adafactor", "Muon")


def constant_factors(optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield a sentence for each factor that is 1 in float32, which torch_xla makes a constant.

    `polyxla.Replica.step` keeps them inputs; a loop that calls ``optimizer.step()`` itself does not.
    """
    if optimizer is None:
        return
    # Imported here, because it imports torch, which `polyxla report` does not need.
    from polyxla.plugin import HALF_STEP, correction_is_one

    name = type(optimizer).__name__
    advice = "now 1 in float32, and so a constant of the program; replica.step(optimizer) keeps it an input"
    for group in optimizer.param_groups:
        rate, decay = group.get("lr"), group.get("weight_decay")
        is_decoupled = group.get("decoupled_weight_decay") or name in _DECOUPLED
        product = rate * decay if isinstance(rate, float) and isinstance(decay, float) else 0.0
        if is_decoupled and 0 < product <= HALF_STEP:
            yield f"{name}'s factor 1 - lr * weight_decay is {advice}"
        if correction_is_one(optimizer, group):
            yield f"{name}'s factor sqrt(1 - beta2 ** step) is {advice}"


SAME_INPUTS = "the same inputs: another Python path or a changed constant"
UNKNOWN_INPUTS = (
    "another input shape (replica.loader would show it), another Python path, or a changed constant"
)
OTHER_REPLICA = ", or another replica of this process"


class StepFacts(NamedTuple):
    """The loop's facts about a step, besides its batch.

    Attributes:
        optimizer: made the step; None if it is unknown.
        optimizers: number of optimizers so far; in the second step of each, it has a state.
        is_lagging: whether the counters show the program of the step before, and not yet this one's.
        has_evaluated: whether the loop used another loader since the last step.
    """

    optimizer: torch.optim.Optimizer | None = None
    optimizers: int = 1
    is_lagging: bool = False
    has_evaluated: bool = False


@dataclass(frozen=True)
class Compilation:
    """Programs that were compiled in one step, or between two.

    Attributes:
        step: number of the step, or of the step before.
        compiles: number of programs.
        seconds: time that their compilation took; 0 where the framework does not tell.
        cause: what differed from the step before.
        line: the user's line, ``file:line``; None if it is unknown.
        expected: whether every training compiles here.
    """

    step: int
    compiles: int
    seconds: float
    cause: str
    line: str | None
    expected: bool

    def __str__(self) -> str:
        programs = "a program" if self.compiles == 1 else f"{self.compiles} programs"
        at = f" ({self.line})" if self.line else ""
        took = in_seconds(self.seconds, ".2g")
        as_expected = ", as expected" if self.expected else ""
        return f"step {self.step} compiled {programs}{took}{as_expected}: {self.cause}{at}"

    def as_json(self) -> dict[str, Any]:
        """Return every field by its name."""
        return asdict(self)


class CompilationTracker:
    """Explains compilations by comparing each batch with the one before.

    Args:
        counters: counts compilations.
        budget: limits the unexpected ones.
        module: the Trainer's module; None in a user's own loop.
        is_shared: whether other replicas are threads of this process, whose programs are counted too.
        report: receives each compilation; default: print it.

    Attributes:
        total: number of programs compiled.
        seconds: time that their compilation took.
    """

    def __init__(
        self,
        counters: Counters,
        budget: CompileBudget,
        module: Any,
        *,
        is_shared: bool = False,
        report: Callable[[Compilation], None] | None = None,
    ) -> None:
        self._counters, self._budget = counters, budget
        self._other = OTHER_REPLICA if is_shared else ""
        self._module = module
        self._print = report or (lambda compilation: say(str(compilation)))
        self._constant_factors: set[str] = set()
        self._steps = 0
        self._step_loader: Loader | None = None
        self._step_inputs: tuple[Signature, ...] | None = None
        self._arrived_inputs: tuple[Signature, ...] | None = None
        self._evaluation_inputs: tuple[Signature, ...] | None = None
        self._has_evaluated = False
        self._evaluated_at = -1
        self._explained_s = counters.compile_s()
        self.total, self.seconds = 0, 0.0

    def step(
        self,
        step: int,
        delta: Counts,
        loader: Loader | None,
        cut: str | None,
        facts: StepFacts = StepFacts(),  # noqa: B008
    ) -> Compilation | None:
        """Record a finished step; report and return what it compiled. Called every step.

        Args:
            step: its number.
            delta: the counts since the step before.
            loader: gave its last batch.
            cut: why the step ran as several programs; None if it did not.
            facts: the rest.
        """
        self._steps += 1
        # Recorded after every step, whether it compiled or not: the next step is compared with it.
        before, self._step_loader = self._step_inputs, loader
        inputs, self._arrived_inputs = (
            self._arrived_inputs,
            None if loader is None else signatures(loader.batch),
        )
        # In a loop that submits a step with the next one, the counters show the program of the step before,
        # which had the inputs before.
        self._step_inputs = inputs if facts.is_lagging else self._arrived_inputs
        if not delta.compiles:
            return None
        change = None
        if loader is not None and before is not None and self._step_inputs is not None:
            change = describe_changes(loader.batch, before, self._step_inputs)
        factor = self._new_constant_factor(facts.optimizer)
        # New inputs explain a compilation better than the warm-up does, and the user can avoid them.
        expected = self._steps <= warm_up_steps() * facts.optimizers and change is None
        if expected:
            cause = _WARM_UP[min(self._steps, len(_WARM_UP)) - 1]
        elif facts.has_evaluated and not self._has_evaluated and change is None:
            self._has_evaluated, expected, cause = True, True, "the first evaluation"
        else:
            cause = change or factor or (UNKNOWN_INPUTS if loader is None else SAME_INPUTS) + self._other
        if cut:
            cause += f"; {cut}"
        return self._record(step, delta.compiles, cause, self._line(), expected=expected)

    def may_compile(self, loader: Loader | None) -> bool:
        """Return whether the step that has ended is one of the first, or had other inputs than the last."""
        if self._steps < warm_up_steps() or loader is None:
            return self._steps < warm_up_steps()
        return signatures(loader.batch) != self._arrived_inputs

    def is_evaluation(self, loader: Loader | None) -> bool:
        """Return whether the last batch came from another loader than that of the steps."""
        return loader is not None and loader is not self._step_loader

    def _new_constant_factor(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        """Return what has become a constant of the optimizer's program since the last compilation."""
        # A factor is reported once: when it becomes 1, the program is compiled again, and then stays as it
        # is.
        known, self._constant_factors = self._constant_factors, set(constant_factors(optimizer))
        return next(iter(sorted(self._constant_factors - known)), None)

    def _line(self) -> str | None:
        # With a module, polyxla's own loop makes the steps; the user's frame is then that of `Trainer.fit`.
        return user_line() if self._module is None else _line_of_training_step(self._module)

    def between_steps(self, step: int, delta: Counts, loader: Loader | None) -> Compilation | None:
        """Record metrics between two steps; print and return what computing them compiled.

        Args:
            step: number of the step before.
            delta: the counts since that step.
            loader: gave the last batch: the evaluation's loader, if there was an evaluation.
        """
        # Only the first exchange after an evaluation is the evaluation's. Those that follow at the end of an
        # epoch, such as a checkpoint's, are not.
        if loader is None or not self.is_evaluation(loader) or self._evaluated_at == self._steps:
            return self._record(
                step, delta.compiles, "an exchange of metrics or of a checkpoint", None, expected=True
            )
        self._evaluated_at = self._steps
        before, self._evaluation_inputs = self._evaluation_inputs, signatures(loader.batch)
        if before is None:
            return self._record(step, delta.compiles, "the first evaluation", None, expected=True)
        cause = describe_changes(loader.batch, before) or SAME_INPUTS + self._other
        return self._record(step, delta.compiles, f"in an evaluation, {cause}", None, expected=False)

    def _record(
        self, step: int, compiles: int, cause: str, line: str | None, *, expected: bool
    ) -> Compilation | None:
        if not compiles:
            return None
        now_s = self._counters.compile_s()
        compilation = Compilation(step, compiles, now_s - self._explained_s, cause, line, expected)
        self.total += compiles
        self.seconds += compilation.seconds
        self._explained_s = now_s
        self._print(compilation)
        return compilation

    def spend(self, compilation: Compilation) -> None:
        """Take an unexpected compilation from the budget.

        Raises:
            CompileBudgetError: the budget is exceeded, and is strict.
        """
        if not compilation.expected:
            self._budget.spend(compilation.compiles, str(compilation))


_WARM_UP = (
    "the first step",
    "the second step, for which the optimizer has a state",
    "the third step, in which torch.compile compiles what otherwise belongs to the second",
)


def warm_up_steps() -> int:
    """Return how many steps compile in every training: two, and under torch.compile three."""
    return len(_WARM_UP) if is_torch_compiled() else len(_WARM_UP) - 1


def is_torch_compiled() -> bool:
    """Return whether torch.compile has compiled a function in this process."""
    # Check sys.modules; importing torch._dynamo takes seconds.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    # With fullgraph=True, only the second counter grows.
    counters = dynamo.counters
    return bool(counters["frames"]["total"] or counters["stats"]["unique_graphs"])


def _line_of_training_step(module: Any) -> str | None:
    method = getattr(module, "training_step", None)
    code = getattr(method, "__code__", None)
    return location(code) if code else None
