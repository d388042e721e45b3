"""The report's plots as SVG. Heavy: imported when a page is made."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from polyxla.errors import UsageError, pip_install
from polyxla_training.observe.report.run import Curve, Run

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise UsageError(
        "matplotlib is not installed, which draws the report's plots",
        where="polyxla report",
        fix=f"Install it: {pip_install('polyxla-training[report]')}, or use polyxla report --text.",
    ) from error

COLOURS = ("#2f7ed8", "#e07b39", "#2a9d6f", "#b5499b", "#8a8a2a", "#6a6ad8")
"""Colours of the curves, distinguishable on white and on black."""
INK = "#8a8f98"
"""Colour of axes and texts, readable on white and on black."""
MAX_CURVES = len(COLOURS)


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        name: its title.
        unit: the label of its vertical axis.
        curves: by name.
        steps: number of steps in the run.
        kind: ``line``, or ``stems`` for occasional events.
        marks: steps with an unexpected compilation.
    """

    name: str
    unit: str
    curves: Mapping[str, Curve]
    steps: int
    kind: str = "line"
    marks: list[int] = field(default_factory=list)


def plots(run: Run) -> list[Plot]:
    """Return the plots that the run has data for."""
    return [plot for plot in _candidates(run) if any(plot.curves.values())]


def _candidates(run: Run) -> Iterator[Plot]:
    steps: int = run.summary["steps"]
    marks = [one["step"] for one in run.compiles if not one["expected"]]
    losses, others = _split(run.values() | run.evaluations(), lambda name: "loss" in name.lower())
    yield Plot("Loss", "loss", losses, steps)
    yield Plot("Other metrics", "value", others, steps)
    yield Plot("Step time", "ms", {"step time": run.rate("step_s", 1e3)}, steps, marks=marks)
    yield Plot("Throughput", "records/s", {"throughput": run.rate("records_per_s")}, steps, marks=marks)
    yield Plot("Waiting for input", "% of the time", {"waiting": run.rate("wait_share", 100.0)}, steps)
    yield Plot("Compilations", "s", _compilations(run), steps, kind="stems")
    yield Plot("Device memory", "GiB", {"in use": run.memory()}, steps)
    yield Plot("MFU", "% of the peak", {"MFU": run.rate("mfu", 100.0)}, steps)


def _split(
    curves: Mapping[str, Curve], test: Callable[[str], bool]
) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Divide curves by their names; keep the first `MAX_CURVES` of each part."""
    yes = {name: curve for name, curve in curves.items() if test(name)}
    no = {name: curve for name, curve in curves.items() if not test(name)}
    return dict(list(yes.items())[:MAX_CURVES]), dict(list(no.items())[:MAX_CURVES])


def _compilations(run: Run) -> dict[str, Curve]:
    names = {True: "expected", False: "unexpected"}
    curves: dict[str, Curve] = {}
    for one in run.compiles:
        curves.setdefault(names[one["expected"]], []).append((one["step"], one["seconds"]))
    return curves


def figure(plot: Plot) -> Figure:
    """Draw one plot with a transparent background."""
    drawn = Figure(figsize=(6.4, 2.6), layout="constrained")
    drawn.patch.set_alpha(0)
    axes = drawn.add_subplot()
    axes.patch.set_alpha(0)
    for (name, curve), colour in zip(plot.curves.items(), COLOURS, strict=False):
        steps, values = zip(*curve, strict=True) if curve else ((), ())
        if plot.kind == "stems":
            axes.vlines(steps, 0, values, colors=colour, linewidth=2)
            axes.plot(steps, values, "o", color=colour, markersize=5, label=name)
        else:
            # Markers, if there are few enough points to see them.
            axes.plot(
                steps, values, color=colour, marker="o" if len(curve) < 30 else "", markersize=3, label=name
            )
    for number, step in enumerate(plot.marks):
        label = "compiled" if number == 0 else None
        axes.axvline(step, color=COLOURS[1], linewidth=0.8, linestyle=":", label=label)
    _dress(axes, plot)
    return drawn


def _dress(axes: mpl.axes.Axes, plot: Plot) -> None:
    axes.set_xlabel("step", color=INK)
    # The same range in all plots of a run.
    axes.set_xlim(0, plot.steps * 1.02 or None)
    axes.set_ylabel(plot.unit, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(visible=True, color=INK, alpha=0.2, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in {"left", "bottom"})
    if plot.kind == "stems" or "waiting" in plot.curves or plot.unit == "ms":
        axes.set_ylim(bottom=0)
    if len(plot.curves) > 1 or plot.marks:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)


def svg(plot: Plot) -> str:
    """Return one plot as an SVG element; the same data produce the same text."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure(plot).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
