"""The report as one self-contained HTML page. Heavy: imported when a page is made."""

from __future__ import annotations

from importlib.resources import files

from polyxla.errors import UsageError, pip_install
from polyxla_training.observe.report import text
from polyxla_training.observe.report.plots import plots, svg
from polyxla_training.observe.report.run import Run

try:
    from jinja2 import Environment
except ImportError as error:
    raise UsageError(
        "Jinja is not installed, which renders the report's page",
        where="polyxla report",
        fix=f"Install it: {pip_install('polyxla-training[report]')}, or use polyxla report --text.",
    ) from error


def render(run: Run) -> str:
    """Return the page; texts of the run are escaped, and the plots are inline."""
    template = files("polyxla_training.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        run=run,
        title=text.title(run),
        facts=text.facts(run),
        findings=text.findings(run),
        settings={name: value for name, value in run.start.get("settings", {}).items() if value is not None},
        plots=[(plot.name, svg(plot)) for plot in plots(run)],
    )
