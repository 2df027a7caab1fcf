// Charts of steps, drawn by uPlot. All of them share the range, cursor, smoothing and visible runs in `view`.

const tooltip = element("div", { id: "tooltip", hidden: true });

// A box beside the pointer. A row is [color, label, value, second value, whether it has the focus].
function showTooltip(event, name, rows, head = []) {
  tooltip.replaceChildren(element("b", name), element("table", {},
    element("tr", head.map((text) => element("th", text))),
    rows.map(([color, label, value, other, focus]) => element("tr", { class: focus ? "focus" : null },
      element("td", element("i", { class: `swatch ${color}` })), element("td", label),
      element("td", value), head.length ? element("td", other) : null))));
  tooltip.hidden = !rows.length;
  const { innerWidth: wide, innerHeight: high } = window, box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, event.clientX + 16 + box.width > wide
    ? event.clientX - box.width - 16 : event.clientX + 16)}px`;
  tooltip.style.top = `${Math.max(4, Math.min(event.clientY + 12, high - box.height - 4))}px`;
}

// A line: {run, key, color, steps, values, odd, width, alpha, dash}. `told`: the cursor marks its value.
function runLines(run, key, dash) {
  const { steps, values, smooth, odd } = seriesOf(run, key);
  const line = { run, key, color: run.color, steps, odd, alpha: 1, dash: [] };
  const measured = { ...line, values, width: 1, alpha: view.runs.length > 3 ? 0.1 : 0.22 };
  const shown = { ...line, values: smooth, width: 1.6, dash, told: true };
  return smooth === values ? [shown] : [measured, shown];
}

// The phases of a run's steps as areas, the highest first; each begins at 0 and hides the ones before it.
function areaLines(run, keys, colors) {
  const number = (key, i) => (typeof run.metrics[key]?.[i] === "number" ? run.metrics[key][i] : null);
  const rows = [...run.step.keys()].filter((i) => keys.some((key) => number(key, i) !== null));
  const steps = rows.map((i) => run.step[i]), sums = rows.map(() => 0);
  return keys.map((key, at) => {
    rows.forEach((row, i) => { sums[i] += number(key, row) ?? 0; });
    return { run, key, color: colors[at], steps, values: [...sums], odd: [], width: 0, alpha: 1, area: true };
  }).reverse();
}

const DASHES = [[], [5, 3], [1.5, 3], [8, 2, 2, 2], [3, 6]];
const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

// spec: {title, kind, series: [[key, label]...], log, note}; with `stack` the series of that run as areas.
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.log = spec.log ?? false;
    this.readout = element("output", { class: spec.series.length > 2 ? "long" : null });
    const logButton = toggle({ class: "log", title: "logarithmic" }, this.log, (on) => {
      this.log = on;
      this.draw();
    }, "log");
    const many = spec.series.length > 1, crowded = !spec.stack && view.runs.length > 3;
    this.off = new Set(crowded ? spec.series.slice(1).map(([key]) => key) : []);
    this.place = element("div.plot");
    const name = element("h3", spec.title, spec.note ? element("small", spec.note) : null);
    this.figure = element(spec.stack ? "figure.stack" : "figure", { tabindex: 0, "data-chart": spec.title },
      element("figcaption", name, spec.stack ? null : logButton, this.readout),
      many ? element("div.series", spec.series.map((one, i) => this.seriesButton(one, i))) : null,
      this.place);
    this.figure.addEventListener("keydown", (event) => this.key(event));
    view.charts.push(this);
  }

  seriesButton([key, label], index) {
    const glyph = element("i", { class: this.spec.stack ? `swatch phase${index}` : null });
    const line = { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-dasharray": this.dash(key).join(" ") };
    if (!this.spec.stack) shape(shape(glyph, "svg", { viewBox: "0 0 22 8" }), "line", line);
    return toggle({}, !this.off.has(key), (on) => {
      this.off[on ? "delete" : "add"](key);
      this.draw();
    }, glyph, label);
  }

  index(key) { return this.spec.series.findIndex(([one]) => one === key); }
  dash(key) { return DASHES[this.index(key) % DASHES.length]; }
  keys() { return this.spec.series.filter(([key]) => !this.off.has(key)); }
  runs() { return this.spec.stack ? [this.spec.stack] : visibleRuns(); }

  draw() {
    this.plot?.destroy();
    [this.plot, this.focus] = [null, null];
    this.figure.hidden = isHidden(this.spec.stack);
    const width = this.place.clientWidth;
    if (!width) return;  // inside a closed <details>
    this.range = stepRange();
    const keys = this.keys().map(([key]) => key);
    const { stack, kind } = this.spec, colors = keys.map((key) => `phase${this.index(key)}`);
    const linesOf = (run, key, i) => (run.members ? armLines(run, key, this.dash(key), i === 0, kind)
      : runLines(run, key, this.dash(key)));
    this.lines = stack ? areaLines(stack, keys, colors)
      : this.runs().flatMap((run) => keys.flatMap((key, i) => linesOf(run, key, i)));
    const all = this.lines.flatMap(({ steps, odd }) => [...steps, ...odd.map(([step]) => step)]);
    this.steps = [...new Set([...this.range, ...all])].sort((a, b) => a - b);
    this.at = new Map(this.steps.map((step, i) => [step, i]));
    this.place.replaceChildren(...(all.length ? [] : [element("p.empty", "no data here")]));
    const columns = this.lines.map((line) => this.column(line));
    this.plot = new uPlot(this.options(width), [this.steps, ...columns], this.place);
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${this.spec.title} by step`);
  }

  // Ends of the axis for values between these.
  reach(low, high) {
    const { kind, stack } = this.spec, [from, to] = this.range;
    if (low === null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return uPlot.rangeLog(low, high, 10, false);
    // Stacked charts of several runs are shown side by side, so they have the same scale.
    for (const { steps, values } of stack ? data.runs.map((run) => seriesOf(run, "time/step")) : []) {
      high = Math.max(high, ...values.filter((_, i) => steps[i] >= from && steps[i] <= to));
    }
    if (stack || (low >= 0 && (low < 0.5 * high || kind === "count"))) low = 0;
    const [bottom, top] = uPlot.rangeNum(low, high, 0.06, true);
    return [bottom, kind === "percent" && high <= 1 ? Math.min(top, 1.005) : top];
  }

  // Values at the steps of all lines. uPlot ends a line at null, and draws it on where a value is undefined.
  column({ steps, values, odd }) {
    const column = new Array(this.steps.length);
    odd.forEach(([step]) => { column[this.at.get(step)] = null; });
    steps.forEach((step, i) => { column[this.at.get(step)] = values[i]; });
    return column;
  }

  options(width) {
    const { kind } = this.spec, axis = { stroke: tint("faint"), font: "11px system-ui, sans-serif" };
    const texts = (u, values, at, space, increment) => (!this.log ? tickTexts(values, increment, kind)
      : values.map((value) => (value === null ? "" : formatValue(value, kind))));
    // uPlot sets the font later, when it draws.
    const widest = (u, values, index) => 12 + Math.max(32, ...(values ?? []).map((text) =>
      Object.assign(u.ctx, { font: u.axes[index].font[0] }).measureText(text).width / uPlot.pxRatio));
    return {
      width, height: Math.round(Math.min(190, 100 + width / 5)), legend: { show: false },
      pxAlign: 0, padding: [8, 12, 0, 4],
      scales: { x: { time: false, range: () => this.range },
        y: { distr: this.log ? 3 : 1, range: (u, low, high) => this.reach(low, high) } },
      axes: [
        { ...axis, size: 24, gap: 3, space: 60, incrs: increments(0, 1, "count"), grid: { show: false },
          ticks: { stroke: tint("rule"), width: 1, size: 3 },
          values: (u, steps) => steps.map((step) => step.toLocaleString("en")) },
        { ...axis, size: widest, gap: 6, space: 28, incrs: (u, at, low, high) => increments(low, high, kind),
          grid: { stroke: tint("grid"), width: 1 }, ticks: { show: false }, values: texts },
      ],
      series: [{}, ...this.lines.map((line) => this.style(line))],
      bands: this.lines.flatMap(({ band, color }, i) => (band === "upper"
        ? [{ series: [i + 1, i + 2], fill: tint(color) }] : [])),
      cursor: {
        y: false, drag: { setScale: false, dist: 8 }, hover: { skip: [undefined, null], bias: -1, prox: 40 },
        points: { size: 7, show: (u, i) => (this.lines[i - 1].told ? element("div") : false) },
        bind: { dblclick: () => () => zoom(null, null) },
      },
      hooks: { draw: [() => this.markOdd()], ready: [() => this.showCursor(true)],
        setCursor: [(u) => this.point(u)], setSelect: [(u) => this.select(u)] },
    };
  }

  style({ color, width, alpha, dash, steps, told, area, band }) {
    const [from, to] = this.range, few = steps.filter((step) => step >= from && step <= to).length <= 24;
    const stroke = width ? tint(color) : null;
    const bars = area && steps.length === 1 ? { paths: uPlot.paths.bars({ size: [0.1, 6] }) } : {};
    return { stroke, width, alpha, dash, auto: !(band && this.log), fill: area ? tint(color) : null, ...bars,
      points: { show: Boolean(told && few), size: 5, width: 0, fill: stroke } };
  }

  // Red marks where a value was NaN or infinite.
  markOdd() {
    this.plot.over.querySelectorAll(".odd").forEach((mark) => mark.remove());
    const [from, to] = this.range;
    for (const { run, odd, told } of this.lines) for (const [step, what, of = run.name] of told ? odd : []) {
      const mark = element("i", { class: "odd", title: `${of}, step ${step}: ${what}` });
      mark.style.left = `${this.plot.valToPos(step, "x")}px`;
      if (step >= from && step <= to) this.plot.over.append(mark);
    }
  }

  // The cursor moves to this step in all charts; the run with the nearest line gets the focus.
  point(plot) {
    const { idx, top, event } = plot.cursor, step = this.steps[idx];
    if (step === undefined) return setCursor(null);
    let nearest = null, least = Infinity;
    for (const run of this.spec.stack ? [] : this.runs()) for (const [key] of this.keys()) {
      const value = valueAt(run, key, step, "smooth");
      const gap = typeof value === "number" ? Math.abs(plot.valToPos(value, "y") - top) : Infinity;
      if (gap < least) [nearest, least] = [run, gap];
    }
    setCursor(step, nearest);
    const rows = this.tooltipRows(step).slice(0, 24);
    const words = ["", "", ...(arms ? ["mean", "band, seeds"] : ["measured", "smoothed"])];
    showTooltip(event, `step ${step.toLocaleString("en")}`, rows, rows.some((row) => row[3]) ? words : []);
  }

  select(plot) {
    const { left, width } = plot.select;
    const ends = [left, left + width].map((x) => Math.round(plot.posToVal(x, "x")));
    // Later, since the charts are made anew while uPlot still handles this event.
    if (width) queueMicrotask(() => zoom(...ends));
  }

  // seen: whether the chart is in the window; only there runs without the focus are drawn paler.
  showCursor(seen) {
    const step = view.cursor, runs = this.runs(), focus = runs.length > 1 ? view.focus : null;
    const outside = !this.plot || step === null || step > this.range[1];
    const left = outside ? -10 : this.plot.valToPos(step, "x");
    this.plot?.setCursor({ left, top: outside ? -10 : 0 }, false);
    if (this.plot && seen && this.focus !== focus) {
      this.focus = focus;
      this.lines.forEach(({ run, alpha }, i) => {
        this.plot.series[i + 1].alpha = focus === null || focus === run ? alpha : 0.35 * alpha;
      });
      this.plot.redraw(false);
    }
    // Without a cursor, the last value of a single run is shown.
    const run = runs.length === 1 ? runs[0] : outside || !runs.includes(view.focus) ? null : view.focus;
    const at = outside ? run?.step.at(-1) : step, color = outside ? "last" : runs.length > 1 ? run?.color : null;
    this.readout.replaceChildren(at === undefined || !run ? ""
      : element("span", { class: color }, this.values(run, at)));
  }

  values(run, step) {
    const { kind, stack } = this.spec, which = run.members ? "smooth" : "values";  // an arm's mean as it is drawn
    const values = this.keys().map(([key]) => valueAt(run, key, step, which));
    if (stack) return formatValue(values.reduce((sum, value) => sum + (Number(value) || 0), 0), kind);
    return values.map((value) => formatValue(value, kind)).join(" · ");
  }

  // [color, label, value, smoothed value, whether it has the focus], largest or uppermost first.
  tooltipRows(step) {
    const keys = this.keys(), { kind, stack, title } = this.spec, severalRuns = !stack && view.runs.length > 1;
    const rows = this.runs().flatMap((run) => keys.map(([key, label]) => {
      const value = valueAt(run, key, step), smooth = stack ? value : valueAt(run, key, step, "smooth");
      const name = [severalRuns ? run.name : "", keys.length > 1 ? label : ""].filter(Boolean).join(" · ") || title;
      const texts = run.members ? [formatValue(smooth, kind), bandText(run, key, step, kind)]
        : [formatValue(value, kind), smooth === value ? "" : formatValue(smooth, kind)];
      const size = stack ? this.index(key) : typeof smooth === "number" ? smooth : -Infinity;
      const color = stack ? `phase${this.index(key)}` : run.color;
      return { value, size, row: [color, name, ...texts, severalRuns && run === view.focus] };
    }));
    return rows.filter(({ value }) => value !== null).sort((a, b) => b.size - a.size).map(({ row }) => row);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") zoom(null, null);
    if (!move || event.target !== this.figure) return;
    event.preventDefault();
    const [from, to] = this.range, steps = this.steps.filter((step) => step >= from && step <= to);
    const next = move > 0 ? steps.find((step) => step > (view.cursor ?? -1))
      : steps.findLast((step) => step < (view.cursor ?? Infinity));
    if (next !== undefined) setCursor(next, view.focus);
  }
}

function setCursor(step, focus = null) {
  [view.cursor, view.focus] = [step, focus];
  if (step === null) tooltip.hidden = true;
  const boxes = view.charts.map(({ place }) => place.getBoundingClientRect());  // before any of them changes
  view.charts.forEach((chart, i) =>
    chart.showCursor(boxes[i].bottom > 0 && boxes[i].top < window.innerHeight));
}

const drawAll = () => view.charts.forEach((chart) => chart.draw());

function zoom(from, to) {
  if (from !== null && to !== null && to <= from) return;
  [view.from, view.to] = [from, to];
  drawAll();
  document.dispatchEvent(new Event("zoomed"));
}
