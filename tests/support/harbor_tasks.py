"""Tasks of Harbor's format made by a script, of several kinds, and with planted faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CONFIG = """schema_version = "1.4"
[task]
name = "rpg/{name}"
[metadata]
difficulty = "easy"
[environment]
docker_image = "{image}"
cpus = 1
memory_mb = 256
storage_mb = 16
workdir = "/app"
[agent]
timeout_sec = {seconds}
[verifier]
timeout_sec = {test_seconds}
"""
CHECK = "#!/bin/bash\n{{ {condition}; }}\necho $(($? == 0)) > /logs/verifier/reward.txt\n"
AS_POLICY = "setpriv --reuid 1 --regid 1 --clear-groups"


def write_task(
    folder: Path,
    name: str,
    *,
    condition: str = "",
    test: str = "",
    solve: str,
    instruction: str = "Do it.",
    image: str = "shell",
    seconds: float = 20,
    test_seconds: float = 20,
    config: str = CONFIG,
) -> Path:
    """A task; its tests are a condition of the shell, or a script."""
    place = folder / name
    files: Mapping[str, str] = {
        "task.toml": config.format(name=name, image=image, seconds=seconds, test_seconds=test_seconds),
        "instruction.md": instruction,
        "tests/test.sh": test or CHECK.format(condition=condition),
        "solution/solve.sh": f"#!/bin/bash\n{solve}\n",
    }
    for file, text in files.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    return place


def write_tasks(folder: Path, images: Mapping[str, Path], *, network: int = 0) -> dict[str, str]:
    """Thirty tasks; what is wrong with each by name, empty if nothing is. network: port of a server here.

    images: of the names "shell" and "python".
    """
    said: dict[str, str] = {}

    def task(name: str, wrong: str = "", **fields: object) -> None:
        write_task(folder, name, **fields)  # type: ignore[arg-type]
        said[name] = wrong

    for n in range(8):
        task(f"write-{n}", condition=f'[ "$(cat /app/out)" = {n * 7} ]', solve=f"echo {n * 7} > /app/out",
             instruction=f"Write {n * 7} to /app/out.")  # fmt: skip
    for n in range(4):
        task(f"sort-{n}", condition="[ \"$(cat /app/sorted | tr '\\n' ' ')\" = '1 2 3 ' ]",
             solve="printf '3\\n1\\n2\\n' | sort > sorted")  # fmt: skip
    for n in range(4):
        task(f"python-{n}", image="python", solve=f"echo 'def f(x): return x + {n}' > /app/answer.py",
             test=f'#!/bin/bash\npython3 - <<END\nimport subprocess, json\n'
             f'run = subprocess.run({AS_POLICY.split()} + ["env", "PYTHONPATH=/app", "python3", "-c", '
             f'"import answer; print(answer.f(5))"], '
             f'cwd="/app", capture_output=True, text=True)\n'
             f'said = float(run.stdout.strip() == "{5 + n}")\n'
             'json.dump({"reward": said}, open("/logs/verifier/reward.json", "w"))\nEND\n',
             )  # fmt: skip
    for n in range(3):
        task(f"program-{n}", condition=f'[ "$({AS_POLICY} /app/program {n})" = "{n} {n}" ]',
             solve="printf '#!/bin/bash\\necho $1 $1\\n' > program; chmod +x program")  # fmt: skip
    task("move", condition="[ -f /srv/b ] && [ ! -e /app/a ]", solve="mkdir -p /srv; echo x > a; mv a /srv/b")
    task("delete", condition="[ ! -e /home ]", solve="rmdir /home")
    task("two-files", condition="[ \"$(cat /app/a)\" = \"$(cat /app/b)\" ] && [ -s /app/a ]",
         solve="echo x | dd of=a 2> /dev/null; cp a b")  # fmt: skip
    wrong = "passes without a solution"
    task("bad-passes", wrong, condition="true", solve="true")
    task("bad-passes-2", wrong, condition="[ -d /app ]", solve="echo 1 > /app/x")
    wrong = "solution fails"
    task("bad-solution", wrong, condition="[ -f /app/right ]", solve="touch /app/wrong")
    task("bad-no-reward", wrong, test="#!/bin/bash\nexit 1\n", solve="touch x")
    wrong = "needs a network"
    for n in range(2):
        task(f"bad-network-{n}", wrong, condition='[ "$(cat /app/got)" = hello ]',
             solve=f"exec 3<>/dev/tcp/127.0.0.1/{network} && head -n 1 <&3 > got")  # fmt: skip
    wrong = "never ends"
    task("bad-endless-solution", wrong, condition="[ -f /app/x ]", solve="sleep 1000; touch x", seconds=2)
    task("bad-endless-tests", wrong, test="[ -f /app/x ] && sleep 1000\necho 0 > /logs/verifier/reward.txt",
         solve="touch x", test_seconds=2)  # fmt: skip
    (folder / "images.json").write_text(json.dumps({name: str(path) for name, path in images.items()}))
    return said
