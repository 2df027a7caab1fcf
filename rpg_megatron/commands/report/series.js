"use strict";
// Charts of steps as SVG. All of them share one range of steps, one cursor, one smoothing and one set of
// visible
// runs: the object `view`. A run is {name, color, step: [...], metrics: {key: [number | null | "nan" ...]}}.

const view = {
  runs: [], charts: [], hidden: new Set(), focus: null, cursor: null, from: null, to: null, smoothing: 0,
  exact: new Set(),  // metrics that are never smoothed
};

// -- elements -----------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.startsWith("aria-")) made.setAttribute(key, value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// -- series -------------------------------------------------------------------------------------------------

// What was measured of a metric: steps, values, smoothed values; a value that is no finite number is in
// `odd`.
function seriesOf(run, key) {
  run.series ??= Object.create(null);  // a metric may have any name
  if (!(key in run.series)) {
    const steps = [], values = [], odd = [];
    (run.metrics[key] ?? []).forEach((value, i) => {
      if (key === "sync/seconds" && run.step[i] === 0) return;  // that one waited for the engines to start
      if (typeof value === "number") { steps.push(run.step[i]); values.push(value); }
      else if (value !== null) odd.push([run.step[i], value]);
    });
    run.series[key] = { steps, values, odd, smooth: null, smoothing: null };
  }
  const series = run.series[key];
  if (series.smoothing !== view.smoothing) {
    series.smoothing = view.smoothing;
    series.smooth = view.exact.has(key) ? series.values : smoothed(series.values, view.smoothing);
  }
  return series;
}

const FEW = 30;  // fewer values, evaluations for one, are shown as they are

// Exponential mean whose weights sum to one from the first value on, so that it does not lean towards zero.
function smoothed(values, weight) {
  if (!weight || values.length < FEW) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

// Index of the last step that is not after this one, -1 if there is none.
function indexAt(steps, step) {
  let low = -1, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
}

// A run's value at a step: what was measured there, or last before; none after the run's end.
function valueAt(run, key, step, which = "values") {
  if (!run.step.length || step > run.step.at(-1)) return null;
  const series = seriesOf(run, key);
  const odd = series.odd.find(([at]) => at === step);
  return odd ? odd[1] : series[which][indexAt(series.steps, step)] ?? null;
}

const visibleRuns = () => view.runs.filter((run) => !view.hidden.has(run));

function stepRange() {
  const shown = visibleRuns().filter((run) => run.step.length);
  const first = Math.min(...shown.map((run) => run.step[0]));
  const last = Math.max(...shown.map((run) => run.step.at(-1)));
  return shown.length ? [view.from ?? first, Math.max(view.to ?? last, (view.from ?? first) + 1)] : [0, 1];
}
