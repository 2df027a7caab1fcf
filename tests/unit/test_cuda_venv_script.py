"""tools/build_cuda_venv.sh keeps the wheel that it compiles, for an environment that is built again.

Why: compiling Transformer Engine's torch extension takes an hour. The script is real, with a stand-in for
Python. Not covered: pip, the compiler, and that the environment works (make test-cuda).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$3" = wheel ]; then
    while [ "$1" != --wheel-dir ]; do shift; done
    mkdir -p "$2"
    touch "$2/half.tmp"
    [ -z "$FAILS" ] || exit 1
    touch "$2/transformer_engine_torch-1-cp312.whl"
fi
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the script is for x86_64")
def test_the_compiled_wheel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tools/build_cuda_venv.sh", "requirements/gpu.txt", "requirements/te-torch.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    for name, text in {"python": PYTHON, "cc": "#!/bin/sh\n", "c++": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "tools/find_python.sh").write_text(f"echo {programs}/python\n")
    (programs / "df").write_text("#!/bin/sh\nprintf 'head\\\n- - - 99999999\\\n'\n")
    (programs / "df").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(calls))

    def build(fails: str = "") -> tuple[int, list[str]]:
        """Exit code, and what pip did, in a new environment."""
        shutil.rmtree(tmp_path / ".venv-cuda", ignore_errors=True)
        calls.write_text("")
        monkeypatch.setenv("FAILS", fails)
        script = ["sh", "tools/build_cuda_venv.sh"]
        code = subprocess.run(script, cwd=tmp_path, capture_output=True, check=False).returncode
        of_pip = [line.split()[2:] for line in calls.read_text().splitlines() if line.startswith("-m pip")]
        wheels = [word for words in of_pip for word in words if word.endswith(".whl")]
        return code, [words[0] for words in of_pip] + wheels

    assert build("yes") == (1, ["install", "wheel"])
    code, done = build()
    assert (code, done[:4]) == (0, ["install", "wheel", "install", "install"])
    assert (tmp_path / ".venv-cuda" / ".complete").exists()
    (wheel,) = done[4:]
    assert (tmp_path / wheel).is_file()
    assert build() == (0, ["install", "install", "install", wheel])  # not compiled again
    with (tmp_path / "requirements/gpu.txt").open("a") as lock:
        lock.write("torch==99\n")  # another torch, another wheel
    assert build()[1][:2] == ["install", "wheel"]
