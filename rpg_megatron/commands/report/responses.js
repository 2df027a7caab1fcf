// Responses: filters, cards, pairs of before and after.

const PAGE = 8;
const byReward = (item) => item.reward ?? Number(item.right);
const chosen = { run: 0, set: null, filter: null, step: "", words: "", most: PAGE };
const FILTERS = {
  learnt: { label: "Learnt", tip: "wrong early, correct later", keep: (item) => item.change === "learnt" },
  forgotten: { label: "Forgotten", tip: "correct early, wrong later",
    keep: (item) => item.change === "forgotten" },
  best: { label: "Best", tip: "highest reward first", keep: (item) => item.right,
    order: (a, b) => byReward(b) - byReward(a) || b.step - a.step },
  worst: { label: "Worst", tip: "lowest reward first", keep: (item) => !item.right,
    order: (a, b) => byReward(a) - byReward(b) || b.step - a.step },
  longest: { label: "Longest", tip: "most tokens first", order: (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0) },
  cut: { label: "Truncated", tip: "ended at the length limit", keep: (item) => item.finish === "length" },
  all: { label: "All", tip: "by step" },
};

const textOf = (item) => item.text ?? item.turns.map(([, text]) => text).join("");
const problemOf = (item) => `${item.set}/${item.id}`;
const samplesOf = () => data.runs[chosen.run].samples;

function matching(filter) {
  const { items, prompts } = samplesOf(), words = chosen.words.toLowerCase();
  const { keep = () => true, order = (a, b) => a.step - b.step || a.id - b.id } = FILTERS[filter];
  const text = (item) => `${textOf(item)} ${prompts[problemOf(item)]?.text ?? ""}`.toLowerCase();
  const there = ({ set, step }) => set === chosen.set && ["", String(step)].includes(chosen.step);
  return items.filter((item) => there(item) && keep(item) && text(item).includes(words)).sort(order);
}

function verdicts(key) {
  const marks = samplesOf().verdicts[key] ?? [];
  return element("span.verdicts", marks.length > 1 ? marks.map(([step, right, count]) =>
    element("span", { class: 2 * right >= count ? "good" : "bad",
      title: `step ${step}: ${right} of ${count} correct` }, `${right}/${count}`)) : null);
}

const signed = (name, value) => (typeof value === "number"
  ? `${name} ${value > 0 ? "+" : ""}${plainNumber(value)}` : null);

function responseBox(item) {
  const facts = [`step ${item.step}`, item.tokens ? plural(item.tokens, "token") : null,
    signed("reward", item.reward), signed("advantage", item.advantage),
    item.finish === "length" ? "truncated" : null, item.branch ? `row ${item.branch + 1} of the response` : null];
  const turns = (item.turns ?? []).map(([sampled, text]) =>
    element(sampled ? "span" : "span.given", { title: sampled ? null : "not sampled by the policy" }, text));
  return element("div.response", element("p", badge(item.right ? "good" : "bad", item.right ? "correct" : "wrong"),
    element("span.facts", facts.filter(Boolean).join(" · "))), item.versions ? segmentBar(item.versions) : null,
  element("pre", { tabindex: 0, class: item.turns ? "turns" : null }, item.text ?? turns));
}

// Segments of a response by the version of the weights that sampled them.
function segmentBar(segments) {
  return element("div.segments", segments.map(([version, tokens], i) => {
    const title = `${plural(tokens, "token")} of weights ${version}`;
    const part = element(`span.part${i % 2}`, { title }, `weights ${version} · ${tokens.toLocaleString("en")}`);
    part.style.flexGrow = tokens;
    return part;
  }));
}

function problemCard(key, items) {
  const prompt = samplesOf().prompts[key] ?? {};
  return element("article", element("h4", `problem ${key.split("/").at(-1)}`, verdicts(key),
    prompt.answer ? element("span.answer", "answer ", element("b", prompt.answer)) : null),
  prompt.text ? element("pre", { class: "prompt", tabindex: 0 }, prompt.text) : null,
  element("div", { class: items.length > 1 ? "pair" : "" }, items.map(responseBox)));
}

// [problem, responses] for each card; a problem that changed has one response from before and one from after.
function cardsOf(filter) {
  const items = matching(filter), groups = new Map();
  if (!["learnt", "forgotten"].includes(filter)) return items.map((item) => [problemOf(item), [item]]);
  items.forEach((item) => groups.set(problemOf(item), [...(groups.get(problemOf(item)) ?? []), item]));
  return [...groups].filter(([, pair]) => pair.length === 2 || chosen.step !== "");
}

function showResponses(list, chips) {
  const choose = (filter, most) => {
    Object.assign(chosen, { filter, most });
    showResponses(list, chips);
  };
  chips.replaceChildren(...Object.entries(FILTERS).map(([name, { label, tip }]) => {
    const count = cardsOf(name).length;
    const attributes = { type: "button", title: tip, disabled: !count, "aria-pressed": chosen.filter === name };
    return element("button", { ...attributes, onclick: () => choose(name, PAGE) }, `${label} `,
      element("small", String(count)));
  }));
  const cards = cardsOf(chosen.filter), left = cards.length - chosen.most;
  list.replaceChildren(...cards.slice(0, chosen.most).map(([key, items]) => problemCard(key, items)));
  if (!cards.length) list.append(element("p.under", "No response matches."));
  if (left > 0) list.append(element("button.next", { type: "button",
    onclick: () => choose(chosen.filter, chosen.most + 3 * PAGE) }, `show more (${left} left)`));
}

function buildResponses() {
  const readable = data.runs.filter((run) => run.samples.items.length);
  if (!readable.length) return;
  const list = element("div.cards"), chips = element("div.chips"), said = element("p.under");
  const select = (label, change) => element("select",
    { "aria-label": label, onchange: (event) => change(event.target.value) });
  const fill = (menu, options) => menu.replaceChildren(
    ...options.map(([value, text]) => element("option", { value }, text)));
  const filtered = (key, value) => {
    Object.assign(chosen, { [key]: value, most: PAGE });
    showResponses(list, chips);
  };
  const runs = select("run", chooseRun), sets = select("set", chooseSet);
  const steps = select("step", (step) => filtered("step", step));
  const search = element("input", { type: "search", placeholder: "search the text", "aria-label": "search",
    oninput: () => filtered("words", search.value) });
  function chooseSet(set) {
    Object.assign(chosen, { set, step: "" });
    const there = new Set(samplesOf().items.filter((item) => item.set === set).map((item) => item.step));
    fill(steps, [["", "all steps"], ...[...there].sort((a, b) => a - b).map((step) => [step, `step ${step}`])]);
    filtered("filter", Object.keys(FILTERS).find((name) => matching(name).length) ?? "all");
  }
  function chooseRun(run) {
    chosen.run = Number(run);
    const there = [...new Set(samplesOf().items.map((item) => item.set))];
    fill(sets, there.map((set) => [set, set]));
    sets.value = there.includes(chosen.set) ? chosen.set : there[0];
    said.textContent = `Chosen from ${samplesOf().read.join("; ")}.`;
    chooseSet(sets.value);
  }
  fill(runs, readable.map((run) => [data.runs.indexOf(run), run.name]));
  const bar = element("div.bar", several ? runs : null, sets, steps, search);
  place("responses").append(title("Responses"), bar, chips, said, list);
  chooseRun(runs.value);
}
