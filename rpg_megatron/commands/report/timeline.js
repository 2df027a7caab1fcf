// The trainer's phases and the engines' requests in the last steps, over time. Like a chart, but its axis is
// time, so it does not use the charts' range and cursor.

const TRAINER_PHASES = [["collect", "collect (waits for rollouts)", 5], ["logprobs", "log-probs", 2],
  ["update", "update", 3], ["sync", "sync", 4], ["handover", "handover", 1],
  ["evaluation", "evaluation", 6], ["checkpoint", "checkpoint", 7]];
const LANE = { left: 96, right: 14, top: 20, trainer: 28, engine: 24, gap: 6, bottom: 24 };

class TimelineFigure {
  constructor(run) {
    [this.run, this.data] = [run, run.timeline];
    const [first, last] = [this.data.steps[0], this.data.steps.at(-1)];
    this.place = element("div", { class: "plot" });
    const there = new Set(this.data.phases.map(([phase]) => phase));
    const key = TRAINER_PHASES.filter(([name]) => there.has(name)).map(([, label, color]) =>
      element("span", {}, element("i", { class: `swatch phase${color}` }), ` ${label}`));
    const most = this.data.lanes.at(-1)?.most ?? 0;
    const requests = element("span", {}, element("i", { class: "swatch phase0" }),
      ` running requests, up to ${most.toLocaleString("en")}`);
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    this.figure = element("figure", { class: "timeline", "data-chart": "Timeline" },
      element("figcaption", {}, element("h3", {}, several ? run.name : "Last steps", element("small", {}, steps))),
      element("div", { class: "series" }, key, this.data.engines ? requests : null),
      this.place, element("p", { class: "under" }, this.summary()));
    view.charts.push(this);
  }

  summary() {
    const { collect, sync, engines } = this.data.shares, share = (value) => formatValue(value, "percent");
    const polls = engines === null ? "" : ` The engines had no running request in ${share(engines)} of their polls.`;
    return `Of ${formatDuration(Number(this.data.seconds.toPrecision(3)))} the trainer spent ${share(collect)} in collect, where it waits `
      + `for rollouts, and ${share(sync)} in sync.${polls}`;
  }

  x(seconds) {
    return LANE.left + (seconds / (this.data.seconds || 1)) * (this.width - LANE.left - LANE.right);
  }

  draw() {
    this.figure.hidden = isHidden(this.run);
    const { lanes, phases, seconds } = this.data, width = this.place.clientWidth;
    if (!width) return;
    this.width = width;
    const below = LANE.top + LANE.trainer + LANE.gap;
    const bottom = below + lanes.length * (LANE.engine + LANE.gap), height = bottom + LANE.bottom;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", this.summary());
    for (const [at, text] of linearTicks(0, seconds, "seconds")) {
      shape(svg, "line", { class: "grid", x1: this.x(at), x2: this.x(at), y1: LANE.top, y2: bottom });
      const last = this.x(at) > width - 30;
      shape(svg, "text", { class: "tick", x: last ? width - 2 : this.x(at), y: bottom + 15,
        "text-anchor": last ? "end" : "middle" }, text);
    }
    const label = (text, y, high) => shape(svg, "text", { class: "tick", x: LANE.left - 8,
      y: y + high / 2 + 4, "text-anchor": "end" }, text);
    label("trainer", LANE.top, LANE.trainer);
    for (const [phase, , begin, end] of phases) {
      const color = TRAINER_PHASES.find(([name]) => name === phase)?.[2] ?? 5;
      shape(svg, "rect", { class: `phase${color}`, x: this.x(begin), y: LANE.top, height: LANE.trainer,
        width: Math.max(0.75, this.x(end) - this.x(begin)) });
    }
    this.stepMarks(svg, bottom);
    lanes.forEach((lane, i) => {
      const y = below + i * (LANE.engine + LANE.gap);
      label(lane.name, y, LANE.engine);
      shape(svg, "line", { class: "zero", x1: LANE.left, x2: width - LANE.right, y1: y + LANE.engine,
        y2: y + LANE.engine });
      shape(svg, "path", { class: "phase0", d: this.area(lane.values, y, lane.most) });
    });
    this.line = shape(svg, "line", { class: "cursor", y1: LANE.top, y2: bottom });
    svg.addEventListener("pointermove", (event) => this.point(svg, event));
    svg.addEventListener("pointerleave", () => { tooltip.hidden = true; this.line.classList.remove("on"); });
    this.place.replaceChildren(svg);
  }

  stepMarks(svg, bottom) {
    let right = -Infinity;
    for (const step of this.data.steps) {
      const x = this.x(Math.min(...this.data.phases.filter((row) => row[1] === step).map((row) => row[2])));
      shape(svg, "line", { class: "step", x1: x, x2: x, y1: LANE.top - 6, y2: bottom });
      if (x < right || x > this.width - 50) continue;
      shape(svg, "text", { class: "tick", x: x + 3, y: LANE.top - 7 }, `step ${step}`);
      right = x + 64;
    }
  }

  // Each poll covers the time halfway to its neighbours; a poll without an answer is a gap.
  area(values, top, most) {
    const bottom = top + LANE.engine, { polls, seconds } = this.data;
    return values.map((value, i) => {
      if (!value) return "";
      const from = i ? (polls[i - 1] + polls[i]) / 2 : 0;
      const to = i + 1 < polls.length ? (polls[i] + polls[i + 1]) / 2 : seconds;
      return `M${this.x(from).toFixed(1)} ${bottom}V${(bottom - (value / most) * LANE.engine).toFixed(1)}`
        + `H${this.x(to).toFixed(1)}V${bottom}Z`;
    }).join("");
  }

  point(svg, event) {
    const box = svg.getBoundingClientRect(), { phases, polls, lanes } = this.data;
    const x = (event.clientX - box.left) * (this.width / box.width);
    const at = ((x - LANE.left) / (this.width - LANE.left - LANE.right)) * this.data.seconds;
    if (at < 0 || at > this.data.seconds) return;
    for (const end of ["x1", "x2"]) this.line.setAttribute(end, x);
    this.line.classList.add("on");
    const row = phases.findLast(([, , begin, end]) => begin <= at && at <= end);
    const found = TRAINER_PHASES.find(([name]) => name === row?.[0]);
    const poll = indexAt(polls, at);
    const rows = lanes.map(({ name, values }) => ["phase0", name, formatValue(values[poll], "count")]);
    if (row) rows.unshift([`phase${found?.[2] ?? 5}`, `${row[0]}, step ${row[1]}`,
      formatValue(row[3] - row[2], "seconds")]);
    showTooltip(event, `after ${formatValue(at, "seconds")}`, rows);
  }

  showCursor() {}  // the charts' cursor is at a step
}

function buildTimelines() {
  const runs = data.runs.filter((run) => run.timeline);
  if (!runs.length) return;
  place("charts").append(title("Trainer and engines over time"),
    ...ofEachRun("last steps", runs.map((run) => new TimelineFigure(run).figure)));
}
