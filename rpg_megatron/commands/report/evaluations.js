// Held-out accuracies of several runs, as papers print them: the last and the best evaluation of each set.

const bestText = ({ best }) => best
  ? `best ${formatValue(best[1], "percent")} (step ${best[0].toLocaleString("en")})` : "";

function evaluationTable(runs, nameOf) {
  const sets = [...new Set(runs.flatMap((run) => run.changes.filter((one) => one.best).map((one) => one.name)))];
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
  runs.map((run) => element("tr", element("th", { scope: "row" }, nameOf(run)), sets.map((name) => values(run, name)))));
}
