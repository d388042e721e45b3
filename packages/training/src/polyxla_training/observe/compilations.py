"""Explains why programs were compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from polyxla.callsite import location, user_line
from polyxla.console import say
from polyxla_training.observe.compile_budget import CompileBudget
from polyxla_training.observe.input_shapes import Signature, describe_changes, signatures
from polyxla_training.observe.tracing.trace_schedule import is_torch_compiled

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters, Counts
    from polyxla.replica.loader import Loader

SAME_INPUTS = "the same inputs: another Python path or a changed constant"
OTHER_REPLICA = ", or another replica of this process"


@dataclass(frozen=True)
class Compilation:
    """Programs that were compiled in one step, or between two.

    Attributes:
        step: number of the step, or of the step before.
        compiles: number of programs.
        seconds: time that their compilation took.
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
        as_expected = ", as expected" if self.expected else ""
        return f"step {self.step} compiled {programs} in {self.seconds:.2g} s{as_expected}: {self.cause}{at}"

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

    Attributes:
        total: number of programs compiled.
        seconds: time that their compilation took.
    """

    def __init__(
        self, counters: Counters, budget: CompileBudget, module: Any, *, is_shared: bool = False
    ) -> None:
        self._counters, self._budget = counters, budget
        self._unchanged = SAME_INPUTS + (OTHER_REPLICA if is_shared else "")
        self._module = module
        self._steps = 0
        self._step_loader: Loader | None = None
        self._step_inputs: tuple[Signature, ...] | None = None
        self._evaluation_inputs: tuple[Signature, ...] | None = None
        self._explained_s = counters.compile_s()
        self.total, self.seconds = 0, 0.0

    def step(self, step: int, delta: Counts, loader: Loader | None, cut: str | None) -> Compilation | None:
        """Record a finished step; print and return what it compiled. Called every step.

        Args:
            step: its number.
            delta: the counts since the step before.
            loader: gave its last batch.
            cut: why the step ran as several programs; None if it did not.
        """
        self._steps += 1
        # Remembered after every step, compiled or not: the next one is compared with it.
        before, self._step_loader = self._step_inputs, loader
        self._step_inputs = signatures(loader.batch) if loader is not None else None
        if not delta.compiles:
            return None
        change = describe_changes(loader.batch, before) if loader is not None and before is not None else None
        # New inputs explain a compilation better than the warm-up does, and are the user's to avoid.
        expected = self._steps <= warm_up_steps() and change is None
        cause = _WARM_UP[self._steps - 1] if expected else change or self._unchanged
        if cut:
            cause += f"; {cut}"
        return self._record(step, delta.compiles, cause, self._line(), expected=expected)

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
        if loader is None or loader is self._step_loader:
            return self._record(step, delta.compiles, "metrics of the steps", None, expected=True)
        before, self._evaluation_inputs = self._evaluation_inputs, signatures(loader.batch)
        if before is None:
            return self._record(step, delta.compiles, "the first evaluation", None, expected=True)
        cause = describe_changes(loader.batch, before) or self._unchanged
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
        say(str(compilation))
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


def _line_of_training_step(module: Any) -> str | None:
    method = getattr(module, "training_step", None)
    code = getattr(method, "__code__", None)
    return location(code) if code else None
