"""Says why a program was compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from polyxla.callsite import outside, place
from polyxla.console import say
from polyxla_training.observe.compile_budget import Budget
from polyxla_training.observe.input_shapes import Form, changed, forms
from polyxla_training.observe.torch_compiled import is_torch_compiled

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters, Counts
    from polyxla.replica.loader import Loader

SAME_INPUTS = "the same inputs: another Python path or a changed constant"
ANOTHER = ", or another replica of this process"


@dataclass(frozen=True)
class Compiled:
    """Programs that were compiled in one step, or between two.

    Attributes:
        step: number of the step, or of the one before.
        compiles: how many.
        seconds: how long that took.
        cause: what was different.
        line: the person's line, ``file:line``; None where it is not known.
        expected: whether every training does so.
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


class Compilations:
    """Compares each program's inputs with those of the one before.

    Args:
        counters: counts compilations.
        budget: pays for those that are not expected.
        module: what is trained; None in a loop of the person's own.
        is_shared: whether other replicas are threads of this process, whose programs are counted too.

    Attributes:
        total: programs compiled.
        seconds: how long that took.
    """

    def __init__(self, counters: Counters, budget: Budget, module: Any, *, is_shared: bool = False) -> None:
        self._counters, self._budget = counters, budget
        self._unchanged = SAME_INPUTS + (ANOTHER if is_shared else "")
        self._module = module
        self._loader: Loader | None = None
        self._forms: tuple[Form, ...] | None = None
        self._steps = 0
        self._evaluated: tuple[Form, ...] | None = None
        self._before_s = counters.compile_s()
        self.total, self.seconds = 0, 0.0

    def step(self, step: int, delta: Counts, loader: Loader | None, cut: str | None) -> Compiled | None:
        """Hear of a step; return what it compiled. Called every step.

        Args:
            step: its number.
            delta: what was counted since the one before.
            loader: gave its last batch.
            cut: what cut a program inside the step; None if nothing did.

        Raises:
            CompileBudgetError: that was one too many.
        """
        self._steps += 1
        before, self._loader = self._forms, loader
        self._forms = forms(loader.batch) if loader is not None else None
        if not delta.compiles:
            return None
        change = changed(loader.batch, before) if loader is not None and before is not None else None
        expected = self._steps <= warm_up_steps() and change is None
        cause = _WARM_UP[self._steps - 1] if expected else change or self._unchanged
        cause += f"; {cut}" if cut else ""
        return self._told(step, delta.compiles, cause, self._line(), expected=expected)

    def _line(self) -> str | None:
        # With a module, polyxla's own loop calls its training_step; the user's frame is that of `Trainer.fit`.
        return outside() if self._module is None else _line_of_training_step(self._module)

    def between(self, step: int, delta: Counts, loader: Loader | None) -> Compiled | None:
        """Hear of metrics, which an evaluation between two steps may have compiled programs for."""
        if loader is None or loader is self._loader:
            return self._told(step, delta.compiles, "metrics of the steps", None, expected=True)
        before, self._evaluated = self._evaluated, forms(loader.batch)
        if before is None:
            return self._told(step, delta.compiles, "the first evaluation", None, expected=True)
        cause = changed(loader.batch, before) or self._unchanged
        return self._told(step, delta.compiles, f"in an evaluation, {cause}", None, expected=False)

    def _told(
        self, step: int, compiles: int, cause: str, line: str | None, *, expected: bool
    ) -> Compiled | None:
        if not compiles:
            return None
        now = self._counters.compile_s()
        compiled = Compiled(step, compiles, now - self._before_s, cause, line, expected)
        self.total += compiles
        self.seconds += compiled.seconds
        self._before_s = now
        say(str(compiled))
        return compiled

    def pay(self, compiled: Compiled) -> None:
        """Take an unexpected compilation from the budget.

        Raises:
            CompileBudgetError: that was one too many.
        """
        if not compiled.expected:
            self._budget.spend(compiled.compiles, str(compiled))


_WARM_UP = (
    "the first step",
    "the second step, for which the optimizer has a state",
    "the third step, to which torch.compile puts off what others compile in the second",
)


def warm_up_steps() -> int:
    """Return how many steps compile as a matter of course: two, and under torch.compile three."""
    return len(_WARM_UP) if is_torch_compiled() else len(_WARM_UP) - 1


def _line_of_training_step(module: Any) -> str | None:
    method = getattr(module, "training_step", None)
    code = getattr(method, "__code__", None)
    return place(code) if code else None
