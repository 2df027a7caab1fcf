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
  unknown: ["warn", "not enough measurements"] };

function learnPanel(run) {
  const [main, ...rest] = run.changes, { changed, sizes } = run.samples;
  const problems = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  const [color, word] = VERDICTS[main ? main.verdict : "unknown"];
  const big = (i) => [formatValue([main.before, main.after][i], changeKind(main)),
    element("small", plusMinus(main.margins[i], changeKind(main)))];
  const rows = rest.map((one) => [changeName(one), beforeAfter(one), difference(one), bestText(one)]);
  if (problems) rows.push(["held-out problems", `${problems.toLocaleString("en")} in all`,
    `${changed.learnt} learnt, ${changed.forgotten} forgotten`, ""]);
  const body = main ? [
    element("p.big", big(0), element("span.arrow", " → "), big(1)),
    element("p.under", `${changeName(main)}: ${difference(main)}`, main.best ? `; ${bestText(main)}` : ""),
    element("table.plain", rows.map((row) => element("tr", cells(row.slice(0, rest.some(bestText) ? 4 : 3))))),
  ] : [element("p.under",
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

const allKeys = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();

// Evaluations of each set: the accuracies of all sets first.
function evalCharts() {
  const keys = allKeys().filter((key) => /^eval\/.+@\d+$/.test(key)), of = (key) => Number(key.split("@")[1]);
  const sets = [...new Set(keys.map((key) => key.slice("eval/".length, key.lastIndexOf("/"))))];
  const words = { avg: "Held-out accuracy", pass: "Held-out pass@k", maj: "Held-out majority" };
  return Object.entries(words).flatMap(([word, title]) => sets.map((set) => {
    const there = keys.filter((key) => key.startsWith(`eval/${set}/${word}@`)).sort((a, b) => of(a) - of(b));
    if (word === "pass") return chart(title, set, there.filter((key) => of(key) > 1).reverse());
    return chart(title, `${set}, ${word}@${there.length ? of(there[0]) : ""}`, there.slice(0, 1));
  }));
}

const PHASES = { "time/rollout": "rollout", "time/reward": "reward", "time/logprobs": "log-probs",
  "time/update": "update", "time/sync": "sync", "time/rest": "rest" };

// Time of a step outside its phases, so that the areas sum to the step time.
function addRest({ metrics }) {
  const phases = Object.keys(PHASES).map((key) => metrics[key] ?? []), number = (value) => Number(value) || 0;
  const rest = (step, i) => Math.max(0, phases.reduce((left, phase) => left - number(phase[i]), number(step)));
  if (metrics["time/step"]) metrics["time/rest"] = metrics["time/step"].map(rest);
}

function kindOf(key) {
  if (/frac|accuracy|@|^groups/.test(key)) return "percent";
  if (/bytes/.test(key)) return "bytes";
  if (/^time\/|seconds/.test(key)) return "seconds";
  return /tokens|length|version|count/.test(key) ? "count" : "number";
}

// series: one key, keys whose names are labels, or {key: label}.
function chart(title, note, series, options = {}) {
  const named = (key) => [key, key.split("/").at(-1).replaceAll("_", " ")];
  const entries = typeof series === "string" ? [[series, title]]
    : Array.isArray(series) ? series.map(named) : Object.entries(series);
  return { title, note, kind: kindOf(entries[0]?.[0] ?? ""), series: entries, ...options };
}

// The metrics of the correction by age of the weights.
function byLag(name) {
  const age = (key) => Number(/lag_(\d+)/.exec(key)[1]);
  const keys = allKeys().filter((key) => /^correction\/lag_\d+\//.test(key) && key.endsWith(`/${name}`));
  return Object.fromEntries(keys.sort((a, b) => age(a) - age(b)).map((key) => [key, `age ${age(key)}`]));
}

const FAILED = ["reward/timeouts", "reward/crashes", "reward/out_of_memory", "reward/errors"];

// The terms of the reward, if there are several, and counters of the user's functions.
function rewardCharts() {
  const ours = ["reward/mean", "reward/std", "reward/accuracy", "reward/correctness", "reward/failed_frac", ...FAILED];
  const keys = allKeys().filter((key) => key.startsWith("reward/") && !ours.includes(key));
  return keys.map((key) => [key, key.slice("reward/".length)]).map(([key, name]) =>
    chart(name, name.includes("/") ? "sum per step" : "mean", key, { kind: "number" }));
}

// Tools and turns of episodes.
function environmentCharts() {
  const keys = allKeys().filter((key) => key.startsWith("env/"));
  const names = keys.filter((key) => key.endsWith("_calls")).map((key) => key.slice(0, -"_calls".length));
  const tools = names.filter((tool) => keys.includes(`${tool}_raised`));
  const others = keys.filter((key) => !tools.some((tool) => key.startsWith(`${tool}_`)));
  return [...tools.flatMap((tool) => [
    chart(tool.slice("env/".length), "a response", { [`${tool}_calls`]: "calls", [`${tool}_errors`]: "failed",
      [`${tool}_raised`]: "exceptions of the tool" }, { kind: "number" }),
    chart(`${tool.slice("env/".length)}: time`, "a response", `${tool}_seconds`),
  ]), ...others.map((key) =>
    chart(key.slice("env/".length), null, key, { kind: "number", whenNonzero: true }))];
}

function failureCharts() {
  const failed = { "reward/failed_frac": "training" };
  for (const key of allKeys()) if (/^eval\/.*\/failed_frac$/.test(key)) failed[key] = key.split("/")[1];
  return [
    chart("Failed rewards", "share of responses", failed),
    chart("Why rewards failed", "responses", FAILED, { kind: "count" }),
    chart("Skipped updates", "per step", "policy/skipped_updates", { kind: "count" }),
  ].map((spec) => ({ ...spec, exact: true, whenNonzero: true }));
}

// Sections of charts, in the order in which a run is judged.
function catalogue() {
  const fineTuning = has("sft/epoch"), loss = fineTuning ? [] : [chart("Loss", null, "policy/loss")];
  return [
    ["Learning", [
      chart("Training reward", "mean", "reward/mean"),
      ...(fineTuning ? [chart("Loss", "nats per trained token",
        { "sft/heldout_loss": "held out", "policy/loss": "training" })] : []),
      ...evalCharts(),
      chart("Training accuracy", null, "reward/accuracy")]],
    ["Policy", [
      ...loss,
      chart("Gradient norm", "mean of the updates", "policy/grad_norm"),
      chart("KL", "nats per token", { "kl/anchor": "to the anchor", "kl/old": "to the old policy" }),
      chart("Entropy", "nats per token", "policy/entropy"),
      chart("Clipped tokens", null,
        { "policy/clip_frac_high": "high", "policy/clip_frac_low": "low", "policy/clip_frac_c": "dual (c)" }),
      chart("Ratio, mean", "π / π old", "ratio/mean"),
      chart("Ratio, largest", null, "ratio/max", { log: true }),
      chart("Learning rate", null, "lr", { exact: true }),
      ...allKeys().filter((key) => key.startsWith("objective/"))  // metrics of a user's own loss
        .map((key) => chart(key.slice("objective/".length), null, key, { kind: "number" }))]],
    ["Sampled batches", [
      chart("Response length", "tokens, mean", "response/length_mean"),
      chart("Truncated responses", null, "response/truncated_frac"),
      chart("Reward spread", "standard deviation", "reward/std"),
      chart("Groups without signal", null,
        ["groups/equal_rewards", "groups/all_right", "groups/all_wrong"])]],
    ["Rewards", rewardCharts()],
    ["Environment", environmentCharts()],
    ["Engine against trainer", [
      chart("Mismatch", "nats", { "mismatch/logp_max": "max", "mismatch/logp_p99": "99th percentile",
        "mismatch/logp_mean": "mean", "mismatch/logp_engine_mean": "worst engine's mean" }, { log: true }),
      chart("Engines", "per step", ["engine/restarts", "engine/requests_resent", "engine/preemptions"],
        { kind: "count", exact: true, whenNonzero: true }),
      chart("Tokens of older weights", null, "mismatch/stale_tokens", { whenNonzero: true })]],
    ["Asynchronous rollouts", [
      chart("Age of the batch", "weight updates",
        { "async/lag_max": "oldest token", "async/lag_mean": "mean" }),
      chart("Older weights", null, { "async/stale_tokens": "tokens",
        "async/mixed_responses": "responses of several versions" }, { kind: "percent" }),
      chart("Waiting", "per step", { "async/trainer_waited": "trainer, for a batch",
        "async/sampler_held": "sampler, at its bound" }, { kind: "seconds" }),
      chart("Groups", "when a batch is taken", ["async/ready", "async/in_flight"], { kind: "count" }),
      chart("Prefilled again", "tokens", "async/recomputed_tokens"),
      chart("Segments", "mean per response", "async/segments"),
      chart("Correction ratio", "mean, by age", byLag("ratio_mean"), { kind: "number" }),
      chart("Corrections at the bound", "by age", byLag("hit_frac"))]],
    ["Experts", [
      chart("Busiest expert", "1: even load",
        { "moe/load_max": "most uneven layer", "moe/load_mean": "mean of the layers" }),
      chart("Entropy of the shares", "1: even",
        { "moe/entropy_min": "most uneven layer", "moe/entropy_mean": "mean of the layers" }),
      chart("Auxiliary loss", "1: even load", "moe/aux_loss"),
      chart("Dead experts", "without tokens, all layers", "moe/dead_experts",
        { kind: "count", whenNonzero: true })]],
    ["Speed and memory", [
      ...data.runs.map((run) =>
        chart("Time by phase", several ? run.name : "per step", PHASES, { stack: run })),
      ...(several ? [chart("Step time", null, "time/step")] : []),
      chart("Throughput", "tokens/s", "throughput/tokens_per_second"),
      chart("Engines' tokens", "tokens/s, all engines", "engine/tokens_per_second"),
      chart("KV cache in use", "fullest engine", "engine/kv_use_max", { kind: "percent" }),
      chart("Waiting requests", "longest queue", "engine/waiting_max", { kind: "count", whenNonzero: true }),
      chart("GPUs of the trainer", null, { "gpu/utilization": "busy", "gpu/mfu_update": "MFU of updates",
        "gpu/mfu": "MFU of the step" }, { kind: "percent" }),
      chart("Memory", "peak, largest rank", "memory/peak_bytes"),
      chart("Weight sync", null, "sync/seconds")]],
    ["Failures", failureCharts()],
  ];
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
