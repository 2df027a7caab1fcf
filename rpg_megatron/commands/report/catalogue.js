// The charts of a page, in sections, in the order in which a run is judged.

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
