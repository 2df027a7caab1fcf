// While a run goes, `report --watch` writes the file again. The page loads it now and then, and keeps in the
// address what the reader has chosen: range of steps, smoothing, hidden runs, place on the page.

function rememberChoices() {
  const { smoothing, from, to, seeds } = view, hidden = [...view.hidden].map((run) => run.name);
  const kept = { smoothing, from, to, seeds: Number(seeds), y: Math.round(window.scrollY), hidden };
  window.location.replace(`#${encodeURIComponent(JSON.stringify(kept))}`);
}

// Before the page is built. Anybody can write an address.
function restoreChoices() {
  try {
    const kept = JSON.parse(decodeURIComponent(window.location.hash.slice(1)));
    const numbers = ["smoothing", "from", "to", "seeds", "y"].filter((key) => Number.isFinite(kept[key]));
    numbers.forEach((key) => { view[key] = kept[key]; });
    view.hidden = new Set(view.runs.filter((run) => kept.hidden?.includes?.(run.name)));
  } catch { /* nothing was kept */ }
}

if (data.refresh) {
  if (view.y) window.scrollTo(0, view.y);
  window.setInterval(() => {
    if (document.hidden || String(window.getSelection()) || !tooltip.hidden) return;  // somebody is reading
    rememberChoices();
    window.location.reload();
  }, 1000 * data.refresh);
}
