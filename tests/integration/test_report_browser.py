"""The report in a real browser: it draws, without an error on the console, and does what its controls say.

Why: a page that is only looked at as text can be blank. Chromium opens files as a reader would; runs of 400
steps are written by training's own writers. Skipped where there is no Chromium. Not covered: other browsers,
and whether it looks good, which only a person can judge; what the data say (tests/unit/test_report).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.commands.report.render import write_report
from rpg_megatron.launcher.run_dir import hold_folder
from tests.support.browser import Browser, find_chromium
from tests.support.launcher import wait_for
from tests.support.report_runs import HOSTILE, make_run, make_study

chromium = find_chromium()
pytestmark = pytest.mark.skipif(chromium is None, reason="no Chromium on this machine")

STEPS = 400
CHART = "view.charts.find((chart) => chart.spec?.title === '{}')"
LINES = CHART + ".lines.filter((line) => line.told && !line.fewer).length"
TICKS = CHART + ".plot.axes[1]._values"
"""Texts of the axis, of which uPlot draws the pixels."""
COLORED = """[...document.querySelectorAll('{} canvas')].map((canvas) => {{
  const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let colored = 0;
  for (let i = 0; i < data.length; i += 4) {{
    const [least, largest] = [Math.min(...data.slice(i, i + 3)), Math.max(...data.slice(i, i + 3))];
    colored += data[i + 3] > 60 && largest - least > 40;
  }}
  return colored;
}})"""
"""Number of pixels of a line or an area, of each chart there; axes are grey."""
READOUTS = "[...document.querySelectorAll('figure output')].map((e) => e.textContent)"


DESKTOP, PHONE = (1280, 860, False), (390, 844, True)
"""Width, height, dark mode."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert chromium is not None
    with Browser(chromium) as started:
        yield started


@pytest.fixture(autouse=True)
def clean_console(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave an error on the console."""
    browser = request.getfixturevalue("browser")
    browser.problems.clear()
    yield
    assert browser.problems == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten runs of 400 steps, the third unfinished; from the fourth on copies, since writing takes seconds."""
    folder = tmp_path_factory.mktemp("runs")
    folders = [
        make_run(folder / "a-000", seed=0, text=HOSTILE),
        make_run(folder / "a-001", seed=1),
        make_run(folder / "a-002", seed=2, steps=230, planned=STEPS),
    ]
    for number in range(3, 10):
        folders.append(folder / f"a-{number:03d}")
        shutil.copytree(folders[number % 2], folders[number], ignore=shutil.ignore_patterns("tensorboard"))
    return folders


@pytest.mark.parametrize(
    ("number", "width", "height", "dark"),
    [
        (1, *PHONE),
        (10, *DESKTOP),
        *(pytest.param(number, *PHONE, marks=pytest.mark.long) for number in (3, 10)),
        *(pytest.param(number, *DESKTOP, marks=pytest.mark.long) for number in (1, 3)),
    ],
)
def test_it_draws_every_chart(
    browser: Browser, runs: list[Path], tmp_path: Path, number: int, width: int, height: int, dark: bool
) -> None:
    file = write_report(runs[:number], tmp_path / "report.html")
    assert file.stat().st_size < 10_000_000
    seconds = browser.open(file, width=width, height=height, dark=dark)
    print(f"{number} runs: {file.stat().st_size / 1e6:.1f} MB, open after {seconds:.2f} s")
    for chart in ("Held-out accuracy", "Training reward", "Entropy", "Gradient norm", "Memory"):
        assert browser.run(LINES.format(chart)) == number, chart
    areas = "view.charts.filter((chart) => chart.spec?.stack).flatMap((chart) => chart.lines).length"
    assert browser.run(areas) == 6 * number
    assert browser.run("document.querySelectorAll('figure.timeline').length") == number
    shown = "document.querySelectorAll('figure.timeline {}').length"
    assert browser.run(shown.format("rect")) == 6 * 4 * number  # steps, phases
    assert browser.run(shown.format("path.phase0")) == 2 * number  # engines
    assert browser.run(LINES.format("Age of the batch")) == (1 if number > 3 else 2) * number
    assert browser.run(LINES.format("Correction ratio")) == (1 if number > 3 else 2) * number
    drawn = browser.run(COLORED.format("#charts > .grid"))
    assert len(drawn) >= 30
    # Where ten runs are equal, the last one hides the others, and its color is grey.
    assert sum(count > 20 for count in drawn) >= (len(drawn) if number < 10 else 0.7 * len(drawn))
    cut = (
        "[...document.querySelectorAll('figcaption h3')].filter((e) => e.scrollWidth > e.clientWidth).length"
    )
    assert browser.run(cut) == 0, "titles are not cut"
    assert browser.run("document.querySelectorAll('article').length") > 0
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    if number == 1:
        bar = "document.getElementById('tools')"
        assert browser.run(f"{bar}.scrollWidth - {bar}.clientWidth") == 0, "its controls are out of sight"
    assert browser.run("window.hacked") is None
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def test_the_timeline_tells_who_waited(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"))
    caption = browser.run("document.querySelector('figure.timeline .under').textContent")
    assert caption.startswith("Of 4 min 0 s the trainer spent 45.0% in collect")
    assert "2.5% in sync. The engines had no running request in 55.0%" in caption
    left, top, width = browser.run(
        "(() => { const svg = document.querySelector('figure.timeline .lane svg'); svg.scrollIntoView({block:"
        " 'center'}); const b = svg.getBoundingClientRect(); return [b.left, b.top, b.width]; })()"
    )
    browser.mouse("mouseMoved", left + width * 50 / 240, top + 40)  # 10 s into the second step
    rows = browser.run(
        "[...document.querySelectorAll('#tooltip tr')].map((e) => e.textContent).filter(Boolean)"
    )
    assert rows == [f"collect, step {STEPS - 4}18 s", "engine 0100", "engine 1101"]


def test_segments_of_a_response_are_marked(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"))
    browser.run(
        "(() => { const s = document.querySelector('[aria-label=set]'); s.value = 'training';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    bars = browser.run(
        "[...document.querySelectorAll('.response:has(.segments)')].map((r) =>"
        " [r.querySelector('.facts').textContent,"
        " [...r.querySelectorAll('.segments span')].map((e) => e.title)])"
    )
    assert bars
    for facts, parts in bars:
        step, tokens = re.match(r"step (\d+) · (\d+) tokens", facts).groups()  # type: ignore[union-attr]
        older, newer = int(tokens) // 3, int(tokens) - int(tokens) // 3
        assert parts == [
            f"{older} tokens of weights {int(step) - 2}",
            f"{newer} tokens of weights {int(step) - 1}",
        ]


def test_it_says_the_numbers_that_the_terminal_said(
    browser: Browser, runs: list[Path], tmp_path: Path
) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"))
    shares = [0.3525, 0.3575, 0.3545, 0.92, 0.12345, 0.4975, 1.0, *(n / 800 for n in range(8, 801, 7))]
    shown = browser.run(f"{shares}.map((share) => formatValue(share, 'percent'))")
    assert shown == [f"{share:.1%}" for share in shares]
    ends = [(0.36, 0.7525), (0.3525, 0.745), (0.125, 0.1875)]
    differences = browser.run(
        f"{[list(pair) for pair in ends]}"
        ".map(([before, after]) => difference({name: 'a/avg@1', before, after, margin: null}))"
    )
    assert differences == [f"{100 * (after - before):+.1f} points" for before, after in ends]
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    rates = [row["throughput/tokens_per_second"] for row in rows if row["step"]]
    facts = browser.run("document.querySelector('.facts').textContent")
    assert f" {sum(rates) / len(rates) / 1000:.1f} k tokens/s" in facts


def test_last_and_best_evaluations_are_side_by_side(
    browser: Browser, runs: list[Path], tmp_path: Path
) -> None:
    text = "document.querySelector('{}').textContent"
    browser.open(write_report(runs[:1], tmp_path / "one.html"))
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["eval/aime24/avg@4"] for row in rows if "eval/aime24/avg@4" in row}
    step = max(scores, key=lambda number: scores[number])
    assert re.search(
        rf"best {100 * scores[step]:.1f}% \(step {step}\)", browser.run(text.format(".panel .under"))
    )
    browser.open(write_report(runs[:2], tmp_path / "two.html"))
    table = browser.run(text.format("table.evaluations"))
    assert table.startswith("held-out accuracyaime24/avg@4lastbest")
    assert f"{100 * scores[max(scores)]:.1f}%{100 * scores[step]:.1f}%" in table


def test_headings_ticks_and_margins_tell_things_apart(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "b-001", steps=20, rollouts_every=10, evaluate_every=10)
    file = run / "metrics.jsonl"
    rows = [json.loads(line) | {"lr": 1e-4} for line in file.read_text().splitlines()]
    rows = [row | {"memory/peak_bytes": (1.0247 + row["step"] * 5e-5) * 2**30} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(write_report([run], tmp_path / "report.html"))
    headings = browser.run("[...document.querySelectorAll('h2')].map((e) => e.textContent)")
    assert len(set(headings)) == len(headings)
    cells = "[...document.querySelectorAll('table.plain tr')].map((row) => row.cells.length)"
    assert set(browser.run(cells)) == {3}, "lines of rows end at the same place"
    ticks = browser.run(TICKS.format("Learning rate"))
    assert len(set(ticks)) == len(ticks) > 2
    assert "1.02500 GiB" in browser.run(TICKS.format("Memory"))
    axis = CHART.format("Memory") + ".plot.axes[1]"
    drawn = f"(() => {{ const c = document.createElement('canvas').getContext('2d'); c.font = {axis}.font[0];"
    needed = browser.run(drawn + " return c.measureText('1.02500 GiB').width; })()")
    assert browser.run(f"{axis}._size") >= needed + 6 > 40, "labels are not cut"
    assert browser.run(LINES.format("Groups without signal")) == 3
    big = browser.run("document.querySelector('.big').textContent")
    assert re.fullmatch(r"[\d.]+% ± [\d.]+ → [\d.]+% ± [\d.]+", " ".join(big.split())), big


def test_hostile_text_is_shown_as_text(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"))
    browser.run(
        "(() => { const s = document.querySelector('[aria-label=set]'); s.value = 'training';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    texts = browser.run("[...document.querySelectorAll('article .response pre')].map((e) => e.textContent)")
    assert texts
    assert all(text.startswith(HOSTILE) for text in texts)
    assert browser.run("document.querySelectorAll('article img, article script').length") == 0
    assert browser.run("window.hacked") is None


def test_nothing_is_fetched(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"))
    assert browser.run("performance.getEntriesByType('resource').map((e) => e.name)") == []


def test_pointer_zoom_legend_and_smoothing(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:3], tmp_path / "report.html"))
    left, top, width, height = browser.run(
        "(() => { const over = document.querySelector('[data-chart=Entropy] .u-over');"
        " over.scrollIntoView({block: 'center'}); const b = over.getBoundingClientRect();"
        " return [b.x, b.y, b.width, b.height]; })()"
    )
    middle, y = left + width / 2, top + height / 2
    browser.mouse("mouseMoved", middle, y)
    tooltip = browser.run("document.getElementById('tooltip').textContent")
    step = int(re.match(r"step (\d+)", tooltip)[1])  # type: ignore[index]
    assert step == pytest.approx(STEPS / 2, abs=2)
    rows = browser.run("document.querySelectorAll('#tooltip td:first-child').length")
    assert rows == 3, "a value of each run"
    readouts = [text for text in browser.run(READOUTS) if text]
    assert len(readouts) > 15, "the run that is pointed at is told in all charts"
    cursors = (
        "view.charts.filter((chart) => chart.plot).map(({ plot }) => plot.posToVal(plot.cursor.left, 'x'))"
    )
    assert browser.run(cursors) == pytest.approx([step] * browser.run(f"{cursors}.length"), abs=0.5)

    browser.mouse("mousePressed", middle, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", middle + 60, y, button="left", buttons=1)
    browser.mouse("mouseReleased", middle + 60, y, button="left", clickCount=1)
    assert browser.run("view.to - view.from") == pytest.approx(60 / width * STEPS, abs=3)
    assert browser.run("document.querySelector('[aria-label=\"first step\"]').value") == str(
        browser.run("view.from")
    )
    ranges = "view.charts.filter((c) => c.plot).map((c) => [c.plot.scales.x.min, c.plot.scales.x.max])"
    assert {tuple(each) for each in browser.run(ranges)} == {tuple(browser.run("[view.from, view.to]"))}
    for kind in ("mousePressed", "mouseReleased") * 2:
        browser.mouse(kind, middle, y, button="left", clickCount=2)
    assert browser.run("view.from") is None, "a double click shows all steps"
    browser.run("zoom(100, 200)")
    browser.run(
        "[...document.querySelectorAll('#tools button')].find((b) => b.textContent == 'whole run').click()"
    )
    assert browser.run("view.from") is None

    browser.run("document.querySelector('.legend button').click()")
    assert browser.run(LINES.format("Entropy")) == 2
    assert browser.run("document.querySelectorAll('figure.stack:not([hidden])').length") == 2
    browser.run("document.querySelector('.legend .all').click()")
    assert browser.run(LINES.format("Entropy")) == 3

    moves = itertools.cycle((2, 6))

    def has_left() -> bool:  # of several events, a busy browser may pass on the last one alone
        browser.mouse("mouseMoved", middle, y)  # the legend has drawn the chart again, which must see it come
        browser.mouse("mouseMoved", next(moves), 2)
        return browser.run("view.cursor") is None

    wait_for(has_left)  # the chart gets the event that the pointer has left it
    browser.run("document.querySelector('[data-chart=Entropy]').focus()")
    for kind in ("keyDown", "keyUp", "keyDown"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight")
    assert browser.run("view.cursor") == 1, "from step 0 on"

    measured = "view.charts.flatMap((chart) => chart.lines ?? []).filter((line) => !line.told).length"
    assert browser.run(measured) > 0
    browser.run(
        "(() => { const s = document.querySelector('[type=range]'); s.value = 0;"
        " s.dispatchEvent(new Event('input')); })()"
    )
    areas = "view.charts.filter((chart) => chart.spec?.stack).flatMap((chart) => chart.lines).length"
    assert browser.run(f"{measured} - {areas}") == 0


def test_responses_can_be_filtered(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[1:2], tmp_path / "report.html"))

    def choose(name: str) -> list[list[str]]:
        browser.run(
            "[...document.querySelectorAll('.chips button')]"
            f".find((b) => b.textContent.startsWith('{name}')).click()"
        )
        return browser.run(
            "[...document.querySelectorAll('article')].map((a) =>"
            " [...a.querySelectorAll('.response .badge')].map((b) => b.textContent))"
        )

    pairs = choose("Learnt")
    assert all(verdicts == ["wrong", "correct"] for verdicts in pairs)
    # Of a pair of which the page has no room for one, the other says nothing.
    pairs_shown = "cardsOf('learnt').length"
    before = browser.run(pairs_shown)
    browser.run("delete matching('learnt')[0].change")
    assert browser.run(pairs_shown) == before - 1
    assert all(verdicts == ["correct"] for verdicts in choose("Best"))
    assert all(verdicts == ["wrong"] for verdicts in choose("Worst"))
    choose("Longest")
    facts = browser.run("[...document.querySelectorAll('.response .facts')].map((e) => e.textContent)")
    lengths = [int(re.search(r"(\d+) token", text)[1]) for text in facts]
    assert lengths == sorted(lengths, reverse=True)
    browser.run(
        "(() => { const s = document.querySelector('[type=search]'); s.value = 'no such words';"
        " s.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run("document.querySelectorAll('article').length") == 0


def test_a_run_without_a_step_and_one_with_nan(browser: Browser, tmp_path: Path) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    for folder in (empty, odd):
        folder.mkdir()
        (folder / "config.yaml").write_text("training: {steps: 9}\n")
    (odd / "metrics.jsonl").write_text(
        '{"step": 1, "policy/loss": 1.0, "mismatch/logp_max": 0.0}\n'
        '{"step": 2, "policy/loss": NaN}\n{"step": 3, "pol'
    )
    browser.open(write_report([empty]))
    assert "no step in metrics.jsonl" in browser.run("document.body.innerText")
    browser.open(write_report([odd, empty], tmp_path / "both.html"))
    assert browser.run("document.querySelectorAll('[data-chart=Loss] .odd').length") == 1


def test_a_study_shows_arms(browser: Browser, tmp_path: Path) -> None:
    folders = make_study(tmp_path / "study", [1e-6, 2e-6], seeds=3, steps=40)
    page = write_report([tmp_path / "study"])
    browser.open(page)
    assert browser.run("document.querySelector('h1').textContent") == "2 arms, 6 runs"
    cells = "[...document.querySelectorAll('{} tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    slow, fast = browser.run(cells.format("table.arms"))
    assert (slow[0].strip(), slow[1], slow[-1]) == ("lr 1e-06", "3", "40")
    assert (fast[0].strip(), fast[1], fast[-1]) == ("lr 2e-06", "3 (1 not finished)", "20\N{EN DASH}40")
    assert re.fullmatch(r"[\d.]+% ± [\d.]+", slow[2])
    (pair,) = browser.run(cells.format("table.pairs"))
    assert pair[4] == "3 pairs"
    assert pair[5].endswith("steps 20\N{EN DASH}40")

    for name in ("Held-out accuracy", "Training reward", "Entropy"):
        parts = CHART.format(name) + ".lines.filter((line) => line.{}).length"
        drawn = [browser.run(parts.format(part)) for part in ("band", "seed", "fewer")]
        assert (browser.run(LINES.format(name)), drawn) == (2, [4, 6, 1]), name
        assert browser.run(CHART.format(name) + ".plot.bands.length") == 2
    # The curves and bands, from the files and by numpy.
    key = "eval/aime24/avg@4"
    rows = [list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines())) for run in folders[3:]]
    values = [{row["step"]: row[key] for row in of_run if key in row} for of_run in rows]
    series = "(({steps, smooth, bands, counts}) => ({steps, smooth, bands, counts}))"
    found = browser.run(f"{series}(seriesOf(view.runs[1], '{key}'))")
    assert found["steps"] == list(range(0, 41, 4))
    assert found["counts"] == [3] * 6 + [2] * 5
    for step, mean, band in zip(found["steps"], found["smooth"], found["bands"], strict=True):
        there = [run[step] for run in values if step in run]
        middle, half = np.mean(there), 4.302653 * np.std(there, ddof=1) / len(there) ** 0.5
        assert mean == pytest.approx(middle, abs=1e-4)
        expected = (middle - half, middle + half) if len(there) > 2 else (min(there), max(there))
        assert band == pytest.approx(expected, abs=1e-4)

    browser.run("document.querySelector('#tools [type=checkbox]').click()")
    seeds = "view.charts.flatMap((chart) => chart.lines ?? []).filter((line) => line.seed).length"
    assert browser.run(seeds) == 0
    browser.run("document.querySelector('.legend button').click()")
    assert browser.run(LINES.format("Entropy")) == 1
    browser.run("document.querySelectorAll('details.each').forEach((part) => { part.open = true; })")
    shown = "document.querySelectorAll('figure.{}:not([hidden])').length"
    assert [browser.run(shown.format(kind)) for kind in ("stack", "timeline")] == [3, 3]
    for width, height, dark in (DESKTOP, PHONE):
        browser.open(page, width=width, height=height, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") <= width, "wider than the window"


def test_it_prints(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    browser.open(write_report(runs[:1], tmp_path / "report.html"), dark=True)
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000


HELD_TIMERS = "window.timers = []; window.setInterval = (call, wait) => window.timers.push([call, wait]);"


def test_a_watched_page_loads_new_steps_and_keeps_the_view(browser: Browser, tmp_path: Path) -> None:
    """By the command, while the run's lock is held as by a launcher; the test drives the browser's timers."""
    run = make_run(tmp_path / "runs" / "b-001", steps=40, planned=90, rollouts_every=20, evaluate_every=20)
    rows = (run / "metrics.jsonl").read_text()
    lock = hold_folder(run)
    assert lock is not None
    page, log = run / "report.html", tmp_path / "log"
    command = [sys.executable, "-m", "rpg_megatron.cli", "report", str(run), "--watch"]
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=HELD_TIMERS)["identifier"]
    try:
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as watch:
            try:
                wait_for(page.exists)
                browser.open(page)
                assert browser.run("view.runs[0].step.length") == 41
                assert browser.run("timers.map(([, wait]) => wait)") == [10_000]
                browser.run(
                    "(() => { zoom(5, 30); const slider = document.querySelector('[aria-label=smoothing]');"
                    " slider.value = 0.5; slider.dispatchEvent(new Event('input')); })()"
                )
                before = page.stat().st_ino
                row = json.loads(rows.splitlines()[-1]) | {"step": 41}
                (run / "metrics.jsonl").write_text(rows + json.dumps(row) + "\n")
                wait_for(lambda: page.stat().st_ino != before)
                assert watch.poll() is None
                browser.run("void setTimeout(timers[0][0])")
                browser.wait_for_event("Page.loadEventFired")
                assert browser.run("view.runs[0].step.length") == 42
                assert browser.run("[view.from, view.to, view.smoothing]") == [5, 30, 0.5]
                lock.close()
                assert watch.wait(60) == 0
            finally:
                watch.kill()
        assert log.read_text() == f"{page}\n"
        browser.open(page)
        assert browser.run("[data.refresh, timers.length]") == [None, 0]
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
