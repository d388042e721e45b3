"""The values that a module logs: the current step's, and reductions over an epoch, kept on the device."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from polyxla import UsageError
from polyxla.plugin import count_records

if TYPE_CHECKING:
    from polyxla import Replica

Reduction = Literal["mean", "min", "max", "sum"]
REDUCTIONS: Mapping[Any, Reduction] = {
    "mean": "mean",
    "avg": "mean",
    torch.mean: "mean",
    "min": "min",
    min: "min",
    torch.min: "min",
    "max": "max",
    max: "max",
    torch.max: "max",
    "sum": "sum",
    sum: "sum",
    torch.sum: "sum",
}
"""The values of ``reduce_fx``. Source: Lightning 2.6, which accepts the same."""


def find_reduction(name: str, reduce_fx: Any, before: Reduction | None) -> Reduction:
    """Return the reduction that `reduce_fx` names.

    Args:
        name: the logged name.
        reduce_fx: as the user wrote it.
        before: the reduction of the name's values so far; None if there are none.

    Raises:
        UsageError: it names none, or another one than before.
    """
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    kind = REDUCTIONS.get(key) if callable(key) or isinstance(key, str) else None
    if kind is None or before not in (None, kind):
        also = f" follows {before!r}" if kind else " is not supported"
        raise UsageError(
            f"reduce_fx={reduce_fx!r}{also}",
            where=f"self.log({name!r}, ...)",
            fix="Write one of mean, min, max and sum for each name, or log a torchmetrics object.",
        )
    return kind


def find_levels(
    name: str, is_training: bool, on_step: bool | None, on_epoch: bool | None
) -> tuple[bool, bool]:
    """Return whether a value is reported for its step, and whether for the epoch.

    Args:
        name: the logged name.
        is_training: whether it is logged in a training step.
        on_step: as the user wrote it; None: only in training.
        on_epoch: as the user wrote it; None: only outside training.

    Raises:
        UsageError: neither, or a value of an evaluation is to be reported for its step.
    """
    if on_step and not is_training:
        raise UsageError(
            "on_step=True outside a training step",
            where=f"self.log({name!r}, ...)",
            fix="Leave it out: the reduction over the epoch is reported.",
        )
    levels = (is_training if on_step is None else on_step, not is_training if on_epoch is None else on_epoch)
    if not any(levels):
        raise UsageError(
            "with neither on_step nor on_epoch the value would be dropped",
            where=f"self.log({name!r}, ...)",
            fix="Write on_epoch=True.",
        )
    return levels


def check_others(
    name: str, unknown: Iterable[str], known: Iterable[str], unsupported: Mapping[str, Any]
) -> None:
    """Refuse arguments that would be ignored.

    Args:
        name: the logged name.
        unknown: names of arguments that `log` does not have.
        known: names of those that it has.
        unsupported: arguments that must keep their defaults, which are false, with their values.

    Raises:
        UsageError: there is such an argument.
    """
    # Only the first: one mistake at a time is easier to read than a list.
    for option in unknown:
        near = difflib.get_close_matches(option, known, n=1)
        raise UsageError(
            f"self.log has no argument {option!r}",
            where=f"self.log({name!r}, ...)",
            fix=f"Write {near[0]}=." if near else "Leave it out.",
        )
    for option, value in unsupported.items():
        if value:
            raise UsageError(
                f"{option}={value!r} is not supported",
                where=f"self.log({name!r}, ...)",
                fix="Leave it out: values are detached, and combined over all replicas.",
            )


EMPTY: Mapping[Reduction, float] = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""The reduction of no values."""

Total = tuple[float, float, Reduction]
"""The reduction of the values so far (a weighted sum for the mean), their weight, and its kind."""


@dataclass
class _Running:
    """The reduction of one name's values so far."""

    kind: Reduction
    total: Any
    weight: float = 0.0


class MetricAccumulator:
    """Collects ``log(name, value)`` calls without waiting for the device.

    Args:
        replica: combines values that are logged with ``sync_dist``; None: there is only one replica.

    Attributes:
        latest: the values that the current step logged, by name.
        hidden: names that were logged with ``logger=False``, which listeners do not show.
        batch_size: number of real records in the current batch, which is the weight of its values.
        valid: mask of its real records, bool ``[record]``; None if all are real.
        is_training: whether values belong to steps (True) or to an epoch (False), unless the call says so.
    """

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica = replica
        self.latest: dict[str, Any] = {}
        # Names stay hidden for the whole training: an epoch's mean has no logger= argument of its own.
        self.hidden: set[str] = set()
        self.valid: torch.Tensor | None
        self._objects: dict[str, Any] = {}
        self._running: dict[str, _Running] = {}
        self._refusing_hook = ""
        self.outside_batches()

    def start_batch(
        self, batch: Any, is_training: bool, real: int | None = None, valid: torch.Tensor | None = None
    ) -> None:
        """Drop the last step's values and take the weight of the next batch.

        Args:
            batch: the records.
            is_training: whether its values belong to a step.
            real: number of records that are not padding; None for all, as is 0 without a mask.
            valid: mask of those records.
        """
        self.latest = {}
        self.is_training = is_training
        self.valid = valid
        self._records = count_records(batch) or 1
        is_known = real is not None and (real > 0 or valid is not None)
        self.batch_size = real if real is not None and is_known else self._records

    def outside_batches(self) -> None:
        """Give what is logged between batches, such as in an epoch's first and last hook, a weight of 1."""
        self.is_training = False
        self.batch_size = self._records = 1
        self.valid = None

    @contextmanager
    def refusing(self, hook: str) -> Iterator[None]:
        """Refuse all values in the block: the epoch's metrics are computed already, so they would be lost."""
        self._refusing_hook = hook
        try:
            yield
        finally:
            self._refusing_hook = ""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
        **unknown: Any,
    ) -> None:
        """Log one value. The arguments are Lightning's, in its order.

        Args:
            name: its name.
            value: a number; a tensor of one element, or of one per record, which is reduced over the real
                records; or a metric object such as torchmetrics'.
            prog_bar: show it, even with ``logger=False``. Progress shows all values that are not hidden.
            logger: False hides it from progress and log files; `fit` returns it nevertheless, and it may be
                monitored.
            on_step: report the step's value; default: in training only.
            on_epoch: report its reduction over the epoch and all replicas; default: only outside training.
            reduce_fx: ``mean``, weighted by `batch_size`, or ``min``, ``max`` or ``sum``.
            enable_graph: must be False: values are detached.
            sync_dist: combine a step's value over the replicas too; otherwise ordinal 0's is shown.
            sync_dist_group: must be None: values are combined over all replicas.
            add_dataloader_idx: without effect: there is one loader.
            batch_size: its weight in the mean; default: the batch's first dimension.
            metric_attribute: without effect: a metric object is found by itself.
            rank_zero_only: ignore the other replicas' values.
            unknown: refused.

        Raises:
            UsageError: the value is of another kind, or an argument cannot be honoured.
        """
        self._check(name, unknown, enable_graph=enable_graph, sync_dist_group=sync_dist_group)
        running = self._running.get(name)
        kind = find_reduction(name, reduce_fx, running.kind if running else None)
        on_step, on_epoch = find_levels(name, self.is_training, on_step, on_epoch)
        # In every replica: all of them receive the mean of a value that only the first logs.
        if logger is False and not prog_bar:
            self.hidden.add(name)
        # Checked after the arguments, so that a mistake in them is an error in every replica.
        if rank_zero_only and self._replica is not None and not self._replica.is_first:
            return
        if callable(getattr(value, "compute", None)):
            self._log_object(name, value, on_step)
            return
        value = self._over_records(value, kind) if self._is_by_record(value) else _scalar(name, value)
        if on_step:
            self.latest[name] = self._synced(value, kind) if sync_dist else value
        weight = self.batch_size if batch_size is None else batch_size
        # A batch of padding only, made because other replicas have records left, has a weight of 0.
        if weight and on_epoch:
            self._add(name, value, weight, kind)

    def _check(self, name: str, unknown: Mapping[str, Any], **unsupported: Any) -> None:
        if self._refusing_hook:
            raise UsageError(
                f"{name!r} is logged in {self._refusing_hook}, when the epoch's metrics are computed already",
                where="self.log",
                fix="Log it in on_train_epoch_end or on_validation_epoch_end.",
            )
        check_others(name, unknown, MetricAccumulator.log.__annotations__, unsupported)

    def _log_object(self, name: str, metric: Any, on_step: bool) -> None:
        # Only the latest object is kept: it accumulates by itself, and is logged again at each step.
        self._objects[name] = metric
        # torchmetrics keeps the value of the latest batch here.
        latest = getattr(metric, "_forward_cache", None)
        if on_step and latest is not None:
            self.latest[name] = _scalar(name, latest)

    def _synced(self, value: Any, kind: Reduction) -> Any:
        if self._replica is None or self._replica.world_size == 1:
            return value
        if not isinstance(value, torch.Tensor):
            # Uploaded, and with a dimension, for the reasons that `_add` gives.
            value = torch.tensor([value], dtype=torch.float32).to(self._replica.device)
        return self._replica.all_reduce(_at_least_float32(value), kind)

    def _is_by_record(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == (self._records,) and value.numel() > 1

    def _over_records(self, value: torch.Tensor, kind: Reduction) -> torch.Tensor:
        value = _at_least_float32(value.detach())
        if self.valid is not None:
            # Not a product with the mask: the value of a padding record may be infinite.
            value = torch.where(self.valid, value, torch.full_like(value, EMPTY[kind]))
        if kind == "mean":
            return value.sum() / max(self.batch_size, 1)
        reduced: torch.Tensor = getattr(torch, kind)(value)
        return reduced

    def _add(self, name: str, value: Any, weight: float, kind: Reduction) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            # In float16, a loss of 700 times a batch size of 128 overflows.
            value = _at_least_float32(value)
        running = self._running.get(name)
        if running is None:
            start: Any = EMPTY[kind]
            if is_tensor:
                # Uploaded, not made on the device: a lazily made zero would be a constant of the first
                # batch's program, which then differs from all later ones and is compiled separately. With a
                # dimension, because torch_xla makes an uploaded scalar of 0 or 1 a constant too.
                start = torch.full((1,), start, dtype=value.dtype).to(value.device)
            running = self._running[name] = _Running(kind, start)
        running.total = _reduce((running.total, value * weight if kind == "mean" else value), kind)
        running.weight += weight

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """Log several values by name; the other arguments are those of `log`."""
        # A torchmetrics MetricCollection, whose items() has the names with their prefix only if asked.
        is_collection = callable(getattr(dictionary, "compute", None))
        items: Iterable[tuple[str, Any]] = (
            dictionary.items(keep_base=False) if is_collection else dictionary.items()  # type: ignore[call-arg]
        )
        for name, value in items:
            self.log(name, value, *arguments, **options)

    def without_hidden(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that listeners show."""
        if not self.hidden:
            return dict(values)
        return {name: value for name, value in values.items() if name not in self.hidden}

    def take(self, replica: Replica) -> dict[str, float]:
        """Return the reductions over every replica's records since the last call, and reset them.

        A collective. Waits for the device. Metric objects are computed and reset; they cover one replica's
        records.

        Raises:
            UsageError: metric objects were logged on several replicas: their results cannot be averaged.
        """
        computed = self._computed(replica)
        # One exchange for all names: replicas may have logged different names, so no collective may depend on
        # them.
        totals = self.state_dict()
        self._running = {}
        # A replica whose share of the records was only padding has a total of weight 0, or none at all.
        gathered = replica.all_gather(totals)
        names = {name for totals in gathered for name in totals}
        means = {
            name: _result(totals[name] for totals in gathered if name in totals) for name in sorted(names)
        }
        return means | computed

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Collect the values in the block apart from those of the epoch so far."""
        before, self._running, self._objects = (self._running, self._objects), {}, {}
        yield
        self._running, self._objects = before

    @property
    def objects(self) -> list[str]:
        """The names of the metric objects of the epoch so far; a state does not have their values."""
        return sorted(self._objects)

    def state_dict(self) -> dict[str, Total]:
        """Return the epoch's totals, weights and kinds so far, by name. Waits for the device."""
        return {
            name: (float(running.total), running.weight, running.kind)
            for name, running in self._running.items()
        }

    def load_state_dict(self, state: Mapping[str, Total]) -> None:
        """Continue from `state_dict`."""
        self._running = {name: _Running(kind, total, weight) for name, (total, weight, kind) in state.items()}

    def _computed(self, replica: Replica) -> dict[str, float]:
        objects, self._objects = self._objects, {}
        if objects and replica.world_size > 1:
            raise UsageError(
                f"metric objects cannot be combined over {replica.world_size} replicas: {sorted(objects)}",
                where="self.log",
                fix="Log the batch's value instead, such as its accuracy: the mean over batches is exact.",
            )
        values = {name: float(metric.compute()) for name, metric in objects.items()}
        for metric in objects.values():
            metric.reset()
        return values


def combine_totals(parts: Iterable[Total]) -> Total:
    """Return the total of several replicas' totals of one name."""
    totals, weights, kinds = zip(*parts, strict=True)
    return _reduce(totals, kinds[0]), sum(weights), kinds[0]


def _result(parts: Iterable[Total]) -> float:
    total, weight, kind = combine_totals(parts)
    return total / weight if kind == "mean" else total


def _reduce(values: tuple[Any, ...], kind: Reduction) -> Any:
    # Not torch.stack: the values may be Python's numbers, tensors on the device, or both.
    if kind in ("mean", "sum"):
        return sum(values[1:], start=values[0])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return min(values) if kind == "min" else max(values)
    pick: Callable[..., torch.Tensor] = torch.minimum if kind == "min" else torch.maximum
    return pick(*(torch.as_tensor(value, device=tensors[0].device) for value in values))


def _at_least_float32(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()) if value.dim() else value.detach()
    if isinstance(value, numbers.Real):
        return value
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise UsageError(
        f"{name!r} is logged as {kind}",
        where="self.log",
        fix="Log a number, or a tensor of one element or of one per record.",
    )
