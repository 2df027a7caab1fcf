// Responses: filters, cards, pairs of before and after.

const PAGE = 8;
const byReward = (item) => item.reward ?? Number(item.right);
const chosen = { run: 0, set: null, filter: null, step: "", words: "", most: PAGE };
const FILTERS = [
  ["learnt", "Learnt", "wrong early, correct later"], ["forgotten", "Forgotten", "correct early, wrong later"],
  ["best", "Best", "highest reward first", (a, b) => byReward(b) - byReward(a) || b.step - a.step],
  ["worst", "Worst", "lowest reward first", (a, b) => byReward(a) - byReward(b) || b.step - a.step],
  ["longest", "Longest", "most tokens first", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
  ["cut", "Truncated", "ended at the length limit"], ["all", "All", "by step"],
];
const PAIRED = ["learnt", "forgotten"];

const textOf = (item) => item.text ?? item.turns.map(([, text]) => text).join("");
const problemOf = (item) => `${item.set}/${item.id}`;
const samplesOf = () => data.runs[chosen.run].samples;

function matching(filter) {
  const samples = samplesOf(), words = chosen.words.toLowerCase();
  let items = samples.items.filter((item) => item.set === chosen.set
    && (chosen.step === "" || item.step === Number(chosen.step))
    && (!words || [textOf(item), samples.prompts[problemOf(item)]?.text ?? ""].join(" ").toLowerCase()
      .includes(words)));
  const keep = {
    learnt: (item) => samples.changes[problemOf(item)] === "learnt",
    forgotten: (item) => samples.changes[problemOf(item)] === "forgotten",
    best: (item) => item.right,
    worst: (item) => !item.right,
    cut: (item) => item.finish === "length",
  }[filter];
  if (keep) items = items.filter(keep);
  const order = FILTERS.find(([name]) => name === filter)[3] ?? ((a, b) => a.step - b.step || a.id - b.id);
  return [...items].sort(order);
}

function verdicts(key) {
  const marks = samplesOf().verdicts[key] ?? [];
  return element("span", { class: "verdicts" }, marks.length > 1 ? marks.map(([step, right, count]) =>
    element("span", { class: 2 * right >= count ? "good" : "bad",
      title: `step ${step}: ${right} of ${count} correct` }, `${right}/${count}`)) : null);
}

function signed(name, value) {
  return typeof value === "number" ? `${name} ${value > 0 ? "+" : ""}${plainNumber(value)}` : null;
}

function responseBox(item) {
  const facts = [`step ${item.step}`, item.tokens ? plural(item.tokens, "token") : null,
    signed("reward", item.reward), signed("advantage", item.advantage),
    item.finish === "length" ? "truncated" : null, item.branch ? `row ${item.branch + 1} of the response` : null];
  return element("div", { class: "response" }, element("p", {},
    badge(item.right ? "good" : "bad", item.right ? "correct" : "wrong"),
    element("span", { class: "facts" }, facts.filter(Boolean).join(" · "))),
      item.versions ? segmentBar(item.versions) : null, item.turns ? conversation(item.turns)
      : element("pre", { tabindex: 0 }, item.text));
}

// Turns of the policy, and what it was given between them.
function conversation(turns) {
  return element("pre", { tabindex: 0, class: "turns" }, turns.map(([sampled, text]) =>
    element("span", sampled ? {} : { class: "given", title: "not sampled by the policy" }, text)));
}

// Segments of a response by the version of the weights that sampled them.
function segmentBar(segments) {
  return element("div", { class: "segments" }, segments.map(([version, tokens], i) => {
    const part = element("span", { class: `part${i % 2}`, title: `${plural(tokens, "token")} of weights ${version}` },
      `weights ${version} · ${tokens.toLocaleString("en")}`);
    part.style.flexGrow = tokens;
    return part;
  }));
}

function problemCard(key, items) {
  const prompt = samplesOf().prompts[key] ?? {};
  return element("article", {}, element("h4", {}, `problem ${key.split("/").at(-1)}`, verdicts(key),
    prompt.answer ? element("span", { class: "answer" }, "answer ", element("b", {}, prompt.answer)) : null),
  prompt.text ? element("pre", { class: "prompt", tabindex: 0 }, prompt.text) : null,
  element("div", { class: items.length > 1 ? "pair" : "" }, items.map(responseBox)));
}

// Problem -> a response of its first step and one of its last, each with the verdict of the majority; with a
// step chosen, one of that step. Problems of which the page has no such responses are left out.
function beforeAndAfter(filter) {
  const groups = new Map(), later = filter === "learnt";
  matching(filter).forEach((item) => groups.set(problemOf(item), [...(groups.get(problemOf(item)) ?? []), item]));
  const pick = (items, step, right) => items.find((item) => item.step === step && item.right === right);
  return [...groups].map(([key, items]) => {
    const [first, last] = [items[0].step, items.at(-1).step];
    if (first === last) return [key, chosen.step === "" ? [] : [items[0]]];
    const pair = [pick(items, first, !later), pick(items, last, later)];
    return [key, pair.every(Boolean) ? pair : []];
  }).filter(([, pair]) => pair.length);
}

function showResponses(list, chips) {
  chips.replaceChildren(...FILTERS.map(([name, label, tip]) => {
    const count = (PAIRED.includes(name) ? beforeAndAfter : matching)(name).length;
    return element("button", { type: "button", title: tip, disabled: !count,
      "aria-pressed": chosen.filter === name,
      onclick: () => { chosen.filter = name; chosen.most = PAGE; showResponses(list, chips); } },
        `${label} `, element("small", {}, String(count)));
  }));
  const cards = PAIRED.includes(chosen.filter) ? beforeAndAfter(chosen.filter)
    : matching(chosen.filter).map((item) => [problemOf(item), [item]]);
  list.replaceChildren(...cards.slice(0, chosen.most).map(([key, items]) => problemCard(key, items)));
  if (!cards.length) list.append(element("p", { class: "under" }, "No response matches."));
  const left = cards.length - chosen.most;
  if (left > 0) list.append(element("button", { type: "button", class: "next",
    onclick: () => { chosen.most += 3 * PAGE; showResponses(list, chips); } }, `show more (${left} left)`));
}

function buildResponses() {
  const readable = data.runs.filter((run) => run.samples.items.length);
  if (!readable.length) return;
  const list = element("div", { class: "cards" }), chips = element("div", { class: "chips" });
  const steps = element("select", { "aria-label": "step",
    onchange: () => { chosen.step = steps.value; again(); } });
  const sets = element("select", { "aria-label": "set",
    onchange: () => { chosen.set = sets.value; setChanged(); } });
  const said = element("p", { class: "under" });
  const runs = element("select", { "aria-label": "run",
    onchange: () => { chosen.run = Number(runs.value); runChanged(); } },
    readable.map((run) => element("option", { value: data.runs.indexOf(run) }, run.name)));
  const search = element("input", { type: "search", placeholder: "search the text", "aria-label": "search",
    oninput: () => { chosen.words = search.value; again(); } });
  const again = () => { chosen.most = PAGE; showResponses(list, chips); };
  function setChanged() {
    const mine = samplesOf().items.filter((item) => item.set === chosen.set);
    const there = [...new Set(mine.map((item) => item.step))].sort((a, b) => a - b);
    steps.replaceChildren(element("option", { value: "" }, "all steps"),
      ...there.map((step) => element("option", { value: step }, `step ${step}`)));
    chosen.step = "";
    chosen.filter = FILTERS.map(([name]) => name).find((name) => matching(name).length) ?? "all";
    again();
  }
  function runChanged() {
    const there = [...new Set(samplesOf().items.map((item) => item.set))];
    sets.replaceChildren(...there.map((set) => element("option", { value: set }, set)));
    if (!there.includes(chosen.set)) chosen.set = there[0];
    sets.value = chosen.set;
    said.textContent = `Chosen from ${samplesOf().read.join("; ")}.`;
    setChanged();
  }
  chosen.run = data.runs.indexOf(readable[0]);
  place("responses").append(title("Responses"), element("div", { class: "bar" }, several ? runs : null, sets,
    steps, search), chips, said, list);
  runChanged();
}
