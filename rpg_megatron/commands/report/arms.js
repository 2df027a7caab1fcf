// The arms of a study: runs that differ in their seed only. On a chart an arm takes the place of a run: the mean
// over its seeds with a band, and its runs behind it. Tables of their means and differences are from study.py.

const BAND = "95% t-interval of the mean of three or more seeds; of two seeds, from the lowest to the highest";
const isHidden = (run) => view.hidden.has(run) || view.hidden.has(run?.arm);

function makeArms() {
  if (!data.study) return null;
  view.seeds = data.runs.length <= 12;
  return data.study.arms.map((arm, i) => {
    const mine = (indices) => indices.map((at) => data.runs[at]);
    arm.members = mine(arm.runs);
    arm.color = `color${i % 10}`;
    [...arm.members, ...mine(arm.repeats)].forEach((run) => { run.arm = arm; run.color = arm.color; });
    arm.step = binned(arm.members.map((run) => [run.step, run.step])).map(({ step }) => step);
    arm.config = Object.fromEntries(Object.entries(arm.members[0].config)
      .filter(([key]) => !data.study.ignored.includes(key)));
    return arm;
  });
}

// Values of several runs by step; with several steps a row, the last steps of a row may differ between runs.
function binned(series) {
  const bins = new Map();
  for (const [steps, values] of series) steps.forEach((step, i) => {
    const bin = Math.floor(step / data.study.width), there = bins.get(bin) ?? { step, values: [] };
    there.step = Math.max(there.step, step);
    there.values.push(values[i]);
    bins.set(bin, there);
  });
  return [...bins.values()].sort((a, b) => a.step - b.step);
}

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// The band around a mean; null for one value.
function bandOf(values) {
  if (values.length < 2) return null;
  if (values.length === 2) return [Math.min(...values), Math.max(...values)];
  const mean = meanOf(values), squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const margin = data.study.t[values.length - 1] * Math.sqrt(squares / (values.length - 1) / values.length);
  return [mean - margin, mean + margin];
}

// Like seriesOf: means over the seeds that have a value at a step; also bands and numbers of seeds. The band is
// that of smoothed runs, so it has the spread of seeds and not the noise of each step.
function armSeries(arm, key) {
  if (arm.series[key]?.smoothing === view.smoothing) return arm.series[key];
  const runs = arm.members.map((run) => seriesOf(run, key));
  const points = binned(runs.map(({ steps, smooth }) => [steps, smooth]));
  const exact = runs.every(({ smooth, values }) => smooth === values);
  const smooth = points.map(({ values }) => meanOf(values));
  arm.series[key] = {
    smoothing: view.smoothing, smooth, runs,
    steps: points.map(({ step }) => step),
    values: exact ? smooth : binned(runs.map(({ steps, values }) => [steps, values])).map(({ values }) => meanOf(values)),
    bands: points.map(({ values }) => bandOf(values)),
    counts: points.map(({ values }) => values.length),
    odd: runs.flatMap(({ odd }, i) => odd.map(([step, what]) => [step, what, arm.members[i].name])),
  };
  return arm.series[key];
}

// What the axis has to hold besides the means: bands, and the runs. A band may reach where the metric cannot be,
// and below 0 on a logarithmic axis; there it is cut.
function armReach({ steps, bands, smooth, runs }, log) {
  const least = runs.some(({ values }) => values.some((value) => value < 0)) ? -Infinity : 0;
  const edges = log ? [] : [0, 1].map((end) => bands.map((band, i) => (band ? Math.max(least, band[end]) : smooth[i])));
  return [...edges.map((values) => ({ steps, values })),
    ...(view.seeds || log ? runs.map((run) => ({ steps: run.steps, values: run.smooth })) : [])];
}

function drawArm(chart, group, arm, key, dash) {
  const { steps, smooth, bands, counts, runs } = seriesOf(arm, key), most = Math.max(0, ...counts);
  const path = (from, to) => chart.path(steps.slice(from, to), smooth.slice(from, to), []);
  const parts = (kind) => {  // [from, to] of consecutive steps of one kind
    const found = [];
    steps.forEach((_, i) => {
      if (i && kind(i) === kind(i - 1)) found.at(-1)[1] = i + 1;
      else found.push([i, i + 1]);
    });
    return found;
  };
  const cut = (value) => (chart.spec.kind === "percent" ? Math.min(1, Math.max(0, value)) : value);
  const point = (i, end) => `${chart.x(steps[i]).toFixed(1)} ${chart.yOf(cut(bands[i][end])).toFixed(1)}`;
  const first = chart.keys()[0][0] === key;  // the others would hide each other
  if (first) for (const [from, to] of parts((i) => bands[i] !== null)) {
    const inside = [...steps.keys()].slice(from, to);
    if (bands[from] && to - from > 1) shape(group, "path", { class: view.runs.length > 4 ? "band many" : "band",
      d: `M${[...inside.map((i) => point(i, 1)), ...inside.reverse().map((i) => point(i, 0))].join("L")}Z` });
  }
  if (first && view.seeds && arm.members.length > 1) for (const run of runs) {
    shape(group, "path", { class: "seed", d: chart.path(run.steps, run.smooth, run.odd) });
  }
  // Where not all seeds have a value, the line is thinner: a mean of others may jump.
  for (const [from, to] of parts((i) => counts[i] === most)) {
    const start = Math.max(0, from - 1);
    if (to - start > 1) shape(group, "path", { class: counts[from] === most ? "mean" : "mean fewer",
      d: path(start, to), "stroke-dasharray": dash });
  }
}

function bandText(arm, key, step, kind) {
  const { steps, bands, counts } = seriesOf(arm, key), i = indexAt(steps, step);
  if (i < 0) return "";
  const band = bands[i] ? `${bands[i].map((value) => formatValue(value, kind)).join(" to ")}, ` : "";
  return `${band}${counts[i]} of ${plural(arm.members.length, "seed")}`;
}

// -- tables -------------------------------------------------------------------------------------------------

const range = (ends) => (ends === null ? "–" : [...new Set(ends)].map((n) => n.toLocaleString("en")).join("–"));

// A mean over seeds: [mean, half of its interval, seeds].
function meanCell(found, kind, seeds) {
  if (!found) return element("td", {}, "–");
  const [mean, margin, number] = found;
  const [worth, name] = unitFor(Math.abs(mean), kind);
  const text = kind === "count" && margin !== null
    ? `${[mean, margin].map((value) => (value / worth).toFixed(name ? 1 : 0)).join(" ± ")}${name}` : withMargin(mean, margin, kind);
  return element("td", {}, text, number < seeds ? element("small", {}, ` ${number} of ${seeds}`) : null);
}

function seedsText(arm) {
  const number = arm.members.length, left = number - arm.finished - arm.running;
  const states = [[arm.running, "running"], [left, "not finished"]].filter(([count]) => count)
    .map(([count, word]) => `${count} ${word}`).concat(number === 1 ? ["no interval"] : []);
  return [String(number), states.length
    ? element("small", {}, ` (${states.join(", ")})`) : null];
}

function armTable() {
  const { measures } = data.study;
  const others = [["reward", "reward", "number", "mean of the last tenth of the steps"], ["tokens/s", "speed", "count", "mean of all steps"]]
    .filter(([, key]) => arms.some((arm) => arm[key]));
  const head = (text, tip) => element("th", { rowspan: 2, title: tip }, text);
  const rows = arms.map((arm, i) => element("tr", {},
    element("th", { scope: "row" }, swatch(arm), " ", arm.name), element("td", {}, seedsText(arm)),
    measures.map(({ kind, last, best }) => [last[i], best[i]].map((found) => meanCell(found, kind, arm.members.length))),
    others.map(([, key, kind]) => meanCell(arm[key], kind, arm.members.length)),
    element("td", {}, range(arm.steps))));
  return element("div", { class: "scroll" }, element("table", { class: "runs arms" }, element("thead", {},
    element("tr", {}, head("arm"), head("seeds"), measures.map(({ name }) => element("th", { colspan: 2 }, name)),
      others.map(([name, , , tip]) => head(name, tip)), head("steps")),
    element("tr", {}, measures.map(() => [element("th", {}, "last"), element("th", {}, "best")]))),
  element("tbody", {}, rows)));
}

const CLEAR = { higher: "higher", lower: "lower", unclear: "no clear difference" };

function pairRow({ arms: [i, j], difference, interval, paired, seeds, verdict, steps }, kind) {
  const points = kind === "percent" ? 100 : 1;
  const text = (value) => (value > 0 ? "+" : "") + (points > 1 ? oneDecimal(value * points) : plainNumber(value)).replace("-", "−");
  const one = Math.min(...seeds) < 2;
  const number = paired ? plural(seeds[0], one ? "seed" : "pair") : `${seeds[0]} and ${seeds[1]}`;
  return element("tr", {}, element("th", { scope: "row" }, swatch(arms[i]), " ", arms[i].name),
    element("td", { class: "left" }, "− ", swatch(arms[j]), " ", arms[j].name), element("td", {}, text(difference)),
    element("td", {}, interval ? interval.map(text).join(" to ") : "–"), element("td", {}, number),
    element("td", { class: `left ${verdict}` }, CLEAR[verdict] ?? (one ? "one seed: no interval" : "seeds are equal: no interval"),
      steps[0] === steps[1] ? null : element("small", {}, ` steps ${range(steps)}`)));
}

function pairTables() {
  const { measures, compared } = data.study;
  return measures.filter(({ pairs }) => pairs.length).map(({ name, kind, pairs }, i) => {
    const number = pairs.filter(({ interval }) => interval).length;
    const heads = ["arm", "minus", kind === "percent" ? "points" : "difference", "95% interval", "seeds", ""];
    const said = [number > 1 ? `Of ${number} intervals, about one in 20 excludes 0 by chance where arms do not differ.` : "",
      compared < arms.length ? `Only the first ${compared} of ${arms.length} arms are compared.` : ""];
    return element("details", { open: !i && pairs.length <= 10 }, element("summary", {},
      `differences in ${kind === "percent" ? `held-out accuracy, ${name}` : name}, at the last evaluation`),
    element("div", { class: "scroll" }, element("table", { class: "runs pairs" },
      element("thead", {}, element("tr", {}, heads.map((text, at) => element("th", { class: [1, 5].includes(at) ? "left" : null }, text)))),
      element("tbody", {}, pairs.map((pair) => pairRow(pair, kind))))),
    element("p", { class: "under" }, said.filter(Boolean).join(" ")));
  });
}

function studyHead() {
  const repeats = arms.flatMap((arm) => arm.repeats).map((i) => data.runs[i].name);
  const said = ["Runs that differ in their seed only are an arm. A value is the mean over its seeds ± half of its 95% t-interval; "
    + "one seed has no interval. Curves are means over the seeds that have reached a step, thinner where some have not. "
    + `Bands: ${BAND}.`];
  if (repeats.length) said.push(`Not counted, since a longer run has the same settings and seed: ${repeats.join(", ")}.`);
  return [armTable(), element("p", { class: "under" }, said.join(" ")), ...pairTables()];
}

// What a study has for each of its runs, and not for arms, is folded.
function ofEachRun(what, parts) {
  return arms ? [element("details", { class: "each", ontoggle: () => drawAll() },
    element("summary", {}, `${what} of each of the ${data.runs.length} runs`), parts)] : parts;
}

const seedOf = (run) => (run.arm
  ? element("small", {}, ` ${run.arm.name}, seed ${run.config.seed ?? "–"}`) : null);

function seedsBox() {
  const box = element("input", { type: "checkbox", checked: view.seeds,
    onchange: () => { view.seeds = box.checked; drawAll(); } });
  return element("label", { title: "draw the runs of each arm behind its mean" }, box, "single runs");
}
