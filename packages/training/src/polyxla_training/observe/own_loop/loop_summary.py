"""The summary that a watched replica returns to the launching process, which compares the replicas.

Imports no torch: the launching process may do without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampledParameter:
    """Some elements of a trained parameter.

    Attributes:
        name: its name and shape, or its number in its optimizer.
        values: the elements.
        tolerance: the largest difference that rounding explains.
    """

    name: str
    values: tuple[float, ...]
    tolerance: float

    def differs(self, other: SampledParameter) -> bool:
        """Return whether the elements are not those of another replica."""
        limit = max(self.tolerance, other.tolerance)
        # Written so that a NaN in only one of them is a difference.
        return any(
            not (abs(mine - its) <= limit or (math.isnan(mine) and math.isnan(its)))
            for mine, its in zip(self.values, other.values, strict=True)
        )


@dataclass(frozen=True)
class WholeDataset:
    """A dataset of which a replica read all records.

    Attributes:
        name: its class.
        records: its length.
        digest: the same in replicas that have the same dataset, as far as a glance shows.
    """

    name: str
    records: int
    digest: int


@dataclass(frozen=True)
class LoopSummary:
    """One replica's loop.

    Attributes:
        steps: number of optimizer steps.
        line: the line that made the first of them; None if it is unknown.
        parameters: some elements of what was trained.
        dataset: the dataset of which it read all records; None if it read a part, or that is unknown.
    """

    steps: int
    line: str | None
    parameters: tuple[SampledParameter, ...]
    dataset: WholeDataset | None


def problems(replicas: Mapping[int, LoopSummary]) -> Iterator[str]:
    """Describe what replicas did that are silently wrong together.

    Args:
        replicas: the summaries of several replicas, by ordinal.
    """
    first = replicas[min(replicas)]
    at = f"{first.line}: " if first.line else ""
    if difference := _describe_difference(
        {ordinal: summary.parameters for ordinal, summary in replicas.items()}
    ):
        yield (
            f"{at}replicas trained different parameters: {difference}. Either the gradients are not averaged "
            "(optimizer.step() does not): call replica.step(optimizer), or torch_xla's xm.optimizer_step. "
            "Or the parameters began with other values: seed before you make the module, or call "
            "replica.setup(module); if on purpose, replica.setup(module, same=False)"
        )
    # The same digest everywhere: replicas that read different parts of a dataset have divided it.
    dataset = first.dataset
    if dataset and all(summary.dataset == dataset for summary in replicas.values()):
        yield (
            f"{at}each of {len(replicas)} replicas trained on all {dataset.records:,} records of "
            f"{dataset.name}: they are not divided. Write: for batch in replica.loader(loader)"
        )


def _describe_difference(replicas: Mapping[int, Sequence[SampledParameter]]) -> str | None:
    """Describe the first parameter that differs between replicas; None if none does.

    Args:
        replicas: the samples of each replica, by ordinal.
    """
    # Compared with the first replica: if any two differ, one of them differs from it.
    (first, mine), *others = sorted(replicas.items())
    for ordinal, its in others:
        # With other names, the replicas train different modules.
        if [sample.name for sample in its] != [sample.name for sample in mine]:
            continue
        for own, other in zip(mine, its, strict=True):
            if own.differs(other):
                at = max(range(len(own.values)), key=lambda i: _gap(own.values[i], other.values[i]))
                return (
                    f"{own.name} holds {own.values[at]:.6g} in replica {first} and "
                    f"{other.values[at]:.6g} in replica {ordinal}"
                )
    return None


def _gap(own: float, other: float) -> float:
    gap = abs(own - other)
    return math.inf if math.isnan(gap) else gap
