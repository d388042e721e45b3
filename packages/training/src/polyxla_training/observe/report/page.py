"""The report as one self-contained HTML page, with Plotly's figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyxla import UsageError
from polyxla.plugin import pip_install
from polyxla_training.observe.report import text
from polyxla_training.observe.report.run import Curve, LoggedRun, progress_at
from polyxla_training.observe.report.text import Comparison, origin

COLOURS = ("#2f7ed8", "#e07b39", "#2a9d6f", "#b5499b", "#8a8a2a", "#6a6ad8")
"""Colours of the curves, distinguishable on white and on black."""
DASHES = ("solid", "dot", "dash", "dashdot")
"""Lines of a comparison: the colour is the run's, the dash the curve's."""
AXES = ("step", "records", "minutes")
"""The quantities that the horizontal axis can show."""
INK = "#8a8f98"
"""Colour of axes and texts, readable on white and on black."""
FAINT = "rgba(138, 143, 152, 0.2)"
_STAGES = re.compile(
    r" \(epoch\)$|(?<![a-z0-9])(train(ing)?|val(id(ation)?)?|eval(uation)?|test|epoch|step)(?![a-z0-9])",
    re.IGNORECASE,
)
"""The parts of a metric's name that say when it was measured."""
FEW_POINTS = 30
"""Curves of at most this many points have a marker at each."""


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        name: its title.
        unit: the label of its vertical axis.
        curves: by name.
        kind: ``line``, or ``stems`` for occasional events.
        starts_at_zero: the vertical axis does.
        marks: steps with an unexpected compilation.
    """

    name: str
    unit: str
    curves: Mapping[str, Curve]
    kind: str = "line"
    starts_at_zero: bool = False
    marks: list[int] = field(default_factory=list)


def plots(run: LoggedRun) -> list[Plot]:
    """Return the plots that the run has data for."""
    return [plot for plot in _candidates(run) if any(plot.curves.values())]


def _candidates(run: LoggedRun) -> Iterator[Plot]:
    marks = [compilation["step"] for compilation in run.compiles if not compilation["expected"]]
    for name, curves in _by_topic(run.all_values()).items():
        yield Plot(name, "value", curves)
    yield Plot("Learning rate", "rate", run.learning_rates())
    times = {"step time": run.rate("step_s", 1e3)}
    waiting = {"waiting": run.rate("wait_share", 100.0)}
    yield Plot("Step time", "ms", times, starts_at_zero=True, marks=marks)
    yield Plot("Throughput", "records/s", {"throughput": run.rate("records_per_s")}, marks=marks)
    yield Plot("Waiting for input", "% of the time", waiting, starts_at_zero=True)
    yield Plot("Compilations", "s", _compilations(run), kind="stems", starts_at_zero=True)
    yield _memory(run.memory())
    yield Plot("MFU", "% of the peak", {"MFU": run.rate("mfu", 100.0)})


def _by_topic(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Divide curves by what they measure: ``loss``, ``train/loss`` and ``val_loss_epoch`` go together.

    Values of different metrics have different sizes; on one axis, the smaller ones would be flat.
    """
    # The words of a stage are removed from a name; what remains is the topic.
    topics: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        topic = _STAGES.sub("", name).strip("/_. -") or name
        topics.setdefault(topic, {})[name] = curve
    return dict(sorted(topics.items(), key=lambda topic: "loss" not in topic[0].lower()))


def _compilations(run: LoggedRun) -> dict[str, Curve]:
    names = {True: "expected", False: "unexpected"}
    curves: dict[str, Curve] = {}
    for compilation in run.compiles:
        curves.setdefault(names[compilation["expected"]], []).append(
            (compilation["step"], compilation["seconds"])
        )
    return curves


def _memory(curve: Curve) -> Plot:
    most = max((value for _, value in curve), default=0)
    # One unit for the whole curve, chosen by its highest point.
    unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    return Plot("Device memory", name, {"in use": [(step, value / unit) for step, value in curve]})


def figures(run: LoggedRun) -> list[dict[str, Any]]:
    """Return a figure of Plotly for each plot of a run: its ``name``, ``data`` and ``layout``."""
    return [
        _figure(
            plot,
            [
                _trace(run, plot, curve, name, colour=COLOURS[number % len(COLOURS)], dash=_dash(number))
                for number, (name, curve) in enumerate(plot.curves.items())
            ],
            {axis: _along(run, axis, plot.marks) for axis in AXES},
        )
        for plot in plots(run)
    ]


def compared_figures(runs: Mapping[str, LoggedRun]) -> list[dict[str, Any]]:
    """Return a figure for each plot of several runs: one colour a run, one dash a curve.

    Args:
        runs: at most as many as there are `COLOURS`, by the name that the legend shows.
    """
    by_plot: dict[str, list[tuple[str, str, LoggedRun, Plot]]] = {}
    for colour, (run_name, run) in zip(COLOURS, runs.items(), strict=False):
        for plot in plots(run):
            by_plot.setdefault(plot.name, []).append((run_name, colour, run, plot))
    return [_compared_figure(parts) for parts in by_plot.values()]


def _compared_figure(parts: list[tuple[str, str, LoggedRun, Plot]]) -> dict[str, Any]:
    # All runs' names first, so that a curve has the same dash in each run.
    names = list(dict.fromkeys(name for *_, plot in parts for name in plot.curves))
    traces = []
    for run_name, colour, run, plot in parts:
        for name, curve in plot.curves.items():
            label = run_name if len(names) == 1 else f"{run_name}: {name}"
            dash = DASHES[names.index(name) % len(DASHES)]
            traces.append(_trace(run, plot, curve, label, colour=colour, dash=dash))
    # Omit marks: ambiguous across runs.
    return _figure(parts[0][-1], traces, {})


def _dash(number: int) -> str:
    """Return the line of a run's n-th curve, which differs from those of its colour."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def _along(run: LoggedRun, axis: str, steps: Iterable[float]) -> list[float]:
    """Return where steps are on an axis."""
    if axis == "step":
        return list(steps)
    seconds_and_records = (progress_at(run.milestones, step) for step in steps)
    return [records if axis == "records" else seconds / 60 for seconds, records in seconds_and_records]


def _trace(run: LoggedRun, plot: Plot, curve: Curve, name: str, *, colour: str, dash: str) -> dict[str, Any]:
    steps = [step for step, _ in curve]
    trace = {
        "type": "scatter",
        "name": name,
        "x": steps,
        "y": [value for _, value in curve],
        # Each point's place on the axes that the reader can choose; the page's script swaps them in.
        "meta": {axis: _along(run, axis, steps) for axis in AXES},
        "customdata": steps,
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "step %{customdata}: %{y:.5g}<extra>%{fullData.name}</extra>",
    }
    if plot.kind == "stems":
        heights = [value for _, value in curve]
        stem = {"type": "data", "symmetric": False, "array": [0] * len(heights), "arrayminus": heights}
        return trace | {"mode": "markers", "error_y": stem | {"width": 0, "thickness": 2, "color": colour}}
    # A single point without a marker would be invisible.
    mode = "lines+markers" if len(curve) <= FEW_POINTS else "lines"
    return trace | {"mode": mode, "line": {"color": colour, "dash": dash, "width": 2}}


def _figure(plot: Plot, traces: list[dict[str, Any]], marks: Mapping[str, list[float]]) -> dict[str, Any]:
    axis = {"gridcolor": FAINT, "linecolor": INK, "zeroline": False, "automargin": True}
    vertical = axis | {"title": {"text": plot.unit}}
    layout = {
        "height": 270,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "xaxis": axis | {"title": {"text": "step"}, "tickformat": ",d"},
        "yaxis": vertical | ({"rangemode": "tozero"} if plot.starts_at_zero else {}),
        "hovermode": "closest",
        # A single curve has a legend too: on paper, no mouse shows its name.
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "shapes": [_mark(step) for step in marks.get("step", [])],
        "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": INK},
        # Curves that the reader has hidden stay hidden when the page draws again.
        "uirevision": "kept",
    }
    return {"name": plot.name, "kind": plot.kind, "data": traces, "layout": layout, "marks": dict(marks)}


def _mark(step: float) -> dict[str, Any]:
    line = {"color": COLOURS[1], "width": 1, "dash": "dot"}
    return {"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def render(run: LoggedRun) -> str:
    """Return the page of one run; its texts are escaped, and the page loads nothing."""
    return _page(
        "run.html",
        run=run,
        title=text.title(run),
        facts=text.facts(run),
        findings=text.findings(run),
        origin=origin(run),
        figures=figures(run),
    )


def render_comparison(comparison: Comparison) -> str:
    """Return the page of several runs; their texts are escaped, and the page loads nothing."""
    return _page(
        "comparison.html",
        comparison=comparison,
        colours=COLOURS,
        title=f"Comparison of {', '.join(comparison.runs)}",
        figures=compared_figures(comparison.runs),
    )


def _page(template: str, **values: Any) -> str:
    try:
        from jinja2 import Environment, PackageLoader
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed, which the report's page needs",
            where="polyxla report",
            fix=f"Install it: {pip_install('polyxla-training[report]')}, or use polyxla report --text.",
        ) from error
    loader = PackageLoader("polyxla_training.observe.report", "templates")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    # Plotly's code is part of the page, which therefore works without a network.
    plotly = get_plotlyjs() if values["figures"] else ""
    return environment.get_template(template).render(plotly=plotly, axes=AXES, **values)
