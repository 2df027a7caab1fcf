"""Models by their id on the Hugging Face hub: the real client against a hub on loopback.

Why: users of other frameworks write ``Qwen/Qwen3-4B-Base``. Without a network, the cache must suffice, or one
message says what to do. Not covered: the real hub.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.runs import QUICKSTART as QUICKSTART_FILE

COMMIT = "1" * 40
QUICKSTART = QUICKSTART_FILE.with_suffix("")
MODEL = QUICKSTART / "model"


class Hub(BaseHTTPRequestHandler):
    """One public model, tiny/adder, and one whose conditions nobody has accepted."""

    wanted: list[str]

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if path.startswith("/api/models/gated/"):
            self._fail(403, "GatedRepo")
        elif not path.startswith(("/api/models/tiny/adder/", "/tiny/adder/")):
            self._fail(401, "RepoNotFound")
        elif path.startswith("/api/models/tiny/adder/revision/"):
            if path.endswith("/v9"):
                self._fail(404, "RevisionNotFound")
            else:
                self._send(json.dumps({"id": "tiny/adder", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith("/api/models/tiny/adder/tree/"):
            sizes = [(file.name, file.stat().st_size) for file in MODEL.iterdir()]
            sizes += [("original/config.json", 3), ("pytorch_model.bin", 3)]
            rows = [{"type": "file", "path": name, "size": size, "oid": "a"} for name, size in sizes]
            self._send(json.dumps(rows).encode())
        else:
            name = path.rpartition("/")[2]
            if self.command == "GET":
                self.wanted.append(name)
            self._send((MODEL / name).read_bytes())

    do_HEAD = do_GET

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.wanted = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(cache: Path, hub: str, *code: str, **variables: str) -> list[str]:
    """Output of a Python process with this hub and this cache."""
    environment = (
        os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"} | variables
    )
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


FIND = """
from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.config import UserError, load_settings

def find(*overrides, **options):
    try:
        print(with_local_model(load_settings(CONFIG, list(overrides)), **options).model.path)
    except UserError as e:
        print(e)
"""


def test_a_model_by_its_name_on_the_hub(hub: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: tiny/adder}}\ndata: {{path: {QUICKSTART / 'train.jsonl'}}}\n")
    cache = tmp_path / "cache"
    start = ("from pathlib import Path", f"CONFIG = Path({str(config)!r})", FIND)
    offline = {"HF_HUB_OFFLINE": "1"}

    (missing,) = run(cache, hub, *start, "find()", **offline)
    assert missing.startswith(
        "model.path: tiny/adder is not a folder, and the hub's cache does not contain it"
    )
    assert (
        "HF_HUB_OFFLINE is set; download it on a machine with network access (hf download tiny/adder)"
        in missing
    )

    folder, *errors = run(
        cache,
        hub,
        *start,
        "find(weights=False)",
        "find('model.revision=v9')",
        "find('model.path=tiny/ader')",
        "find('model.path=gated/adder')",
    )
    assert Path(folder).name == COMMIT
    assert "config.json" in Hub.wanted
    assert not [name for name in Hub.wanted if name.endswith(("safetensors", "bin"))]
    assert (
        errors[0]
        == "model.revision: tiny/adder has no revision 'v9' on the hub; give a branch, tag or commit"
    )
    assert "tiny/ader is not a folder, and the hub has no visible model of this name" in errors[1]
    assert "gated/adder is not a folder, and you must accept its conditions" in errors[2]

    (partial,) = run(cache, hub, *start, "find()", **offline)
    assert "the hub's cache has only some of its files" in partial

    check = "from rpg_megatron.launcher.preflight import check_model"
    output = run(cache, hub, *start, "find()", check, f"print(check_model(Path({folder!r})).family)")
    assert output == [folder, "qwen3"]
    assert "model.safetensors" in Hub.wanted
    assert "pytorch_model.bin" not in Hub.wanted

    assert run(cache, hub, *start, "find()", **offline) == [folder]
    assert run(cache, "http://127.0.0.1:9", *start, "find()") == [folder]  # nobody listens there


def test_a_folder_of_this_name_comes_first(tmp_path: Path) -> None:
    """Relative to the file, or to the working directory in an override; the hub is not asked."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "adder").symlink_to(MODEL)
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: tiny/adder}}\ndata: {{path: {QUICKSTART / 'train.jsonl'}}}\n")
    start = ("import os", "from pathlib import Path", f"CONFIG = Path({str(config)!r})", FIND)
    move = f"os.chdir({str(tmp_path)!r})"
    output = run(
        tmp_path / "c", "http://127.0.0.1:9", *start, "find()", move, "find('model.path=tiny/adder')"
    )
    assert output == [str(tmp_path / "tiny" / "adder"), "tiny/adder"]
