// The page around the charts: verdicts, legend, responses, settings, environment.

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
data.runs.forEach((run, i) => { run.color = `color${i % 10}`; });
const arms = makeArms();
view.runs = arms ?? data.runs;

const place = (name) => document.getElementById(name);
const title = (text, note) => element("h2", {}, text, note ? element("small", {}, note) : null);
const swatch = (run) => element("i", { class: `swatch ${run.color}` });
const plural = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const has = (key) => data.runs.some((run) => key in run.metrics);
const MARKS = { good: "✓", warn: "!", bad: "✗" };
const NAMES = { "reward/accuracy": "training accuracy", "reward/mean": "training reward",
  "sft/heldout_loss": "held-out loss" };

// -- did it learn, is it healthy ----------------------------------------------------------------------------

const changeKind = (change) => (["reward/mean", "sft/heldout_loss"].includes(change.name) ? "number" : "percent");
// A value with the half width of its 95% interval.
const withMargin = (value, margin, kind) => formatValue(value, kind)
  + (typeof margin === "number" ? ` ± ${kind === "percent" ? oneDecimal(100 * margin)
    : Number(margin.toPrecision(2))}` : "");
const beforeAfter = (change) => [change.before, change.after].map((value, i) =>
  withMargin(value, change.name in NAMES ? null : change.margins[i], changeKind(change))).join(" → ");
const changeName = (change) => NAMES[change.name] ?? `held-out accuracy, ${change.name}`;

function difference(change) {
  const value = change.after - change.before, points = changeKind(change) === "percent";
  const sign = value > 0 ? "+" : value < 0 ? "−" : "±";
  const size = points ? oneDecimal(100 * Math.abs(value)) : plainNumber(Math.abs(value));
  const error = typeof change.margin === "number"
    ? ` ± ${points ? oneDecimal(100 * change.margin) : Number(change.margin.toPrecision(2))}` : "";
  return `${sign}${size}${error}${points ? " points" : ""}`;
}

const badge = (verdict, text) => element("span", { class: `badge ${verdict}` }, text);
const stateBadge = (run) => badge(run.state === "not finished" ? "warn" : "good", run.state);

function stepsText(run) {
  const planned = run.planned && run.planned !== run.steps ? ` of ${run.planned.toLocaleString("en")}` : "";
  return run.steps.toLocaleString("en") + planned;
}

function checkList(run) {
  return element("ul", { class: "checks" }, run.checks.map((check) => element("li", { class: check.verdict },
    element("i", { class: "mark" }, MARKS[check.verdict]), element("b", {}, check.name),
      element("span", {}, check.text))));
}

const VERDICTS = { up: ["good", "yes"], down: ["bad", "it got worse"], flat: ["warn", "no clear change"],
  unknown: ["warn", "not enough measurements"] };

function learnPanel(run) {
  const [main, ...rest] = run.changes;
  const [color, word] = VERDICTS[main ? main.verdict : "unknown"];
  const big = (value, margin) => {
    const [text, error] = withMargin(value, margin, changeKind(main)).split(/(?= ±)/);
    return [text, error ? element("small", {}, error) : null];
  };
  const bests = rest.some(bestText);  // of several held-out sets each has a best evaluation
  const body = main
    ? [element("p", { class: "big" }, big(main.before, main.margins[0]),
      element("span", { class: "arrow" }, " → "), big(main.after, main.margins[1])),
      element("p", { class: "under" }, [`${changeName(main)}: ${difference(main)}`, bestText(main)].filter(Boolean).join("; ")),
      element("table", { class: "plain" }, rest.map((change) => element("tr", {},
        element("td", {}, changeName(change)), element("td", {}, beforeAfter(change)),
        element("td", {}, difference(change)), bests ? element("td", {}, bestText(change)) : null)),
      changedRow(run.samples, bests))]
    : [element("p", { class: "under" },
      `There is no ${run.step.length ? "metric with two values" : "step in metrics.jsonl"} yet.`)];
  return element("div", { class: "panel" }, element("h2", {}, "Did it learn?", badge(color, word)), body);
}

function changedRow({ changed, problems }, wide) {
  return problems ? element("tr", {}, element("td", {}, "held-out problems"),
    element("td", {}, `${problems.toLocaleString("en")} in all`),
    element("td", {}, `${changed.learnt} learnt, ${changed.forgotten} forgotten`),
    wide ? element("td", {}) : null) : null;
}

function healthPanel(run) {
  const bad = run.checks.filter((check) => check.verdict !== "good");
  const worst = bad.some((check) => check.verdict === "bad") ? "bad" : bad.length ? "warn" : "good";
  return element("div", { class: "panel" }, element("h2", {}, "Is it healthy?",
    badge(worst, bad.length ? `look at ${bad.map((check) => check.name).join(", ")}` : "yes")),
      checkList(run));
}

function lastNumber(run, key, kind) {
  const values = seriesOf(run, key).values;
  return values.length ? formatValue(values.at(-1), kind) : "–";
}

// Mean over all steps, as in the run's summary.
function tokensPerSecond(run) {
  const { values } = seriesOf(run, "throughput/tokens_per_second");
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return values.length ? formatValue(Math.round(mean), "count") : "–";
}

const COLUMNS = [
  ["steps", stepsText], ["time", (run) => formatDuration(run.seconds)],
  ["entropy", (run) => lastNumber(run, "policy/entropy", "number")],
  ["length", (run) => lastNumber(run, "response/length_mean", "number")],
  ["mismatch", (run) => lastNumber(run, "mismatch/logp_max", "number")],
  ["tokens/s", tokensPerSecond],
];

function changeCells(run, name) {
  const change = run.changes.find((one) => one.name === name);
  if (!change) return [element("td", {}, "–"), element("td", {}, "")];
  return [element("td", {}, beforeAfter(change)),
    element("td", { class: change.verdict }, difference(change).replace(/ (±|points).*$/, ""))];
}

function runTable() {
  const all = new Set(data.runs.flatMap((run) => run.changes.map((change) => change.name)));
  const names = [...all].slice(0, 2);
  const heads = names.map((name) => element("th", { colspan: 2 },
    changeName({ name }).replace("held-out accuracy, ", "held-out ")));
  const rows = data.runs.map((run) => {
    const bad = run.checks.filter((check) => check.verdict !== "good" && check.name !== "end");
    const worst = bad.some((check) => check.verdict === "bad") ? "bad" : "warn";
    const detail = element("tr", { class: "detail", hidden: true },
      element("td", { colspan: 20 }, checkList(run), notes(run)));
    const opener = element("button", { type: "button", "aria-expanded": false, onclick: () => {
      detail.hidden = !detail.hidden;
      opener.setAttribute("aria-expanded", !detail.hidden);
    } }, !run.steps ? badge("warn", "no steps")
      : bad.length ? badge(worst, bad.map((check) => check.name).join(", ")) : badge("good", "healthy"));
    const learnt = names.map((name) => changeCells(run, name));
    return [element("tr", {}, element("th", { scope: "row" }, swatch(run), " ", run.name, seedOf(run)), learnt[0] ?? null,
      element("td", { class: "left" }, opener), element("td", { class: "left" }, stateBadge(run)),
      learnt.slice(1), COLUMNS.map(([, text]) => element("td", {}, text(run)))), detail];
  });
  return element("div", { class: "scroll" }, element("table", { class: "runs" },
    element("thead", {}, element("tr", {}, element("th", {}, "run"), heads[0] ?? null,
      element("th", { class: "left" }, "health"), element("th", {}), heads.slice(1),
      COLUMNS.map(([name]) => element("th", {}, name)))),
    element("tbody", {}, rows.flat())));
}

function notes(run) {
  return run.notes.length ? element("p", { class: "notes" }, `Note: ${run.notes.join("; ")}.`) : null;
}

function buildHead() {
  const [run] = data.runs;
  if (several) {
    const tables = [runTable(), evaluationTable(data.runs, (run) => [swatch(run), " ", run.name]) ?? ""];
    place("head").append(element("h1", {}, arms ? `${plural(arms.length, "arm")}, ${data.runs.length} runs`
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
  place("head").append(element("h1", {}, run.name, stateBadge(run)),
    element("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    element("div", { class: "panels" }, learnPanel(run), healthPanel(run)), notes(run) ?? "");
}

// -- charts -------------------------------------------------------------------------------------------------

const allKeys = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();

function evalCharts() {
  const keys = allKeys().filter((key) => key.startsWith("eval/"));
  const sets = [...new Set(keys.map((key) => key.slice(5, key.lastIndexOf("/"))))];
  const size = (key) => Number(key.split("@")[1]);
  const first = [], second = [];
  for (const set of sets) {
    const of = (word) => keys.filter((key) => key.startsWith(`eval/${set}/${word}@`))
      .sort((a, b) => size(a) - size(b));
    const series = (list) => list.map((key) => [key, key.split("/").at(-1)]);
    if (of("avg").length) first.push({ title: "Held-out accuracy",
      note: `${set}, ${series(of("avg"))[0][1]}`, kind: "percent", series: series(of("avg")).slice(0, 1) });
    if (of("pass").length > 1) second.push({ title: "Held-out pass@k", note: set, kind: "percent",
      series: series(of("pass")).filter(([key]) => size(key) > 1).reverse() });
    if (of("maj").length) second.push({ title: "Held-out majority",
      note: `${set}, ${series(of("maj"))[0][1]}`, kind: "percent", series: series(of("maj")).slice(0, 1) });
  }
  return [first, second];
}

const PHASES = [["time/rollout", "rollout"], ["time/reward", "reward"], ["time/logprobs", "log-probs"],
  ["time/update", "update"], ["time/sync", "sync"], ["time/rest", "rest"]];

// Time of a step outside its phases, so that the areas sum to the step time.
function addRest(run) {
  const number = (value) => (typeof value === "number" ? value : 0);
  const phases = PHASES.slice(0, -1).map(([key]) => run.metrics[key] ?? []);
  const inPhases = (i) => phases.reduce((sum, phase) => sum + number(phase[i]), 0);
  if (run.metrics["time/step"]) run.metrics["time/rest"] = run.metrics["time/step"].map(
    (step, i) => (typeof step === "number" ? Math.max(0, step - inPhases(i)) : null));
}

// The metrics of the correction by age of the weights.
function byLag(name) {
  const age = (key) => Number(/lag_(\d+)/.exec(key)[1]);
  return allKeys().filter((key) => /^correction\/lag_\d+\//.test(key) && key.endsWith(`/${name}`))
    .sort((a, b) => age(a) - age(b)).map((key) => [key, `age ${age(key)}`]);
}

// The terms of the reward, if there are several, and counters of the user's functions.
function rewardCharts(one) {
  const ours = ["mean", "std", "accuracy", "correctness", "timeouts", "crashes", "out_of_memory", "errors"];
  const keys = allKeys().filter((key) => key.startsWith("reward/")).map((key) => key.slice("reward/".length));
  return keys.filter((key) => !ours.includes(key))
    .map((key) => one(key, `reward/${key}`, "number", { note: key.includes("/") ? "sum per step" : "mean" }));
}

// Tools and turns of episodes.
function environmentCharts(one, many) {
  const keys = allKeys().filter((key) => key.startsWith("env/"));
  const tools = keys.filter((key) => key.endsWith("_calls") && keys.includes(key.replace(/_calls$/, "_raised")))
    .map((key) => key.slice(0, -"_calls".length));
  const others = keys.filter((key) => !tools.some((tool) => key.startsWith(`${tool}_`)));
  return [...tools.flatMap((tool) => {
    const name = tool.slice("env/".length);
    return [many(name, "number", [[`${tool}_calls`, "calls"], [`${tool}_errors`, "failed"],
        [`${tool}_raised`, "exceptions of the tool"]], { note: "a response" }),
      one(`${name}: time`, `${tool}_seconds`, "seconds", { note: "a response" })];
  }), ...others.map((key) => one(key.slice("env/".length), key, "number", { whenNonzero: true }))];
}

const isFineTuning = () => allKeys().includes("sft/epoch");

// The losses of fine-tuning.
function lossCharts(many) {
  if (!isFineTuning()) return [];
  return [many("Loss", "number", [["sft/heldout_loss", "held out"], ["policy/loss", "training"]],
    { note: "nats per trained token" })];
}

function catalogue() {
  const [heldOut, more] = evalCharts();
  const one = (name, key, kind, rest = {}) => ({ title: name, kind, series: [[key, name]], ...rest });
  const many = (name, kind, series, rest = {}) => ({ title: name, kind, series, ...rest });
  return [
    ["Learning", [...heldOut, ...lossCharts(many), one("Training accuracy", "reward/accuracy", "percent"),
      one("Training reward", "reward/mean", "number", { note: "mean" }), ...more]],
    ["Rewards", rewardCharts(one)],
    ["Environment", environmentCharts(one, many)],
    ["Policy", [one("Entropy", "policy/entropy", "number", { note: "nats per token" }),
      many("KL", "number", [["kl/anchor", "to the anchor"], ["kl/old", "to the old policy"]],
        { note: "nats per token" }),
      many("Clipped tokens", "percent", [["policy/clip_frac_high", "high"], ["policy/clip_frac_low", "low"],
        ["policy/clip_frac_c", "dual (c)"]]),
      one("Ratio, mean", "ratio/mean", "number", { note: "π / π old" }),
      one("Ratio, largest", "ratio/max", "number", { log: true }),
      one("Gradient norm", "policy/grad_norm", "number", { note: "mean of the updates" }),
      ...(isFineTuning() ? [] : [one("Loss", "policy/loss", "number")]), one("Learning rate", "lr", "number", { exact: true }),
      ...allKeys().filter((key) => key.startsWith("objective/"))  // metrics of a user's own loss
        .map((key) => one(key.slice("objective/".length), key, "number"))]],
    ["Sampled batches", [one("Response length", "response/length_mean", "count", { note: "tokens, mean" }),
      one("Truncated responses", "response/truncated_frac", "percent"),
      one("Reward spread", "reward/std", "number", { note: "standard deviation" }),
      many("Groups without signal", "percent", [["groups/equal_rewards", "equal rewards"],
        ["groups/all_right", "all correct"], ["groups/all_wrong", "all wrong"]])]],
    ["Asynchronous rollouts", [
      many("Age of the batch", "number", [["async/lag_max", "oldest token"], ["async/lag_mean", "mean"]],
        { note: "weight updates" }),
      many("Older weights", "percent", [["async/stale_tokens", "tokens"],
        ["async/mixed_responses", "responses of several versions"]]),
      many("Waiting", "seconds", [["async/trainer_waited", "trainer, for a batch"],
        ["async/sampler_held", "sampler, at its bound"]], { note: "per step" }),
      many("Groups", "count", [["async/ready", "ready"], ["async/in_flight", "in flight"]],
        { note: "when a batch is taken" }),
      one("Prefilled again", "async/recomputed_tokens", "count", { note: "tokens" }),
      one("Segments", "async/segments", "number", { note: "mean per response" }),
      many("Correction ratio", "number", byLag("ratio_mean"), { note: "mean, by age" }),
      many("Corrections at the bound", "percent", byLag("hit_frac"), { note: "by age" })]],
    ["Engine against trainer", [many("Mismatch", "number",
      [["mismatch/logp_max", "max"], ["mismatch/logp_p99", "99th percentile"],
      ["mismatch/logp_mean", "mean"], ["mismatch/logp_engine_mean", "mean of the worst engine"]], { note: "nats", log: true }),
      many("Engines", "count", [["engine/restarts", "restarts"],
        ["engine/requests_resent", "requests sent again"],
        ["engine/preemptions", "requests preempted"]], { note: "per step", exact: true,
        whenNonzero: true }),
      one("Tokens of older weights", "mismatch/stale_tokens", "count", { whenNonzero: true })]],
    ["Experts", [many("Busiest expert", "number", [["moe/load_max", "most uneven layer"],
        ["moe/load_mean", "mean of the layers"]], { note: "1: even load" }),
      many("Entropy of the shares", "number", [["moe/entropy_min", "most uneven layer"],
        ["moe/entropy_mean", "mean of the layers"]], { note: "1: even" }),
      one("Auxiliary loss", "moe/aux_loss", "number", { note: "1: even load" }),
      one("Dead experts", "moe/dead_experts", "count", { note: "without tokens, all layers", whenNonzero: true })]],
    ["Speed and memory", [
      ...data.runs.map((run) => many("Time by phase", "seconds", PHASES,
        { note: several ? run.name : "per step", stack: run })),
      ...(several ? [one("Step time", "time/step", "seconds")] : []),
      one("Throughput", "throughput/tokens_per_second", "count", { note: "tokens/s" }),
      one("Engines' tokens", "engine/tokens_per_second", "count", { note: "tokens/s, all engines" }),
      one("KV cache in use", "engine/kv_use_max", "percent", { note: "fullest engine" }),
      one("Waiting requests", "engine/waiting_max", "count", { note: "longest queue", whenNonzero: true }),
      many("GPUs of the trainer", "percent", [["gpu/utilization", "busy"], ["gpu/mfu_update", "MFU of updates"],
        ["gpu/mfu", "MFU of the step"]]),
      one("Memory", "memory/peak_bytes", "bytes", { note: "peak, largest rank" }),
      one("Weight sync", "sync/seconds", "seconds")]],
  ];
}

function kindOf(key) {
  if (/frac|accuracy|@|^groups/.test(key)) return "percent";
  if (/bytes/.test(key)) return "bytes";
  if (/^time\/|seconds/.test(key)) return "seconds";
  return /tokens|length|version|count/.test(key) ? "count" : "number";
}

function grid(specs) {
  return element("div", { class: "grid" }, specs.map((spec) => new Chart(spec).figure));
}

function buildCharts() {
  const shown = new Set(["time/unix", ...(several ? [] : ["time/step"])]), known = catalogue();
  const nonzero = (key) => data.runs.some((run) => run.metrics[key]?.some((value) => value));
  const shows = (spec, key) => (spec.whenNonzero ? nonzero(key) : has(key));
  const present = (spec) => spec.series.some(
    ([key]) => (spec.stack ? key in spec.stack.metrics : shows(spec, key)));
  for (const [name, specs] of known) {
    const there = specs.filter(present).map((spec) => ({ ...spec,
      series: spec.series.filter(([key]) => has(key)) }));
    there.forEach((spec) => spec.series.forEach(([key]) => {
      shown.add(key);
      if (spec.exact) view.exact.add(key);
    }));
    const [single, shared] = [there.filter((spec) => spec.stack), there.filter((spec) => !spec.stack)];
    if (there.length) place("charts").append(title(name), ...(arms && single.length
      ? [grid(shared), ...ofEachRun("time by phase", [grid(single)])] : [grid(there)]));
  }
  buildTimelines();
  const rest = allKeys().filter((key) => !shown.has(key));
  if (!rest.length) return;
  const folded = element("details", { class: "more", ontoggle: () => drawAll() },
    element("summary", {}, `${plural(rest.length, "other metric")}`),
    grid(rest.map((key) => ({ title: key, kind: kindOf(key), series: [[key, key]] }))));
  place("charts").append(folded);
}

function buildTools() {
  const longest = Math.max(0, ...data.runs.map((run) => run.step.length));
  if (!longest) return;
  view.smoothing = longest > 200 ? 0.9 : longest > 60 ? 0.8 : 0;
  const legend = several ? element("div", { class: "legend" }, view.runs.map((run) => {
    const chip = element("button", { type: "button", "aria-pressed": true,
      title: `show or hide ${run.name}; double click: only this one`,
      onclick: () => legendChanged(() => view.hidden.delete(run) || view.hidden.add(run)),
      ondblclick: () => legendChanged(() => { view.hidden = new Set(view.runs.filter((r) => r !== run)); }),
      onpointerenter: () => setCursor(view.cursor, run), onpointerleave: () => setCursor(null),
    }, swatch(run), run.name);
    run.chip = chip;
    return chip;
  }), element("button", { type: "button", class: "all",
    onclick: () => legendChanged(() => view.hidden.clear()) }, "all")) : null;
  const amountText = () => (view.smoothing ? view.smoothing.toFixed(2) : "off");
  const amount = element("output", {}, amountText());
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
  place("tools").append(legend ?? "", arms ? seedsBox() : "", element("label", {}, "smoothing", slider, amount),
    element("label", { title: "or drag across a chart; double click goes back" }, "steps", start, "–", end),
      reset);
  document.addEventListener("zoomed", showRange);
  showRange();
}

function legendChanged(change) {
  change();
  view.runs.forEach((run) => run.chip.setAttribute("aria-pressed", !view.hidden.has(run)));
  drawAll();
}

// -- settings, environment ----------------------------------------------------------------------------------

function table(keys, cells, label, runs = data.runs) {
  return element("div", { class: "scroll" }, element("table", { class: "values" },
    several ? element("thead", {}, element("tr", {}, element("th", {}, label),
      runs.map((run) => element("th", {}, swatch(run), " ", run.name)))) : null,
    element("tbody", {}, keys.map((key) => element("tr", {}, element("th", { scope: "row" }, key),
      cells(key).map((cell) => element("td", {}, cell ?? "–")))))));
}

function blocks(values) {
  const groups = new Map();
  for (const [key, value] of Object.entries(values)) {
    const dot = key.indexOf(".");
    const [group, rest] = dot < 0 ? ["run", key] : [key.slice(0, dot), key.slice(dot + 1)];
    groups.set(group, [...(groups.get(group) ?? []), [rest, value]]);
  }
  return element("div", { class: "blocks" }, [...groups].map(([group, rows]) =>
    element("div", { class: "block" }, element("h4", {}, group),
    element("dl", {}, rows.map(([key, value]) => [element("dt", {}, key), element("dd", {}, value)])))));
}

function buildSettings() {
  const runs = view.runs;  // or arms
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return;
  place("settings").append(title("Settings", arms ? "of arms: those that affect results" : null));
  if (several) {
    const differing = keys.filter((key) => new Set(runs.map((run) => run.config[key])).size > 1);
    place("settings").append(differing.length ? table(differing, (key) =>
      runs.map((run) => run.config[key]), "what differs", runs)
      : element("p", { class: "under" }, "All runs have the same settings."));
  }
  for (const run of runs) {
    const all = element("details", { open: !several }, element("summary", {},
      `all settings${several ? ` of ${run.name}` : ""}`), blocks(run.config));
    if (Object.keys(run.config).length) place("settings").append(all);
  }
}

function buildEnvironment() {
  const last = data.runs.map((run) => run.starts.at(-1) ?? {});
  const keys = [...new Set(last.flatMap(Object.keys))];
  place("environment").append(title("Environment"));
  const paths = element("dl", { class: "paths" }, data.runs.map((run) =>
    [element("dt", {}, several ? swatch(run) : null, " folder"), element("dd", {}, run.folder,
    run.starts.length > 1 ? ` (started ${run.starts.length} times, the last of which is shown)` : "")]));
  const cell = (key, value) =>
    (key.endsWith("_bytes") && value ? formatValue(Number(value), "bytes") : value);
  place("environment").append(...ofEachRun("environment", [paths, keys.length
    ? table(keys, (key) => last.map((start) => cell(key, start[key])), "")
    : element("p", { class: "under" }, "Not recorded: there is no environment.json in the run's folder.")]));
}

buildHead();
data.runs.forEach(addRest);
buildTools();
buildCharts();
buildResponses();
buildSettings();
buildEnvironment();
place("foot").append(`rpg-megatron ${data.version} · made ${data.made}`);
document.body.append(tooltip);
document.body.classList.toggle("crowded", data.runs.length > 3);
drawAll();
let width = window.innerWidth;
new ResizeObserver(() => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  drawAll();
}).observe(document.body);
window.addEventListener("beforeprint", () => {
  setCursor(null);
  document.querySelectorAll("details.more").forEach((part) => { part.open = false; });
});
document.documentElement.dataset.ready = "yes";
