"""Foreign names and texts do not control the terminal.

Why: a tensor's name, a file's name or a library's error may hold escape sequences, which move the cursor,
hide lines or set a terminal's title, and characters that show a text in another order than it has. Not
covered: what C++ libraries and engines write to their own log files.
"""

import io
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from rpg_megatron.launcher.progress import append_to_log
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.terminal import one_line, print_error, printable
from tests.support.tiny_models import CONFIGS

HOSTILE = "a\x1b[2J\x9b31m\x07\x00\x7f\r\u202e\u2066\u200e\u2028\udc80"
SHOWN = r"a\x1b[2J\x9b31m\x07\x00\x7f\r\u202e\u2066\u200e\u2028\udc80"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
OURS = re.compile(r"\x1b\[[0-9;?]*[mhlKA]|\r")
"""What rich writes: colours, the cursor, and the start of a line."""

COMMANDS = """
import sys, warnings
from rpg_megatron.cli import main

for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit:
        pass
print(hostile)
print(hostile, file=sys.stderr)
warnings.warn(hostile)
sys.excepthook(RuntimeError, RuntimeError(hostile), None)
"""
DISPLAYS = """
from rich.live import Live
from rich.text import Text
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.doctor.probe import failed
from rpg_megatron.commands.doctor.table import print_checks
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.terminal import protect_streams

protect_streams()
print_checks([failed("name " + hostile, hostile, hostile)], table_console(), "n" + hostile)
console = PlainTextConsole(force_terminal=True, width=100)
with Live(Text("text " + hostile), console=console, auto_refresh=False) as live:
    print("within", hostile)
    console.print("[red]colour[/] " + hostile, soft_wrap=True)
    live.update(Text("later " + hostile), refresh=True)
"""
PROGRESS_BARS = """
import sys
from tqdm import tqdm
from rpg_megatron.system.terminal import protect_streams

protect_streams()
for _ in tqdm(range(2), desc="outer", ascii=True, file=sys.stderr):
    for _ in tqdm(range(2), desc=hostile, ascii=True, file=sys.stderr, leave=False):
        pass
"""


def run(code: str, *arguments: str) -> tuple[str, str]:
    """Standard output and error of a process that runs this code."""
    code = f"import json\nhostile = json.loads({json.dumps(json.dumps(HOSTILE))})\n{code}"
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, timeout=120, check=False)
    return process.stdout.decode(), process.stderr.decode()


def write_model(folder: Path) -> None:
    """A checkpoint with one tensor, whose name would draw a line of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    name = f"{HOSTILE[:-1]}\nwhole: all is well"
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def test_control_characters_are_escapes_and_other_text_stays() -> None:
    assert printable(HOSTILE) == SHOWN
    assert one_line("a\tb\n" + HOSTILE) == r"a\tb\n" + SHOWN
    for text in ("é 中 😀 👩\u200d👧 ﷽", "tab\tand\nline"):
        assert printable(text) == text


def test_text_between_colons_is_no_emoji() -> None:
    console = PlainTextConsole(file=io.StringIO(), width=80)
    table = Table()
    table.add_row("my_module:x: has no 'y'")
    console.print(table, "my_module:x:")
    assert console.file.getvalue().count("my_module:x:") == 2


def test_no_command_prints_what_others_wrote_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    commands = [
        ["convert", "inspect", str(tmp_path / "model")],
        ["config", f"{tmp_path}/\x1b[2J.yaml"],
        ["config", f"{tmp_path}/\udc9b.yaml"],
        ["grade", str(tmp_path / ("b" * 300))],
        ["report", str(tmp_path / ("b" * 300))],
        ["--\x1b[2J"],
    ]
    out, err = run(COMMANDS, json.dumps(commands))
    assert not UNSAFE.search(out + err), (out, err)
    lines = out.splitlines()
    assert lines[0].startswith(SHOWN.removesuffix(r"\udc80") + r"\nwhole: all is well  float32")
    assert [line for line in lines if line.strip().startswith("whole")] == [], "no line of the name's own"
    assert lines[-1] == SHOWN
    for message in (
        r"/\x1b[2J.yaml: no such config file",
        r"/\udc9b.yaml: no such config file",
        r"--\x1b[2J",
    ):
        assert message in err
    assert err.count(SHOWN) == 3, "printed, a warning, a traceback"
    assert len(re.findall(r"error: .*bbb.*File name too long", err)) == 2
    assert err.count("Traceback") <= 1


def test_tables_and_displays_keep_their_own_colours_only(tmp_path: Path) -> None:
    out, err = run(DISPLAYS)
    assert err == ""
    assert not UNSAFE.search(OURS.sub("", out)), out
    assert "\x1b[2J" not in out
    for name in ("name ", "text ", "later "):  # rich itself removes those of what is printed in between
        assert name + r"a\x1b" in out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b[31mcolour\x1b[0m" in out
    append_to_log(tmp_path / "log", HOSTILE)
    assert (tmp_path / "log").read_text().endswith(f"  {SHOWN}\n")


def test_progress_bars_are_drawn_in_their_place() -> None:
    _, err = run(PROGRESS_BARS)
    assert err.count("\router: ") == 2
    assert "\x1b[A" in err
    assert r"\x1b[2J" in err
    assert not UNSAFE.search(OURS.sub("", err)), err


def test_of_a_very_long_error_both_ends_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("error: begin " + "x" * 100_000 + " end")
    output = capsys.readouterr().err
    assert output.startswith("error: begin xxx")
    assert output.endswith("xxx end\n")
    assert "... 84,017 characters are left out ..." in output
    assert len(output) < 17_000
