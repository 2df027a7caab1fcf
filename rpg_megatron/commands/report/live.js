// While a run goes, `report --watch` writes the file again. The page loads it now and then, and keeps in the
// address what the reader has chosen: range of steps, smoothing, hidden runs, place on the page.

function rememberChoices() {
  const chosen = new URLSearchParams({ smoothing: view.smoothing, y: Math.round(window.scrollY) });
  if (view.from !== null) chosen.set("from", view.from);
  if (view.to !== null) chosen.set("to", view.to);
  if (data.study) chosen.set("seeds", Number(view.seeds));
  view.hidden.forEach((run) => chosen.append("hidden", run.name));
  window.location.replace(`#${chosen}`);
}

function restoreChoices() {
  const chosen = new URLSearchParams(window.location.hash.slice(1));
  const number = (key) => (chosen.has(key) && Number.isFinite(Number(chosen.get(key)))
    ? Number(chosen.get(key)) : null);
  const slider = document.querySelector("[aria-label=smoothing]");
  if (slider && number("smoothing") !== null) {
    slider.value = number("smoothing");
    slider.dispatchEvent(new Event("input"));
  }
  const hidden = new Set(chosen.getAll("hidden"));
  const seeds = document.querySelector("#tools input[type=checkbox]");
  if (seeds && number("seeds") !== null && seeds.checked !== Boolean(number("seeds"))) seeds.click();
  const runs = view.runs.filter((run) => hidden.has(run.name));
  if (several && runs.length) legendChanged(() => runs.forEach((run) => view.hidden.add(run)));
  if (number("from") !== null || number("to") !== null) zoom(number("from"), number("to"));
  if (number("y") !== null) window.scrollTo(0, number("y"));
}

if (data.refresh) {
  restoreChoices();
  window.setInterval(() => {
    const reading = document.hidden || String(window.getSelection()) || !tooltip.hidden;
    if (reading) return;
    rememberChoices();
    window.location.reload();
  }, 1000 * data.refresh);
}
