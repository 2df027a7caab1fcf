// The arms of a study: runs that differ in their seed. On a chart an arm takes the place of a run: the
// mean over its seeds with a band, and its runs behind it. study.py computes the tables.

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

// Like seriesOf: means over the seeds that have a value at a step; also bands and numbers of seeds. The band
// is that of smoothed runs, so it has the spread of seeds and not the noise of each step.
function armSeries(arm, key) {
  if (arm.series[key]?.smoothing === view.smoothing) return arm.series[key];
  const runs = arm.members.map((run) => seriesOf(run, key));
  const points = binned(runs.map(({ steps, smooth }) => [steps, smooth]));
  const smooth = points.map(({ values }) => meanOf(values));
  arm.series[key] = {
    smoothing: view.smoothing, smooth, runs,
    steps: points.map(({ step }) => step),
    values: binned(runs.map(({ steps, values }) => [steps, values])).map(({ values }) => meanOf(values)),
    bands: points.map(({ values }) => bandOf(values)),
    counts: points.map(({ values }) => values.length),
    odd: runs.flatMap(({ odd }, i) => odd.map(([step, what]) => [step, what, arm.members[i].name])),
  };
  return arm.series[key];
}

// The mean of an arm as lines of a chart; of the chart's first series also its band and its runs, which would
// hide each other.
function armLines(arm, key, dash, first, kind) {
  const { steps, smooth, bands, counts, runs, odd } = seriesOf(arm, key), most = Math.max(0, ...counts);
  const line = { run: arm, key, color: arm.color, steps, odd: [], alpha: 1, dash };
  // A band may reach where the metric cannot be.
  const negative = runs.some(({ values }) => values.some((value) => value < 0));
  const [least, largest] = kind === "percent" ? [0, 1] : [negative ? -Infinity : 0, Infinity];
  const band = ["upper", "lower"].map((edge, i) => ({ ...line, band: edge, width: 0,
    values: bands.map((ends) => ends && Math.min(largest, Math.max(least, ends[1 - i]))),
    alpha: view.runs.length > 4 ? 0.06 : 0.15 }));
  const drawn = view.seeds && arm.members.length > 1 ? runs : [];
  const seeds = drawn.map((run) => ({ ...line, dash: [], steps: run.steps, values: run.smooth, odd: run.odd,
    width: 0.9, alpha: 0.3, seed: true }));
  // Where not all seeds have a value, the line is thinner: a mean of others may jump.
  const part = (fewer) => smooth.map((value, i) =>
    ([counts[i], counts[i + 1] ?? counts[i]].some((count) => (count < most) === fewer) ? value : null));
  const fewer = { ...line, values: part(true), width: 1, alpha: 0.7, fewer: true, told: true };
  return [...(first ? [...band, ...seeds] : []), ...(counts.some((count) => count < most) ? [fewer] : []),
    { ...line, values: part(false), odd, width: 2, told: true }];
}

function bandText(arm, key, step, kind) {
  const { steps, bands, counts } = seriesOf(arm, key), i = indexAt(steps, step);
  const band = bands[i] ? `${bands[i].map((value) => formatValue(value, kind)).join(" to ")}, ` : "";
  return i < 0 ? "" : `${band}${counts[i]} of ${plural(arm.members.length, "seed")}`;
}

const range = (ends) => [...new Set(ends ?? ["–"])].map((n) => n.toLocaleString("en")).join("–");

// A mean over seeds: [mean, half of its interval, seeds].
function meanCell(found, kind, seeds) {
  if (!found) return element("td", "–");
  const [mean, margin, number] = found;
  const [worth, name] = unitFor(Math.abs(mean), kind);
  const fixed = (value) => (value / worth).toFixed(name ? 1 : 0);
  const text = kind === "count" && margin !== null ? `${fixed(mean)} ± ${fixed(margin)}${name}`
    : withMargin(mean, margin, kind);
  return element("td", text, number < seeds ? element("small", ` ${number} of ${seeds}`) : null);
}

function seedsText(arm) {
  const number = arm.members.length, left = number - arm.finished - arm.running;
  const states = [arm.running ? `${arm.running} running` : "", left ? `${left} not finished` : "",
    number === 1 ? "no interval" : ""].filter(Boolean);
  return [String(number), states.length ? element("small", ` (${states.join(", ")})`) : null];
}

function armTable() {
  const { measures } = data.study;
  const others = [["reward", "reward", "number", "mean of the last tenth of the steps"],
    ["tokens/s", "speed", "count", "mean of all steps"]].filter(([, key]) => arms.some((arm) => arm[key]));
  const head = (text, tip) => element("th", { rowspan: 2, title: tip }, text);
  const cell = (found, kind, arm) => meanCell(found, kind, arm.members.length);
  const rows = arms.map((arm, i) => element("tr", {},
    element("th", { scope: "row" }, swatch(arm), " ", arm.name), element("td", seedsText(arm)),
    measures.map(({ kind, last, best }) => [cell(last[i], kind, arm), cell(best[i], kind, arm)]),
    others.map(([, key, kind]) => cell(arm[key], kind, arm)),
    element("td", range(arm.steps))));
  return sheet("runs arms", [
    element("tr", head("arm"), head("seeds"), measures.map(({ name }) => element("th", { colspan: 2 }, name)),
      others.map(([name, , , tip]) => head(name, tip)), head("steps")),
    element("tr", measures.map(() => cells(["last", "best"], "th")))], rows);
}

function pairRow({ arms: [i, j], value, interval, paired, seeds, verdict, steps }, kind) {
  const number = (n) => (kind === "percent" ? oneDecimal(100 * n) : plainNumber(n)).replace("-", "−");
  const text = (n) => (n > 0 ? "+" : "") + number(n);
  const one = Math.min(...seeds) < 2;
  const counted = paired ? plural(seeds[0], one ? "seed" : "pair") : `${seeds[0]} and ${seeds[1]}`;
  const words = { higher: "higher", lower: "lower", unclear: "no clear difference",
    unknown: one ? "one seed: no interval" : "seeds are equal: no interval" };
  return element("tr", element("th", { scope: "row" }, swatch(arms[i]), " ", arms[i].name),
    element("td.left", "− ", swatch(arms[j]), " ", arms[j].name), element("td", text(value)),
    element("td", interval ? interval.map(text).join(" to ") : "–"), element("td", counted),
    element("td", { class: `left ${verdict}` }, words[verdict],
      steps[0] === steps[1] ? null : element("small", ` steps ${range(steps)}`)));
}

function pairTables() {
  const { measures, compared } = data.study;
  return measures.filter(({ pairs }) => pairs.length).map(({ name, kind, pairs }, i) => {
    const number = pairs.filter(({ interval }) => interval).length;
    const heads = ["arm", "minus", kind === "percent" ? "points" : "difference", "95% interval", "seeds", ""];
    const chance = `Of ${number} intervals, about one in 20 excludes 0 by chance where arms do not differ.`;
    const said = [number > 1 ? chance : "",
      compared < arms.length ? `Only the first ${compared} of ${arms.length} arms are compared.` : ""];
    return element("details", { open: !i && pairs.length <= 10 }, element("summary", {},
      `differences in ${kind === "percent" ? `held-out accuracy, ${name}` : name}, at the last evaluation`),
    sheet("runs pairs", element("tr", heads.map((text, at) =>
      element(at % 4 === 1 ? "th.left" : "th", text))), pairs.map((pair) => pairRow(pair, kind))),
    element("p.under", said.filter(Boolean).join(" ")));
  });
}

function studyHead() {
  const repeats = arms.flatMap((arm) => arm.repeats).map((i) => data.runs[i].name);
  const said = "Runs that differ in their seed, and by rounding at most, are an arm. A value is the mean over its seeds ± half of its 95% "
    + "t-interval; one seed has no interval. Curves are means over the seeds that have reached a step, thinner "
    + "where some have not. Bands: 95% t-interval of the mean of three or more seeds; of two seeds, from the "
    + "lowest to the highest.";
  const left = repeats.length ? ` Not counted, since a longer run has the same settings and seed: ${repeats.join(", ")}.` : "";
  return [armTable(), element("p.under", said, left), ...pairTables()];
}

// What a study has for each of its runs, and not for arms, is folded.
function ofEachRun(what, parts) {
  return arms ? [element("details", { class: "each", ontoggle: () => drawAll() },
    element("summary", `${what} of each of the ${data.runs.length} runs`), parts)] : parts;
}

const seedOf = (run) => (run.arm
  ? element("small", ` ${run.arm.name}, seed ${run.config.seed ?? "–"}`) : null);

function seedsBox() {
  const box = element("input", { type: "checkbox", checked: Boolean(view.seeds),
    onchange: () => { view.seeds = box.checked; drawAll(); } });
  return element("label", { title: "draw the runs of each arm behind its mean" }, box, "single runs");
}
