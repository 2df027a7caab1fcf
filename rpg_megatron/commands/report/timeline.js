// The trainer's phases and the engines' requests in the last steps, over time. Its axis is time, so it does
// not use the range and the cursor of the charts.

const TRAINER_PHASES = { collect: ["collect (waits for rollouts)", 5], logprobs: ["log-probs", 2],
  update: ["update", 3], sync: ["sync", 4], handover: ["handover", 1], evaluation: ["evaluation", 6],
  checkpoint: ["checkpoint", 7] };
const phaseColor = (phase) => `phase${TRAINER_PHASES[phase]?.[1] ?? 5}`;

function timelineText({ seconds, shares: { collect, sync, engines } }) {
  const share = (value) => formatValue(value, "percent"), time = formatDuration(Number(seconds.toPrecision(3)));
  const idle = ` The engines had no running request in ${share(engines)} of their polls.`;
  return `Of ${time} the trainer spent ${share(collect)} in collect, where it waits for rollouts, `
    + `and ${share(sync)} in sync.${engines === null ? "" : idle}`;
}

// Each poll covers the time halfway to its neighbours; a poll without an answer is a gap.
function requestArea({ polls, seconds }, { values, most }) {
  return values.map((value, i) => {
    const from = i ? (polls[i - 1] + polls[i]) / 2 : 0;
    const to = i + 1 < polls.length ? (polls[i] + polls[i + 1]) / 2 : seconds;
    return value ? `M${from} ${most}V${most - value}H${to}V${most}Z` : "";
  }).join("");
}

function timelineFigure(run) {
  const { steps, phases, lanes, seconds, engines } = run.timeline, end = seconds || 1;
  const most = (lanes.at(-1)?.most ?? 0).toLocaleString("en");
  const key = Object.entries(TRAINER_PHASES).filter(([name]) => phases.some(([phase]) => phase === name))
    .map(([name, [label]]) => [phaseColor(name), label])
    .concat(engines ? [["phase0", `running requests, up to ${most}`]] : []);
  const place = element("div", { class: "lanes", role: "img", "aria-label": timelineText(run.timeline) });
  const mark = (kind, time, text) => {
    const made = element("i", { class: kind }, element("span", text));
    made.style.left = `${(100 * time) / end}%`;
    place.append(made);
  };
  const apart = increments(0, seconds, "seconds").find((increment) => end / increment <= 5);
  const times = Array.from({ length: Math.floor(seconds / apart) + 1 }, (_, i) => i * apart);
  tickTexts(times, apart, "seconds").forEach((text, i) => mark("tick", times[i], text));
  const beginOf = (step) => Math.min(...phases.filter((row) => row[1] === step).map((row) => row[2]));
  steps.forEach((step) => mark("step", beginOf(step), step.toLocaleString("en")));
  const lane = (name, height) => {
    const row = element("div.lane", element("span", name));
    place.append(row);
    return shape(row, "svg", { viewBox: `0 0 ${end} ${height}`, preserveAspectRatio: "none" });
  };
  const trainer = lane("trainer", 1);
  for (const [phase, , from, to] of phases) shape(trainer, "rect",
    { class: phaseColor(phase), x: from, width: Math.max(to - from, end / 2000), height: 1 });
  for (const one of lanes) shape(lane(one.name, one.most || 1), "path",
    { class: "phase0", d: requestArea(run.timeline, one) });
  const cursor = element("i", { class: "cursor", hidden: true });
  place.append(cursor);
  place.addEventListener("pointermove", (event) => pointAtTime(run.timeline, trainer, cursor, event));
  place.addEventListener("pointerleave", () => { tooltip.hidden = cursor.hidden = true; });
  const range = steps.length > 1 ? `steps ${steps[0]} to ${steps.at(-1)}` : `step ${steps[0]}`;
  const figure = element("figure", { class: "timeline", "data-chart": "Timeline" },
    element("figcaption", element("h3", several ? run.name : "Last steps", element("small", range))),
    element("div.series", key.map(([color, label]) =>
      element("span", element("i", { class: `swatch ${color}` }), ` ${label}`))),
    place, element("p.under", timelineText(run.timeline)));
  view.charts.push({ place, draw: () => { figure.hidden = isHidden(run); }, showCursor: () => {} });
  return figure;
}

function pointAtTime({ seconds, phases, polls, lanes }, trainer, cursor, event) {
  const box = trainer.getBoundingClientRect();
  const share = (event.clientX - box.left) / box.width, at = share * seconds;
  if (share < 0 || share > 1) return;
  cursor.style.left = `${100 * share}%`;
  cursor.hidden = false;
  const row = phases.findLast(([, , begin, end]) => begin <= at && at <= end), poll = indexAt(polls, at);
  const rows = lanes.map(({ name, values }) => ["phase0", name, formatValue(values[poll], "count")]);
  const [phase, step, from, to] = row ?? [];
  if (row) rows.unshift([phaseColor(phase), `${phase}, step ${step}`, formatValue(to - from, "seconds")]);
  showTooltip(event, `after ${formatValue(at, "seconds")}`, rows);
}

function buildTimelines() {
  const runs = data.runs.filter((run) => run.timeline);
  if (runs.length) place("charts").append(title("Trainer and engines over time"),
    ...ofEachRun("last steps", runs.map(timelineFigure)));
}
