"""A run's log, and the report of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from polyxla import UsageError
from polyxla_training.observe import RunLog, read_run
from polyxla_training.observe.report import text
from polyxla_training.observe.report.page import compared_figures, figures, plots, render
from polyxla_training.observe.report.run import LoggedRun, progress_at
from polyxla_training.observe.report.text import Comparison, short_names
from polyxla_training.observe.run_log import newest_run

TIMEOUT_S = 60.0
START = {
    "event": "start",
    "started": "2026-01-02T03:04:05+00:00",
    "polyxla": "0.1.0",
    "runtime": "pjrt",
    "device": "CPU",
    "world_size": 4,
    "module": "Digits",
    "step": 0,
    "time": 1000.0,
    "settings": {"max_epochs": 3, "seed": None},
}


def step(number: int, **fields: Any) -> dict[str, Any]:
    rates = {"step_s": 0.01, "records_per_s": 3200.0, "wait_share": 0.1, "mfu": None, "memory": None}
    reached = {"time": 1000.0 + 6 * number, "records": 32 * number, "lr": [0.1 / number]}
    return {"event": "step", "step": number, "values": {"loss": 1 / number}, **rates, **reached, **fields}


def compiled(number: int, **fields: Any) -> dict[str, Any]:
    values = {
        "compiles": 1,
        "seconds": 0.5,
        "cause": "the first step",
        "line": "train.py:3",
        "expected": True,
    }
    return {"event": "compile", "step": number, **values, **fields}


def end(**fields: Any) -> dict[str, Any]:
    totals = {"steps": 20, "seconds": 2.5, "compiles": 2, "compile_s": 1.0, "unexpected": 1, "fallbacks": {}}
    rates = {"step_s": 0.01, "wait_share": 0.1, "records_per_s": 3200.0, "mfu": None, "reads_per_step": 1.0}
    return {"event": "end", "summary": totals | rates, "findings": [], "error": None, **fields}


EVENTS = [
    START,
    compiled(1),
    {"event": "finding", "step": 1, "kind": "read", "op": "aten::equal", "line": "train.py:9", "count": 2},
    *[step(number) for number in (5, 10, 15)],
    compiled(17, cause="batch[0] [32] float32 -> [7] float32", expected=False),
    step(20),
    {"event": "metrics", "step": 20, "values": {"val_loss": 0.25, "accuracy": 0.9}},
    {"event": "not_finite", "name": "norm", "step": 20},
    end(),
]


def run_of(*events: dict[str, Any]) -> LoggedRun:
    return LoggedRun.of("runs/one", events)


def write(folder: Path, events: list[dict[str, Any]], rest: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(event) for event in events]
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n" + rest)
    return folder


# The file


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "a" / "run")
    log.write("start", path=Path("x"), nested={"values": [1.0, float("nan")]})
    # Read before the file is closed: a run that is killed must keep these lines.
    [event] = read_run(tmp_path / "a" / "run")
    assert event.pop("time") == pytest.approx(time.time(), abs=TIMEOUT_S)
    assert event == {"event": "start", "path": "x", "nested": {"values": [1.0, None]}}
    log.close()


@given(st.integers(1, 200))
def test_a_line_that_was_cut_off_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = write(tmp_path_factory.mktemp("run"), EVENTS[:6])
    path = folder / "run.jsonl"
    kept = path.read_bytes()[:-cut]
    path.write_bytes(kept)
    # A line that only lost its end of line is whole.
    assert read_run(folder) in (EVENTS[: kept.count(b"\n")], EVENTS[: kept.count(b"\n") + 1])


def test_the_next_run_is_appended_even_after_a_torn_line(tmp_path: Path) -> None:
    write(tmp_path, EVENTS, rest='{"event": "st')
    log = RunLog(tmp_path)
    log.write("start", number=2, step=0)
    log.close()
    [event] = read_run(tmp_path)
    assert event["number"] == 2
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == len(EVENTS) + 2


@pytest.mark.parametrize("content", ["", '{"event": "step"}\n', "no json\n"])
def test_a_file_without_a_run_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"^the file contains no run"):
        read_run(tmp_path)


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no run\.jsonl"):
        read_run(tmp_path)


def test_the_newest_run_is_the_one_written_to_last(tmp_path: Path) -> None:
    for number, name in enumerate(["b", "c/d", "a"]):
        os.utime(write(tmp_path / name, EVENTS) / "run.jsonl", (number, number))
    assert newest_run(tmp_path) == tmp_path / "a"
    with pytest.raises(UsageError, match="no run below"):
        newest_run(tmp_path / "b" / "nowhere")


# The run


def test_events_become_curves() -> None:
    run = run_of(*EVENTS)
    assert run.rate("step_s", 1e3) == [(5, 10.0), (10, 10.0), (15, 10.0), (20, 10.0)]
    assert run.values() == {"loss": [(5, 0.2), (10, 0.1), (15, 1 / 15), (20, 0.05)]}
    assert run.evaluations() == {"val_loss": [(20, 0.25)], "accuracy": [(20, 0.9)]}
    assert run.rate("mfu") == run.memory() == []
    assert run.learning_rates() == {"learning rate": [(5, 0.02), (10, 0.01), (15, 0.1 / 15), (20, 0.005)]}
    assert progress_at(run.milestones, 10) == (60.0, 320.0)
    assert progress_at(run.milestones, 12) == (72.0, 384.0), "on the line between two"
    assert progress_at(run.milestones, 25) == (150.0, 800.0), "as fast as before"


def test_a_resumed_run_is_one_run() -> None:
    # It was killed after step 10, and resumed from a checkpoint of step 7: steps 8 to 10 were repeated.
    resumed = {**START, "step": 7, "time": 5000.0, "started": "2026-01-02T09:00:00+00:00"}
    finding = {"event": "finding", "step": 1, "kind": "read", "op": "item", "line": "a.py:1", "count": 1}
    before = [START, *[step(number) for number in (1, 5, 10)], compiled(1), finding]
    metrics = {"event": "metrics", "step": 10, "values": {"loss": 9.0}}
    after = [step(n, values={"loss": 2.0}, time=5000.0 + 6 * (n - 7), records=32 * (n - 7)) for n in (8, 12)]
    run = run_of(*before, metrics, resumed, compiled(8), finding, *after, end())
    assert run.all_values() == {"loss": [(1, 1.0), (5, 0.2), (8, 2.0), (12, 2.0)]}
    assert run.started == "started 2026-01-02T03:04:05+00:00, resumed at step 7"
    assert (run.summary["steps"], run.summary["compiles"], run.summary["compile_s"]) == (7 + 20, 3, 1.5)
    assert run.summary["seconds"] == 6 * 10 + 2.5
    assert run.findings == [finding]
    assert [progress_at(run.milestones, number) for number in (5, 7, 12)] == [
        (30.0, 160.0),
        (42.0, 224.0),
        (72.0, 384.0),
    ]
    assert run.outcome == "finished"


def test_a_new_run_in_the_same_directory_is_another(tmp_path: Path) -> None:
    resumed = {**START, "step": 20, "number": 2}
    write(tmp_path, [*EVENTS, {**START, "number": 1}, *EVENTS[1:], resumed, step(25)])
    events = read_run(tmp_path)
    assert [event["number"] for event in events if event["event"] == "start"] == [1, 2]
    assert len(events) == len(EVENTS) + 2


def test_a_log_of_an_older_release_has_no_records_and_no_time() -> None:
    old = [
        {name: value for name, value in event.items() if name not in ("time", "records", "lr")}
        for event in EVENTS
    ]
    assert [figure["name"] for figure in figures(run_of(*old))] == [
        name for name in NAMES if name != "Learning rate"
    ]


def test_an_epochs_mean_does_not_replace_the_values_of_the_steps() -> None:
    run = run_of(START, step(5), {"event": "metrics", "step": 5, "values": {"loss": 0.5}})
    assert run.all_values() == {"loss": [(5, 0.2)], "loss (epoch)": [(5, 0.5)]}


def test_all_metrics_are_drawn_by_what_they_measure() -> None:
    names = ["acc", "val_acc", "train/loss", "val/loss", "test-acc", "step_count", "lr_value", *"abcdefghij"]
    events = {"event": "metrics", "step": 5, "values": dict.fromkeys(names, 1.0)}
    run = run_of(START, step(5, values={"many": 1.0, **{f"many_{stage}": 1.0 for stage in STAGES}}), events)
    drawn = {figure["name"]: [trace["name"] for trace in figure["data"]] for figure in figures(run)}
    assert next(iter(drawn)) == "loss"
    assert drawn["loss"] == ["train/loss", "val/loss"]
    assert drawn["acc"] == ["acc", "val_acc", "test-acc"]
    assert {"count", "lr_value", *"abcdefghij"} <= set(drawn)
    many = next(figure for figure in figures(run) if figure["name"] == "many")
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in many["data"]}) == 1 + len(STAGES)
    assert all(figure["layout"]["showlegend"] for figure in figures(run)), "also that of a single curve"


def test_groups_with_different_learning_rates_have_a_curve_each() -> None:
    run = run_of(START, step(5, lr=[0.1, 0.1]), step(10, lr=[0.1, 0.2]))
    assert run.learning_rates() == {"group 0": [(5, 0.1), (10, 0.1)], "group 1": [(5, 0.1), (10, 0.2)]}


def test_values_that_are_missing_leave_a_gap() -> None:
    run = run_of(START, step(5, values={"loss": None}), step(10, step_s=None))
    assert run.values() == {"loss": [(10, 0.1)]}
    assert run.rate("step_s") == [(5, 0.01)]


@pytest.mark.parametrize(("used", "unit", "shown"), [(3 * 2**30, "GiB", 3.0), (2**19, "MiB", 0.5)])
def test_memory_is_shown_in_a_unit_that_fits(used: int, unit: str, shown: float) -> None:
    memory = {"used_bytes": used, "limit_bytes": 2**35, "peak_bytes": None}
    drawn = {plot.name: plot for plot in plots(run_of(START, step(5, memory=memory)))}["Device memory"]
    assert (drawn.unit, drawn.curves) == (unit, {"in use": [(5, shown)]})


def test_a_killed_run_still_adds_up() -> None:
    run = run_of(*EVENTS[:-1])
    assert run.outcome == "no end: it was killed, or is still running"
    assert (run.summary["steps"], run.summary["compiles"], run.summary["unexpected"]) == (20, 2, 1)
    assert "train.py:9" in "\n".join(text.as_lines(run))
    assert "no end" in render(run)


def test_an_error_is_the_outcome() -> None:
    assert run_of(START, end(error="ValueError: no")).outcome == "ended by ValueError: no"


# Text


def test_the_terminal_shows_what_matters() -> None:
    lines = list(text.as_lines(run_of(*EVENTS)))
    assert lines[0] == "Digits on 4 replicas of CPU (pjrt), started 2026-01-02T03:04:05+00:00: finished"
    shown = "\n".join(lines)
    for part in (
        "step time            10 ms",
        "throughput           3,200 records/s",
        "programs compiled    2 in 1.0 s, 1 unexpected",
        "MFU                  not available: the chip is unknown",
        "last values: loss 0.05  val_loss 0.25  accuracy 0.9",
        "train.py:9: the host reads the device (aten::equal) 2 times a step",
        "norm is not finite from step 20 on",
        "step 17: 1 in 0.5 s, batch[0] [32] float32 -> [7] float32 (train.py:3)",
    ):
        assert part in shown


@pytest.mark.parametrize(("rate", "shown"), [(12345.6, "12,346 records/s"), (1.23456, "1.235 records/s")])
def test_a_throughput_is_shown_with_four_digits_or_more(rate: float, shown: str) -> None:
    events = [START, step(1), end()]
    events[-1]["summary"]["records_per_s"] = rate
    assert text.facts(run_of(*events))["throughput"] == shown


def test_many_compilations_are_cut_short_on_the_terminal() -> None:
    lines = list(text.as_lines(run_of(START, *[compiled(number) for number in range(1, 31)], end())))
    assert lines[-1] == "  and 10 more"


# The page


class _Page(HTMLParser):
    """Collects tags, what they would load, and the texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        for name in ("src", "href", "xlink:href", "data", "action"):
            if found.get(name) and not str(found[name]).startswith("#"):
                self.loads.append(f"{tag} {name}={found[name]}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


NAMES = [
    "loss",
    "accuracy",
    "Learning rate",
    "Step time",
    "Throughput",
    "Waiting for input",
    "Compilations",
]
STAGES = ("train", "val", "test", "eval", "step", "epoch", "valid", "validation")


def embedded(html: str) -> list[dict[str, Any]]:
    """Return the figures that a page draws."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    drawn: list[dict[str, Any]] = json.loads(found[1])
    return drawn


def test_the_page_has_its_plots_and_loads_nothing() -> None:
    html = render(run_of(*EVENTS))
    page = _Page(html)
    assert [name for name in NAMES if name in page.texts] == NAMES
    assert [figure["name"] for figure in embedded(html)] == NAMES
    assert page.loads == []
    own = html.replace(get_plotlyjs(), "")
    assert len(own) < len(html), "Plotly is in the page"
    assert not re.search(r"https?://|@import", own)
    units = {figure["layout"]["yaxis"]["title"]["text"] for figure in embedded(html)}
    assert {"ms", "records/s", "% of the time"} <= units


def test_plotly_accepts_the_figures() -> None:
    for figure in figures(run_of(*EVENTS)) + compared_figures({"a": run_of(*EVENTS), "b": run_of(*EVENTS)}):
        Figure(data=figure["data"], layout=figure["layout"])


CONTROL = """<script>
const slider = document.getElementById("smoothing");
slider.value = 0.5;
slider.dispatchEvent(new Event("input", { bubbles: true }));
const minutes = () => {
  axisChoice.value = "minutes";
  axisChoice.dispatchEvent(new Event("input", { bubbles: true }));
  const { title, range } = places[0].layout.xaxis;
  return { x: places[0].data[0].x, title: title.text, range };
};
Plotly.relayout(places[0], { "xaxis.range[0]": 5, "xaxis.range[1]": 15 }).then(() => setTimeout(() => {
  const shown = {
    loss: places[0].data.map((trace) => trace.y),
    ranges: places.map((place) => place.layout.xaxis.range),
    drawn: places.map((place) => place.querySelectorAll("svg .trace").length),
    legends: places.map((place) => place.querySelectorAll("svg .legendtext").length),
  };
  shown.minutes = minutes();
  const found = document.createElement("pre");
  found.id = "found";
  found.textContent = JSON.stringify(shown);
  document.body.append(found);
}, 500));
</script></body>"""


@pytest.mark.long
def test_the_controls_work_in_a_browser(tmp_path: Path) -> None:
    browser = next((path for path in map(shutil.which, ("chromium", "google-chrome")) if path), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    page = tmp_path / "page.html"
    html = render(run_of(START, *[step(n, values={"loss": float(n)}) for n in (5, 10, 20)], end()))
    page.write_text(html.replace("</body>", CONTROL))
    options = ["--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *options, "--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
    # No network: a page that loads anything would wait, or miss it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    shown = json.loads(found)
    # Computed by hand: 5; (5/2 + 10)/1.5; (5/4 + 10/2 + 20)/1.75.
    assert shown["loss"] == [[5, 10, 20], pytest.approx([5, 8.3333333, 15])]
    assert set(map(tuple, shown["ranges"])) == {(5, 15)}
    assert all(shown["drawn"])
    assert all(shown["legends"]), "each curve has a name without a mouse"
    assert shown["minutes"] == {"x": [0.5, 1, 2], "title": "minutes", "range": [0, pytest.approx(2.04)]}


def test_the_page_reads_in_light_and_dark() -> None:
    html = render(run_of(*EVENTS))
    assert "prefers-color-scheme: dark" in html
    backgrounds = {
        figure["layout"][name] for figure in embedded(html) for name in ("paper_bgcolor", "plot_bgcolor")
    }
    assert backgrounds == {"rgba(0, 0, 0, 0)"}, "the page's own shows through"


def test_a_runs_texts_cannot_become_markup() -> None:
    html = render(run_of({**START, "module": "<script>"}, compiled(1, cause="<b>&x</b>"), end(error="<i>")))
    tags = _Page(html).tags
    assert not {"b", "i"} & set(tags)
    assert tags.count("script") == _Page(render(run_of(*EVENTS))).tags.count("script")


def test_a_curves_name_cannot_end_the_pages_data() -> None:
    name = "</script><img src=x onerror=alert(1)>loss"
    html = render(run_of(START, step(5, values={name: 1.0})))
    assert "img" not in _Page(html).tags
    assert [trace["name"] for trace in embedded(html)[0]["data"]] == [name]


def test_a_page_is_the_same_for_the_same_run() -> None:
    assert render(run_of(*EVENTS)) == render(run_of(*EVENTS))


def test_unexpected_compilations_are_marked_in_the_step_times() -> None:
    drawn = {plot.name: plot for plot in plots(run_of(*EVENTS))}
    assert drawn["Step time"].marks == [17]
    assert drawn["Compilations"].curves == {"expected": [(1, 0.5)], "unexpected": [(17, 0.5)]}
    times = next(figure for figure in figures(run_of(*EVENTS)) if figure["name"] == "Step time")
    assert [shape["x0"] for shape in times["layout"]["shapes"]] == [17]


def test_plots_without_data_are_left_out() -> None:
    assert plots(run_of(START)) == []
    assert "<script" not in render(run_of(START))


# The command


def report(*args: str, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{code}\nimport polyxla.cli.app; polyxla.cli.app.main()"
    return subprocess.run(
        [sys.executable, "-c", program, "report", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_newest_run_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "one", EVENTS)
    done = report(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Digits on 4 replicas" in done.stdout
    assert "wrote runs/one/report.html" in done.stdout
    assert (tmp_path / "runs" / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_out_writes_the_page_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", EVENTS)
    done = report(str(folder), "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("wrote page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in folder.iterdir()] == ["run.jsonl"]


def test_json_is_one_document_and_writes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", EVENTS)
    document = json.loads(report(str(folder), "--json", cwd=tmp_path).stdout)
    assert document["summary"]["steps"] == 20
    assert [event["step"] for event in document["compiles"]] == [1, 17]
    assert [path.name for path in folder.iterdir()] == ["run.jsonl"]


# Several runs


def other(**changed: Any) -> list[dict[str, Any]]:
    """Return the events of a run that differs in some fields of its start."""
    return [START | changed, *EVENTS[1:]]


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert short_names(["runs/a/log", "runs/b/log"]) == ["a", "b"]
    assert short_names(["x/1", "x/1"]) == [".", ". (2)"]
    assert short_names(["runs/a", "runs/a/b"]) == [".", "b"]
    assert short_names(["gs://bucket/a", "runs/b"]) == ["gs:/bucket/a", "runs/b"]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=2, max_size=6))
def test_every_run_has_a_name_of_its_own(paths: list[list[str]]) -> None:
    names = short_names(["/".join(parts) for parts in paths])
    assert len(set(names)) == len(paths)
    assert all(names)


def test_a_comparison_says_what_differs() -> None:
    git = {"commit": "1a2b3c4d5e6f", "branch": "main", "changed_files": 2}
    one, two = other(hyper_parameters={"lr": 0.1}), other(hyper_parameters={"lr": 0.2}, git=git)
    comparison = Comparison.of([LoggedRun.of("runs/one", one), LoggedRun.of("runs/two", two)])
    assert {row.name: row.values for row in comparison.settings() if row.differs} == {
        "hparams.lr": ("0.1", "0.2"),
        "git commit": ("", "1a2b3c4d5e on main, 2 files changed"),
    }
    shown = "\n".join(comparison.as_lines())
    assert re.search(r"throughput +3,200 records/s +3,200 records/s", shown)
    assert "max_epochs" not in shown, "what is the same is not printed"


def test_a_comparison_has_one_colour_a_run_and_one_dash_a_curve() -> None:
    losses = compared_figures({"a": run_of(*EVENTS), "b": run_of(*EVENTS)})[0]
    drawn = {trace["name"]: (trace["line"]["color"], trace["line"]["dash"]) for trace in losses["data"]}
    colours = {name: colour for name, (colour, _) in drawn.items()}
    assert set(drawn) == {"a: loss", "a: val_loss", "b: loss", "b: val_loss"}
    assert colours["a: loss"] == colours["a: val_loss"] != colours["b: loss"]
    assert drawn["a: loss"][1] == drawn["b: loss"][1] != drawn["b: val_loss"][1]


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    folders = [str(write(tmp_path / name, other(world_size=n))) for n, name in ((1, "small"), (8, "large"))]
    done = report("--compare", *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"replicas +1 +8\n", done.stdout)
    assert done.stdout.endswith("wrote comparison.html\n")
    page = _Page((tmp_path / "comparison.html").read_text())
    assert {"small", "large", "Results", "What differs"} <= set(page.texts)
    document = json.loads(report("--compare", *folders, "--json", cwd=tmp_path).stdout)
    assert document["differences"] == {"replicas": {"small": "1", "large": "8"}}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["one", "one"], "polyxla report --compare one one"),
        (["--compare", "one"], "a comparison is of 2 to 6 runs, not 1"),
        (["--compare", *["one"] * 7], "not 7"),
    ],
)
def test_a_wrong_number_of_runs_is_a_plain_error(tmp_path: Path, args: list[str], message: str) -> None:
    write(tmp_path / "one", EVENTS)
    done = report(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]


def test_without_the_extra_text_works_and_the_page_names_the_pip_command(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", EVENTS)
    hide = "import sys; sys.modules['plotly'] = None"
    done = report(str(folder), cwd=tmp_path, code=hide)
    assert done.returncode == 2
    assert "Install it: pip install " in done.stderr
    assert "training[report]" in done.stderr
    assert "Traceback" not in done.stderr
    done = report(str(folder), "--text", cwd=tmp_path, code=hide)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_run_is_a_plain_error(tmp_path: Path) -> None:
    done = report(cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no run below runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_help_and_its_listeners_import_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'torch_xla', 'plotly', 'jinja2', 'numpy', 'rich'}"
    code = (
        "import atexit, sys, os, polyxla_training.plugin, polyxla_training.observe.observer\n"
        f"atexit.register(lambda: print('heavy:', sorted({heavy} & set(sys.modules))))"
    )
    assert "heavy: []" in report("--help", cwd=tmp_path, code=code).stdout
