// Charts of steps as SVG. All of them share the range, cursor, smoothing and visible runs in `view`.

// -- a chart ------------------------------------------------------------------------------------------------

const MARGIN = { left: 78, right: 10, top: 8, bottom: 22 };
const DASHES = ["", "5 3", "1.5 3", "8 2 2 2", "3 6"];
const tooltip = element("div", { id: "tooltip", hidden: true });

// A box beside the pointer. A row is [color, label, value, second value, whether it has the focus].
function showTooltip(event, name, rows, head = []) {
  tooltip.replaceChildren(element("b", {}, name), element("table", {},
    element("tr", {}, head.map((text) => element("th", {}, text))),
    rows.map(([color, label, value, other, focus]) => element("tr", { class: focus ? "focus" : null },
      element("td", {}, element("i", { class: `swatch ${color}` })), element("td", {}, label),
      element("td", {}, value), head.length ? element("td", {}, other) : null))));
  tooltip.hidden = !rows.length;
  const { innerWidth: wide, innerHeight: high } = window, box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, event.clientX + 16 + box.width > wide
    ? event.clientX - box.width - 16 : event.clientX + 16)}px`;
  tooltip.style.top = `${Math.max(4, Math.min(event.clientY + 12, high - box.height - 4))}px`;
}

// spec: {title, kind, series: [[key, label]...], log, note}; with `stack` the series of that run as areas.
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.log = spec.log ?? false;
    this.readout = element("output", { class: spec.series.length > 2 ? "long" : null });
    this.logButton = element("button", { type: "button", class: "log", "aria-pressed": this.log,
      title: "logarithmic", onclick: () => {
        this.log = !this.log;
        this.logButton.setAttribute("aria-pressed", this.log);
        this.draw();
      } }, "log");
    const many = spec.series.length > 1;
    const crowded = many && !spec.stack && view.runs.length > 3;
    this.off = new Set(crowded ? spec.series.slice(1).map(([key]) => key) : []);
    this.place = element("div", { class: "plot" });
    const name = element("h3", {}, spec.title, spec.note ? element("small", {}, spec.note) : null);
    const buttons = spec.series.map((one, i) => this.seriesButton(one, i));
    const attributes = { tabindex: 0, class: spec.stack ? "stack" : null, "data-chart": spec.title };
    this.figure = element("figure", attributes,
      element("figcaption", {}, name, spec.stack ? null : this.logButton, this.readout),
      many ? element("div", { class: "series" }, buttons) : null, this.place);
    this.figure.addEventListener("keydown", (event) => this.key(event));
    view.charts.push(this);
  }

  seriesButton([key, label], index) {
    const glyph = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    glyph.setAttribute("viewBox", "0 0 22 8");
    if (this.spec.stack) shape(glyph, "rect", { width: 12, height: 8, x: 5, rx: 2, class: `phase${index}` });
    else shape(glyph, "line", { x1: 0, x2: 22, y1: 4, y2: 4,
      "stroke-dasharray": DASHES[index % DASHES.length] });
    const button = element("button", { type: "button", "aria-pressed": !this.off.has(key), onclick: () => {
      if (!this.off.delete(key)) this.off.add(key);
      button.setAttribute("aria-pressed", !this.off.has(key));
      this.draw();
    } }, glyph, label);
    return button;
  }

  keys() { return this.spec.series.filter(([key]) => !this.off.has(key)); }
  runs() { return this.spec.stack ? [this.spec.stack] : visibleRuns(); }

  draw() {
    this.figure.hidden = isHidden(this.spec.stack);
    const width = this.place.clientWidth, height = Math.round(Math.min(190, 100 + width / 5));
    if (!width) return;  // inside a closed <details>
    this.size = [width, height];
    this.range = stepRange();
    const lines = this.spec.stack ? this.areas() : this.lines();
    this.domain(lines);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${this.spec.title} by step`);
    this.axes(svg);
    const left = MARGIN.left - 4, wide = width - left - MARGIN.right + 4, high = height - MARGIN.bottom + 4;
    const clipBox = { x: left, y: 0, width: wide, height: high, viewBox: `${left} 0 ${wide} ${high}` };
    const clip = shape(svg, "svg", clipBox);
    for (const line of lines) this.spec.stack ? this.area(clip, line) : this.line(clip, line);
    this.cursorLayer = shape(svg, "g", { class: "cursor" });
    this.selection = shape(svg, "rect", { class: "selection", y: MARGIN.top,
      height: height - MARGIN.top - MARGIN.bottom, width: 0 });
    this.listen(svg);
    this.place.replaceChildren(svg);
    this.svg = svg;
    const empty = !lines.some((line) => line.values.length);
    if (empty) shape(svg, "text", { class: "empty", x: width / 2, y: height / 2 }, "no data here");
    this.showCursor();
  }

  lines() {
    const found = [];
    for (const run of this.runs()) {
      for (const [key] of this.keys()) {
        const dash = DASHES[this.spec.series.findIndex(([k]) => k === key) % DASHES.length];
        found.push({ run, key, dash, ...seriesOf(run, key) });
      }
    }
    return found;
  }

  // Each series on top of the previous ones; `base`: its lower edge. Missing values count as 0.
  areas() {
    const run = this.spec.stack, keys = this.keys().map(([key]) => key);
    const number = (key, i) => (typeof run.metrics[key]?.[i] === "number" ? run.metrics[key][i] : null);
    const rows = [...run.step.keys()].filter((i) => keys.some((key) => number(key, i) !== null));
    let base = rows.map(() => 0);
    return keys.map((key) => {
      const start = base, values = rows.map((i, at) => start[at] + (number(key, i) ?? 0));
      base = values;
      return { run, steps: rows.map((i) => run.step[i]), base: start, values,
        phase: this.spec.series.findIndex(([k]) => k === key) };
    });
  }

  domain(lines) {
    const [from, to] = this.range;
    let low = Infinity, high = -Infinity;
    // Stacked charts of several runs are shown side by side, so they have the same scale.
    const all = this.spec.stack ? data.runs.map((run) => seriesOf(run, "time/step"))
      : lines.flatMap((line) => (line.run.members ? armReach(line, this.log) : []));
    for (const { steps, values } of [...lines, ...all]) {
      // From the last point before the range to the first one after it: the line runs there.
      for (let i = Math.max(0, indexAt(steps, from)); i < values.length && !(i && steps[i - 1] >= to); i++) {
        if (this.log && values[i] <= 0) continue;
        if (values[i] < low) low = values[i];
        if (values[i] > high) high = values[i];
      }
    }
    if (low > high) [low, high] = this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      const room = Math.max((high / low) ** 0.06, 1.3);
      this.y = [low / room, high * room];
      return;
    }
    const positive = low >= 0, fraction = this.spec.kind === "percent" && high <= 1;
    if (this.spec.stack || (positive && (low < 0.5 * high || this.spec.kind === "count"))) low = 0;
    if (high - low <= 1e-9 * Math.abs(high)) {  // equal but for rounding
      const around = Math.abs(low) * 0.1;
      [low, high] = high === 0 ? [0, fraction ? 0.01 : 1] : [low - around, high + around];
    }
    const room = (high - low) * 0.06;
    this.y = [positive && low - room < 0 ? 0 : low === 0 ? 0 : low - room, high + room];
    if (fraction) this.y[1] = Math.min(this.y[1], 1.005);
  }

  x(step) {
    const [from, to] = this.range;
    return MARGIN.left + ((step - from) / (to - from)) * (this.size[0] - MARGIN.left - MARGIN.right);
  }

  yOf(value) {
    const [low, high] = this.y, bottom = this.size[1] - MARGIN.bottom;
    const part = this.log ? Math.log(Math.max(value, low) / low) / Math.log(high / low)
      : (value - low) / (high - low);
    return bottom - part * (bottom - MARGIN.top);
  }

  axes(svg) {
    const [width, height] = this.size, bottom = height - MARGIN.bottom;
    for (const [value, text] of (this.log ? logTicks : linearTicks)(...this.y, this.spec.kind)) {
      const y = this.yOf(value);
      shape(svg, "line", { class: value === 0 ? "zero" : "grid", x1: MARGIN.left, x2: width - MARGIN.right,
        y1: y, y2: y });
      shape(svg, "text", { class: "tick", x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, text);
    }
    const ticks = niceTicks(...this.range, Math.max(2, Math.floor(width / 90)))[0].filter(Number.isInteger);
    for (const step of ticks) {
      const x = this.x(step), last = x > width - 40;
      shape(svg, "line", { class: "notch", x1: x, x2: x, y1: bottom, y2: bottom + 3 });
      const [at, anchor] = last ? [width - 2, "end"] : [x, "middle"];
      shape(svg, "text", { class: "tick", x: at, y: bottom + 15, "text-anchor": anchor },
        step.toLocaleString("en"));
    }
  }

  line(svg, { run, key, steps, values, smooth, odd, dash }) {
    const group = shape(svg, "g", { class: `line ${run.color}`, "data-run": run.name, "data-key": key });
    if (run.members) drawArm(this, group, run, key, dash);
    else {
      if (smooth !== values) shape(group, "path", { class: "raw", d: this.path(steps, values, odd) });
      shape(group, "path", { d: this.path(steps, smooth, odd), "stroke-dasharray": dash });
    }
    const [from, to] = this.range;
    const inside = steps.reduce((n, step) => n + (step >= from && step <= to), 0);
    if (inside <= 24) steps.forEach((step, i) => shape(group, "circle",
      { r: 2.4, cx: this.x(step), cy: this.yOf(smooth[i]) }));
    for (const [step, what, of = run.name] of odd) {
      const mark = shape(svg, "path", { class: "odd", d: `M${this.x(step)} ${MARGIN.top + 7}l-4.5 -7h9z` });
      shape(mark, "title", {}, `${of}, step ${step}: ${what}`);
    }
    group.run = run;
  }

  path(steps, values, odd) {
    const breaks = new Set(odd.map(([step]) => indexAt(steps, step) + 1));  // the line is broken at a NaN
    const point = (value, i) => `${this.x(steps[i]).toFixed(1)} ${this.yOf(value).toFixed(1)}`;
    return values.map((value, i) => (i && !breaks.has(i) ? "L" : "M") + point(value, i)).join("");
  }

  area(svg, { steps, base, values, phase }) {
    const wide = steps.length === 1 ? 3 : 0;  // a single step is a bar
    const point = (shift) => (value, i) =>
      `${(this.x(steps[i]) + shift).toFixed(1)} ${this.yOf(value).toFixed(1)}`;
    const edge = (numbers) => [...numbers.map(point(-wide)), ...(wide ? numbers.map(point(wide)) : [])];
    if (steps.length) shape(svg, "path", { class: `phase${phase}`,
      d: `M${[...edge(values), ...edge(base).reverse()].join("L")}Z` });
  }

  // -- cursor, zoom -----------------------------------------------------------------------------------------

  listen(svg) {
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      return [(event.clientX - box.left) * (this.size[0] / box.width),
        (event.clientY - box.top) * (this.size[1] / box.height)];
    };
    const stepAt = (x) => {
      const [from, to] = this.range;
      return from + ((x - MARGIN.left) / (this.size[0] - MARGIN.left - MARGIN.right)) * (to - from);
    };
    let start = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      start = at(event)[0];
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (start !== null) {
        this.selection.setAttribute("x", Math.min(start, x));
        this.selection.setAttribute("width", Math.abs(x - start));
      }
      this.point(nearestStep(stepAt(x)), y, event);
    });
    svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const x = at(event)[0], ends = [stepAt(Math.min(start, x)), stepAt(Math.max(start, x))].map(Math.round);
      if (Math.abs(x - start) > 8) zoom(Math.max(ends[0], this.range[0]), Math.min(ends[1], this.range[1]));
      this.selection.setAttribute("width", 0);
      start = null;
    });
    svg.addEventListener("dblclick", () => zoom(null, null));
    svg.addEventListener("pointerleave", () => setCursor(null));
  }

  // Moves the cursor to this step; the run with the nearest line gets the focus in all charts.
  point(step, y, event) {
    let nearest = null, least = Infinity;
    for (const run of this.runs()) {
      for (const [key] of this.keys()) {
        const value = valueAt(run, key, step, "smooth");
        const gap = typeof value === "number" ? Math.abs(this.yOf(value) - y) : Infinity;
        if (gap < least) [nearest, least] = [run, gap];
      }
    }
    setCursor(step, this.spec.stack ? null : nearest);
    this.showTooltip(event);
  }

  showCursor() {
    this.cursorLayer?.replaceChildren();
    const step = view.cursor, runs = this.runs();
    const said = step === null || step > (this.range?.[1] ?? 0) ? this.last() : null;
    for (const line of this.svg?.querySelectorAll("g.line") ?? []) {
      line.classList.toggle("focus", runs.length > 1 && line.run === view.focus);
      line.classList.toggle("dim", runs.length > 1 && view.focus !== null && line.run !== view.focus);
    }
    if (said !== null || !this.cursorLayer) { this.readout.replaceChildren(said ?? ""); return; }
    const x = this.x(step);
    shape(this.cursorLayer, "line", { x1: x, x2: x, y1: MARGIN.top, y2: this.size[1] - MARGIN.bottom });
    if (!this.spec.stack) {
      for (const run of runs) for (const [key] of this.keys()) {
        const value = valueAt(run, key, step, "smooth"), { steps } = seriesOf(run, key);
        if (typeof value !== "number") continue;
        const cx = this.x(steps[indexAt(steps, step)]);  // the last step that has this metric
        shape(this.cursorLayer, "circle", { r: 3.2, cx, cy: this.yOf(value), class: run.color });
      }
    }
    const run = runs.length === 1 ? runs[0] : runs.includes(view.focus) ? view.focus : null;
    this.readout.replaceChildren(run ? element("span", { class: runs.length > 1 ? run.color : "" },
      this.values(run, step)) : "");
  }

  // Without a cursor, the last value of a single run is shown.
  last() {
    const runs = this.runs();
    return runs.length === 1 && runs[0].step.length ? element("span", { class: "last" },
      this.values(runs[0], runs[0].step.at(-1))) : "";
  }

  values(run, step) {
    const keys = this.keys();
    if (this.spec.stack) {
      const parts = keys.map(([key]) => valueAt(run, key, step)).filter((value) => typeof value === "number");
      return formatValue(parts.reduce((a, b) => a + b, 0), this.spec.kind);
    }
    const which = run.members ? "smooth" : "values";  // an arm's tooltip has the mean that is drawn
    return keys.map(([key]) => formatValue(valueAt(run, key, step, which), this.spec.kind)).join(" · ");
  }

  // [color, label, value, smoothed value, whether it has the focus], largest first.
  tooltipRows(step) {
    const keys = this.keys(), { kind, series, stack, title } = this.spec;
    if (stack) {
      return [...keys].reverse().map(([key, label]) => {
        const phase = `phase${series.findIndex(([k]) => k === key)}`;
        return [phase, label, formatValue(valueAt(stack, key, step), kind), "", false];
      });
    }
    const rows = this.runs().flatMap((run) => keys.map(([key, label]) => {
      const names = [view.runs.length > 1 ? run.name : "", keys.length > 1 ? label : ""].filter(Boolean);
      const value = valueAt(run, key, step), smooth = valueAt(run, key, step, "smooth");
      const texts = run.members ? [formatValue(smooth, kind), bandText(run, key, step, kind)]
        : [formatValue(value, kind), smooth === value ? "" : formatValue(smooth, kind)];
      return { value, smooth, row: [run.color, names.join(" · ") || title, ...texts,
        view.runs.length > 1 && run === view.focus] };
    })).filter(({ value }) => value !== null);
    const size = ({ smooth }) => (typeof smooth === "number" ? smooth : -Infinity);
    return rows.sort((a, b) => size(b) - size(a)).map(({ row }) => row);
  }

  showTooltip(event) {
    const step = view.cursor, rows = this.tooltipRows(step).slice(0, 24);
    const words = view.runs.some((run) => run.members) ? ["mean", "band, seeds"] : ["measured", "smoothed"];
    const head = rows.some((row) => row[3]) ? ["", "", ...words] : [];
    showTooltip(event, `step ${step.toLocaleString("en")}`, rows, head);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") zoom(null, null);
    if (!move || event.target !== this.figure) return;
    event.preventDefault();
    const steps = allSteps(), now = view.cursor ?? (move > 0 ? steps[0] - 1 : Infinity);
    const next = move > 0 ? steps.find((step) => step > now) : steps.findLast((step) => step < now);
    if (next !== undefined) setCursor(next, view.focus);
  }
}

// -- all charts ---------------------------------------------------------------------------------------------

function allSteps() {
  const [from, to] = stepRange();
  const steps = new Set(visibleRuns().flatMap((run) => run.step));
  return [...steps].filter((step) => step >= from && step <= to).sort((a, b) => a - b);
}

function nearestStep(step) {
  view.steps ??= allSteps();
  const i = indexAt(view.steps, step), below = view.steps[i], above = view.steps[i + 1];
  return below === undefined ? above ?? 0 : above === undefined || step - below < above - step ? below
    : above;
}

let waiting = false;
function setCursor(step, focus = null) {
  view.cursor = step;
  view.focus = focus;
  if (step === null) tooltip.hidden = true;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; view.charts.forEach((chart) => chart.showCursor()); });
}

function drawAll() {
  view.steps = null;
  view.charts.forEach((chart) => chart.draw());
}

function zoom(from, to) {
  if (from !== null && to !== null && to <= from) return;
  [view.from, view.to] = [from, to];
  drawAll();
  document.dispatchEvent(new Event("zoomed"));
}
