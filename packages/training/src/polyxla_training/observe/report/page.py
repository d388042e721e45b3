"""The report as one self-contained HTML page. Heavy: imported when a page is made."""

from __future__ import annotations

from typing import Any

from polyxla import UsageError
from polyxla.plugin import pip_install
from polyxla_training.observe.report import text
from polyxla_training.observe.report.comparison import Comparison, origin
from polyxla_training.observe.report.plots import AXES, COLOURS, compared_figures, figures
from polyxla_training.observe.report.run import Run

try:
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise UsageError(
        f"{error.name} is not installed, which the report's page needs",
        where="polyxla report",
        fix=f"Install it: {pip_install('polyxla-training[report]')}, or use polyxla report --text.",
    ) from error


def render(run: Run) -> str:
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
    loader = PackageLoader("polyxla_training.observe.report", "templates")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    # Plotly's own code, inline: it is what makes the page work without a network.
    plotly = get_plotlyjs() if values["figures"] else ""
    return environment.get_template(template).render(plotly=plotly, axes=AXES, **values)
