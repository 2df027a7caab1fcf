"use strict";
// Data of the charts. All charts share the range of steps, cursor, smoothing and visible runs in `view`.
// A run is {name, color, step: [...], metrics: {key: [number | null | "nan" ...]}}.

const view = {
  runs: [], charts: [], hidden: new Set(), focus: null, cursor: null, from: null, to: null, smoothing: null,
  exact: new Set(),  // metrics that are never smoothed
  seeds: true,  // whether the runs of an arm are drawn
};

// element("p.under", { title }, ...children): class and attributes may be left out.
function element(selector, ...children) {
  const [name, style] = selector.split("."), made = document.createElement(name);
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [key, value] of Object.entries({ class: style, ...attributes })) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.startsWith("aria-")) made.setAttribute(key, value);
    else if (![null, undefined, false].includes(value)) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

const cells = (values, name = "td") => values.map((value) => element(name, {}, value));

// A table that scrolls if it is wider than the page.
const sheet = (name, head, rows) => element("div.scroll", element("table", { class: name },
  head ? element("thead", head) : null, element("tbody", rows)));

// A button that is on or off.
function toggle(attributes, pressed, change, ...content) {
  const button = element("button", { type: "button", "aria-pressed": pressed, ...attributes, onclick: () => {
    pressed = !pressed;
    button.setAttribute("aria-pressed", pressed);
    change(pressed);
  } }, ...content);
  return button;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// A metric of a run: steps, values, smoothed values; values that are not finite are in `odd`.
function seriesOf(run, key) {
  run.series ??= Object.create(null);  // a metric may have any name
  if (run.members) return armSeries(run, key);
  if (!(key in run.series)) {
    const steps = [], values = [], odd = [];
    (run.metrics[key] ?? []).forEach((value, i) => {
      if (key === "sync/seconds" && run.step[i] === 0) return;  // includes the start of the engines
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

// Exponential moving average with bias correction. Few values, such as evaluations, are not smoothed.
function smoothed(values, weight) {
  if (!weight || values.length < 30) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

// Index of the last step that is not after this one, -1 if there is none.
const indexAt = (steps, step) => steps.findLastIndex((one) => one <= step);

// The value of a run at a step, or the last one before it; null after the end of the run.
function valueAt(run, key, step, which = "values") {
  if (!run.step.length || step > run.step.at(-1)) return null;
  const series = seriesOf(run, key), index = indexAt(series.steps, step);
  // Of an arm, other seeds may have a finite value at this step.
  const odd = series.steps[index] === step ? null : series.odd.find(([at]) => at === step);
  return odd ? odd[1] : series[which][index] ?? null;
}

const visibleRuns = () => view.runs.filter((run) => !view.hidden.has(run));

function stepRange() {
  const shown = visibleRuns().filter((run) => run.step.length);
  const first = Math.min(...shown.map((run) => run.step[0]));
  const last = Math.max(...shown.map((run) => run.step.at(-1)));
  return shown.length ? [view.from ?? first, Math.max(view.to ?? last, (view.from ?? first) + 1)] : [0, 1];
}
