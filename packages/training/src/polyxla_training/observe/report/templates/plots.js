// Draws the figures of the page, and connects its controls.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const places = [...document.querySelectorAll(".plot")];
const options = { responsive: true, displaylogo: false, doubleClick: "autosize", modeBarButtons: [["toImage"]] };

const axisChoice = document.getElementById("axis");

// The part of the horizontal axis that all plots show.
function everything() {
  const ends = figures.flatMap((figure) => figure.data.map((trace) => trace.meta[axisChoice.value].at(-1) ?? 0));
  return { autorange: false, range: [0, Math.max(...ends) * 1.02] };
}
let zoom = everything();

// An exponential moving average, divided by the sum of its weights, so that the first points are not drawn to 0.
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

// The data of a figure: with smoothing, each curve twice, as it is (faint) and smooth. The uid is what Plotly
// knows a curve by, so that one hidden in the legend stays hidden.
function smoothed(figure, weight) {
  const traces = figure.data.map((trace) => ({
    ...trace, x: trace.meta[axisChoice.value], uid: trace.name, legendgroup: trace.name,
  }));
  if (weight === 0 || figure.kind !== "line") return traces;
  return traces.flatMap((trace) => [
    { ...trace, uid: `${trace.name} faint`, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: "" },
    { ...trace, y: smooth(trace.y, weight), mode: "lines" },
  ]);
}

function draw() {
  const weight = Number(document.getElementById("smoothing").value);
  const isLog = document.getElementById("log-scale").checked;
  document.getElementById("smoothing-value").value = weight.toFixed(2);
  figures.forEach((figure, index) => {
    const type = isLog && figure.kind === "line" ? "log" : "linear";
    const { xaxis, yaxis, shapes } = figure.layout;
    const marks = (figure.marks[axisChoice.value] ?? []).map((x, index) => ({ ...shapes[index], x0: x, x1: x }));
    const title = { text: axisChoice.value };
    const layout = { ...figure.layout, xaxis: { ...xaxis, ...zoom, title }, yaxis: { ...yaxis, type }, shapes: marks };
    if (axisChoice.value === "minutes") layout.xaxis.tickformat = "";
    Plotly.react(places[index], smoothed(figure, weight), layout, options);
  });
}

// A zoom of one plot becomes that of all.
function connect(place) {
  place.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) zoom = everything();
    else if (change["xaxis.range[0]"] !== undefined)
      zoom = { autorange: false, range: [change["xaxis.range[0]"], change["xaxis.range[1]"]] };
    else return;
    draw();
  });
}

axisChoice.addEventListener("input", () => { zoom = everything(); });
document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
document.querySelector(".controls").addEventListener("input", draw);
draw();
places.forEach(connect);
