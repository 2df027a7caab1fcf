// Held-out accuracies of several runs, as papers print them: the last and the best evaluation of each set.

const bestText = ({ best }) => best
  ? `best ${formatValue(best[1], "percent")} (step ${best[0].toLocaleString("en")})` : "";

function evaluationTable(runs, nameOf) {
  const sets = [...new Set(runs.flatMap((run) => run.changes.filter((one) => one.best).map((one) => one.name)))];
  if (!sets.length) return null;
  const cells = (run, name) => {
    const change = run.changes.find((one) => one.name === name);
    if (!change) return [element("td", {}, "–"), element("td", {}, "–")];
    const [step, value] = change.best;
    return [element("td", {}, formatValue(change.after, "percent")),
      element("td", { title: `step ${step}` }, formatValue(value, "percent"))];
  };
  return element("div", { class: "scroll" }, element("table", { class: "runs evaluations" },
    element("thead", {},
      element("tr", {}, element("th", {}, "held-out accuracy"), sets.map((name) => element("th", { colspan: 2 }, name))),
      element("tr", {}, element("th", {}), sets.map(() => [element("th", {}, "last"), element("th", {}, "best")]))),
    element("tbody", {}, runs.map((run) => element("tr", {},
      element("th", { scope: "row" }, nameOf(run)), sets.map((name) => cells(run, name)))))));
}
