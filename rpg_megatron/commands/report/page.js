// The page around the charts: verdicts, legend, responses, settings, environment.

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
data.runs.forEach((run, i) => { run.color = `color${i % 10}`; });
const arms = makeArms();
view.runs = arms ?? data.runs;
restoreChoices();

const place = (name) => document.getElementById(name);
const title = (text, note) => element("h2", text, note ? element("small", note) : null);
const swatch = (run) => element("i", { class: `swatch ${run.color}` });
const plural = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const has = (key) => data.runs.some((run) => key in run.metrics);
const MARKS = { good: "✓", warn: "!", bad: "✗" };
const NAMES = { "reward/accuracy": "training accuracy", "reward/mean": "training reward",
  "sft/heldout_loss": "held-out loss" };

const changeKind = ({ name }) => (["reward/mean", "sft/heldout_loss"].includes(name) ? "number" : "percent");
const plusMinus = (margin, kind) => (typeof margin !== "number" ? ""
  : ` ± ${kind === "percent" ? oneDecimal(100 * margin) : Number(margin.toPrecision(2))}`);
// A value with the half width of its 95% interval.
const withMargin = (value, margin, kind) => formatValue(value, kind) + plusMinus(margin, kind);
const beforeAfter = (change) => [change.before, change.after].map((value, i) =>
  withMargin(value, change.name in NAMES ? null : change.margins[i], changeKind(change))).join(" → ");
const changeName = (change) => NAMES[change.name] ?? `held-out accuracy, ${change.name}`;

function difference(change) {
  const value = change.after - change.before, kind = changeKind(change), points = kind === "percent";
  const sign = value > 0 ? "+" : value < 0 ? "−" : "±";
  const size = points ? oneDecimal(100 * Math.abs(value)) : plainNumber(Math.abs(value));
  return `${sign}${size}${plusMinus(change.margin, kind)}${points ? " points" : ""}`;
}

const badge = (verdict, text) => element("span", { class: `badge ${verdict}` }, text);
const stateBadge = (run) => badge(run.state === "not finished" ? "warn" : "good", run.state);

const stepsText = (run) => run.steps.toLocaleString("en")
  + (run.planned && run.planned !== run.steps ? ` of ${run.planned.toLocaleString("en")}` : "");
// What stands behind several checks: the worst verdict and the names of those that are not good.
function worstOf(checks) {
  const found = checks.filter((check) => check.verdict !== "good");
  const worst = ["bad", "warn"].find((verdict) => found.some((check) => check.verdict === verdict));
  return [worst ?? "good", found.map((check) => check.name).join(", ")];
}

function checkList(run) {
  return element("ul.checks", run.checks.map((check) => element("li", { class: check.verdict },
    element("i.mark", MARKS[check.verdict]), element("b", check.name), element("span", check.text))));
}

const VERDICTS = { up: ["good", "yes"], down: ["bad", "it got worse"], flat: ["warn", "no clear change"],
  unknown: ["warn", "not enough measurements"], unmeasured: ["warn", "not measured"] };

function learnPanel(run) {
  const [main, ...rest] = run.changes, { changed, sizes } = run.samples;
  const problems = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  const unmeasured = run.config["sft.heldout"] === "null" && run.config.evaluation === "null";
  const [color, word] = VERDICTS[main ? main.verdict : unmeasured ? "unmeasured" : "unknown"];
  const big = (i) => [formatValue([main.before, main.after][i], changeKind(main)),
    element("small", plusMinus(main.margins[i], changeKind(main)))];
  const rows = rest.map((one) => [changeName(one), beforeAfter(one), difference(one), bestText(one)]);
  if (problems) rows.push(["held-out problems", `${problems.toLocaleString("en")} in all`,
    `${changed.learnt} learnt, ${changed.forgotten} forgotten`, ""]);
  const body = main ? [
    element("p.big", big(0), element("span.arrow", " → "), big(1)),
    element("p.under", `${changeName(main)}: ${difference(main)}`, main.best ? `; ${bestText(main)}` : ""),
    element("table.plain", rows.map((row) => element("tr", cells(row.slice(0, rest.some(bestText) ? 4 : 3))))),
  ] : [element("p.under", unmeasured ? "Nothing is held out: set sft.heldout, or add an evaluation." :
    `There is no ${run.step.length ? "metric with two values" : "step in metrics.jsonl"} yet.`)];
  return element("div.panel", element("h2", "Did it learn?", badge(color, word)), body);
}

function healthPanel(run) {
  const [worst, names] = worstOf(run.checks);
  const said = badge(worst, names ? `look at ${names}` : "yes");
  return element("div.panel", element("h2", "Is it healthy?", said), checkList(run));
}

// Mean over all steps, as in the run's summary.
function tokensPerSecond(run) {
  const { values } = seriesOf(run, "throughput/tokens_per_second");
  return values.length ? formatValue(Math.round(meanOf(values)), "count") : "–";
}

const last = (key) => (run) => formatValue(seriesOf(run, key).values.at(-1), "number");
const COLUMNS = { steps: stepsText, time: (run) => formatDuration(run.seconds), entropy: last("policy/entropy"),
  length: last("response/length_mean"), mismatch: last("mismatch/logp_max"), "tokens/s": tokensPerSecond };

function changeCells(run, name) {
  const change = run.changes.find((one) => one.name === name);
  if (!change) return cells(["–", ""]);
  return [element("td", beforeAfter(change)),
    element("td", { class: change.verdict }, difference(change).replace(/ (±|points).*$/, ""))];
}

function runTable() {
  const all = new Set(data.runs.flatMap((run) => run.changes.map((change) => change.name)));
  const changes = [...all].slice(0, 2);
  const [main, ...others] = changes.map((name) => element("th", { colspan: 2 },
    changeName({ name }).replace("held-out accuracy, ", "held-out ")));
  const rows = data.runs.map((run) => {
    const [worst, names] = worstOf(run.checks.filter((check) => check.name !== "end"));
    const detail = element("details", element("summary",
      run.steps ? badge(worst, names || "healthy") : badge("warn", "no steps")), checkList(run), notes(run));
    const [first, ...learnt] = changes.map((name) => changeCells(run, name));
    return element("tr", element("th", { scope: "row" }, swatch(run), " ", run.name, seedOf(run)), first,
      element("td.left", detail), element("td.left", stateBadge(run)), learnt,
      cells(Object.values(COLUMNS).map((text) => text(run))));
  });
  return sheet("runs", element("tr", element("th", "run"), main, element("th.left", "health"), element("th"),
    others, cells(Object.keys(COLUMNS), "th")), rows);
}

// Held-out accuracies of several runs, as papers print them: the last and the best evaluation of each set.
const bestText = ({ best }) => best
  ? `best ${formatValue(best[1], "percent")} (step ${best[0].toLocaleString("en")})` : "";

function evaluationTable(runs, nameOf) {
  const all = runs.flatMap((run) => run.changes.filter(({ best }) => best).map(({ name }) => name));
  const sets = [...new Set(all)];
  if (!sets.length) return null;
  const values = (run, name) => {
    const change = run.changes.find((one) => one.name === name);
    if (!change) return cells(["–", "–"]);
    const [step, value] = change.best;
    return [element("td", formatValue(change.after, "percent")),
      element("td", { title: `step ${step}` }, formatValue(value, "percent"))];
  };
  return sheet("runs evaluations", [
    element("tr", element("th", "held-out accuracy"), sets.map((name) => element("th", { colspan: 2 }, name))),
    element("tr", element("th"), sets.map(() => cells(["last", "best"], "th")))],
  runs.map((run) => element("tr", element("th", { scope: "row" }, nameOf(run)),
    sets.map((name) => values(run, name)))));
}

const notes = (run) => (run.notes.length ? element("p.notes", `Note: ${run.notes.join("; ")}.`) : null);

function buildHead() {
  const [run] = data.runs;
  if (several) {
    const tables = [runTable(), evaluationTable(data.runs, (run) => [swatch(run), " ", run.name]) ?? ""];
    place("head").append(element("h1", arms ? `${plural(arms.length, "arm")}, ${data.runs.length} runs`
      : `${data.runs.length} runs`), ...(arms ? studyHead() : []), ...ofEachRun("verdicts", tables));
    return;
  }
  const facts = [
    plural(run.steps, "step").replace(/^\S+/, stepsText(run)),
    run.seconds ? formatDuration(run.seconds) : null,
    "throughput/tokens_per_second" in run.metrics ? `${tokensPerSecond(run)} tokens/s` : null,
    (run.config["model.path"] ?? "").split("/").filter(Boolean).slice(-2).join("/"),
    run.config["sft.batch_size"] === undefined ? run.config["objective.type"] : "fine-tuning",
  ];
  place("head").append(element("h1", run.name, stateBadge(run)),
    element("p.facts", facts.filter(Boolean).join(" · ")),
    element("div.panels", learnPanel(run), healthPanel(run)), notes(run) ?? "");
}

const grid = (specs) => element("div.grid", specs.map((spec) => new Chart(spec).figure));

function buildCharts() {
  const shown = new Set(["time/unix", ...(several ? [] : ["time/step"])]);
  const nonzero = (key) => data.runs.some((run) => run.metrics[key]?.some((value) => value));
  const present = ({ series, stack, whenNonzero }) => series.some(([key]) =>
    (stack ? key in stack.metrics : whenNonzero ? nonzero(key) : has(key)));
  for (const [name, specs] of catalogue()) {
    const there = specs.filter(present);
    for (const spec of there) {
      spec.series = spec.series.filter(([key]) => has(key));
      for (const [key] of spec.series) (spec.exact ? view.exact : shown).add(key);
    }
    const [single, shared] = [there.filter((spec) => spec.stack), there.filter((spec) => !spec.stack)];
    if (there.length) place("charts").append(title(name), ...(arms && single.length
      ? [grid(shared), ...ofEachRun("time by phase", [grid(single)])] : [grid(there)]));
  }
  buildTimelines();
  const rest = allKeys().filter((key) => !shown.has(key) && !view.exact.has(key));
  if (rest.length) place("charts").append(element("details.more", { ontoggle: () => drawAll() },
    element("summary", plural(rest.length, "other metric")), grid(rest.map((key) => chart(key, null, key)))));
}

function buildTools() {
  const longest = Math.max(0, ...data.runs.map((run) => run.step.length));
  if (!longest) return;
  view.smoothing ??= longest > 200 ? 0.9 : longest > 60 ? 0.8 : 0;
  const amountText = () => (view.smoothing ? view.smoothing.toFixed(2) : "off");
  const amount = element("output", amountText());
  const slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing,
    "aria-label": "smoothing", oninput: () => {
      view.smoothing = Number(slider.value);
      amount.textContent = amountText();
      drawAll();
    } });
  const bound = (label) => element("input", { type: "number", min: 0, "aria-label": label, onchange: () => {
    const [from, to] = [start, end].map((input) => (input.value === "" ? null : Number(input.value)));
    zoom(from, to);
  } });
  const start = bound("first step"), end = bound("last step");
  const reset = element("button", { type: "button", hidden: true, onclick: () => zoom(null, null) },
    "whole run");
  const showRange = () => {
    [start.value, end.value] = [view.from ?? "", view.to ?? ""];
    [start.placeholder, end.placeholder] = stepRange();
    reset.hidden = view.from === null && view.to === null;
  };
  place("tools").append(several ? makeLegend() : "", arms ? seedsBox() : "",
    element("label", "smoothing", slider, amount),
    element("label", { title: "or drag across a chart; double click goes back" }, "steps", start, "–", end),
    reset);
  document.addEventListener("zoomed", showRange);
  showRange();
}

function makeLegend() {
  const show = (hidden) => {
    view.hidden = new Set(hidden);
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", !view.hidden.has(view.runs[i])));
    drawAll();
  };
  const chips = view.runs.map((run) => element("button", {
    type: "button", "aria-pressed": !view.hidden.has(run),
    title: `show or hide ${run.name}; double click: only this one`,
    onclick: () => show(view.runs.filter((one) => view.hidden.has(one) !== (one === run))),
    ondblclick: () => show(view.runs.filter((one) => one !== run)),
    onpointerenter: () => setCursor(view.cursor, run), onpointerleave: () => setCursor(null),
  }, swatch(run), run.name));
  return element("div.legend", chips, element("button.all", { type: "button", onclick: () => show([]) }, "all"));
}

function table(keys, columns, label, runs = data.runs) {
  return sheet("values", several ? element("tr", element("th", label),
    runs.map((run) => element("th", swatch(run), " ", run.name))) : null,
  keys.map((key) => element("tr", element("th", { scope: "row" }, key),
    cells(columns.map((column) => column[key] ?? "–")))));
}

function buildSettings() {
  const runs = view.runs;  // or arms
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return;
  place("settings").append(title("Settings", arms ? "of arms: those that affect results" : null));
  if (several) {
    const differing = keys.filter((key) => new Set(runs.map((run) => run.config[key])).size > 1);
    place("settings").append(!differing.length ? element("p.under", "All runs have the same settings.")
      : table(differing, runs.map(({ config }) => config), "what differs", runs));
  }
  for (const run of runs) {
    const rows = Object.entries(run.config).map(([key, value]) => [element("dt", key), element("dd", value)]);
    if (rows.length) place("settings").append(element("details", { open: !several },
      element("summary", `all settings${several ? ` of ${run.name}` : ""}`), element("dl.settings", rows)));
  }
}

function buildEnvironment() {
  const last = data.runs.map((run) => run.starts.at(-1) ?? {});
  const keys = [...new Set(last.flatMap(Object.keys))];
  place("environment").append(title("Environment"));
  const paths = element("dl.paths", data.runs.map((run) =>
    [element("dt", several ? swatch(run) : null, " folder"), element("dd", run.folder,
    run.starts.length > 1 ? ` (started ${run.starts.length} times, the last of which is shown)` : "")]));
  for (const start of last) for (const key of keys.filter((one) => one.endsWith("_bytes") && start[one]))
    start[key] = formatValue(Number(start[key]), "bytes");
  place("environment").append(...ofEachRun("environment", [paths, keys.length
    ? table(keys, last, "")
    : element("p.under", "Not recorded: there is no environment.json in the run's folder.")]));
}

data.runs.forEach(addRest);
for (const build of [buildHead, buildTools, buildCharts, buildResponses, buildSettings, buildEnvironment]) build();
place("foot").append(`rpg-megatron ${data.version} · made ${data.made}`);
document.body.append(tooltip);
drawAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) drawAll();
  width = window.innerWidth;
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
for (const kind of ["beforeprint", "afterprint"]) window.addEventListener(kind, () => {
  document.documentElement.classList.toggle("printing", kind === "beforeprint");  // in light colors
  document.querySelectorAll("details.more").forEach((part) => { part.open = false; });
  setCursor(null);
  drawAll();
});
document.documentElement.dataset.ready = "yes";
