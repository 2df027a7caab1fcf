"""Images made of this machine's own programs: folders, .sif files and OCI layouts. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

SHELL = [
    "sh",
    "bash",
    "cat",
    "ls",
    "mkdir",
    "rmdir",
    "rm",
    "cp",
    "mv",
    "ln",
    "chmod",
    "touch",
    "sleep",
    "env",
    "id",
    "head",
    "tail",
    "wc",
    "sort",
    "grep",
    "sed",
    "dd",
    "true",
    "false",
    "mkfifo",
    "tr",
    "cut",
    "seq",
    "expr",
    "test",
    "timeout",
    "setsid",
    "nohup",
    "setpriv",
    "sha256sum",
    "stat",
    "find",
    "dirname",
    "readlink",
]
PYTHON = Path("/usr/bin/python3").resolve()
"""The system's Python, whose modules are in /usr/lib."""
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GREETING": "hello there"}


def make_root(root: Path, programs: Sequence[str] = SHELL, *, python: bool = False) -> Path:
    """A folder with programs of this machine and the libraries that they need."""
    for name in ("usr/bin", "usr/local/bin", "app", "root", "etc", "tmp", "home", "dev", "proc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "bin").symlink_to("usr/bin")
    found = [path for name in programs if (path := shutil.which(name, path="/usr/bin:/bin"))]
    if python:
        found += [str(PYTHON)]
        skipped = shutil.ignore_patterns(
            "__pycache__", "test", "tests", "idlelib", "lib2to3", "config-*", "dist-packages"
        )
        shutil.copytree(
            f"/usr/lib/{PYTHON.name}", root / "usr/lib" / PYTHON.name, ignore=skipped, dirs_exist_ok=True
        )
        (root / "usr/bin/python3").symlink_to(PYTHON.name)
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
            source = Path(str(importlib.util.find_spec(name).origin))  # type: ignore[union-attr]
            packages = root / "usr/lib/python3/dist-packages"
            if source.name == "__init__.py":
                shutil.copytree(source.parent, packages / name, ignore=skipped)
            else:
                shutil.copy(source, packages)
    modules = [str(path) for path in (root / "usr/lib").rglob("*.so")]
    said = subprocess.run(["ldd", *found, *modules], capture_output=True, text=True).stdout
    libraries = {word for line in said.splitlines() for word in line.split() if word.startswith("/lib")}
    for file in [*found, *sorted(word.rstrip(":") for word in libraries)]:
        target = root / os.path.realpath(file).lstrip("/")
        target = root / "usr/bin" / Path(file).name if file in found else root / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(file, target)
    return root


def make_squashfs(root: Path, file: Path) -> Path:
    """A squashfs of a folder."""
    command = ["mksquashfs", str(root), str(file), "-noappend", "-all-root", "-noI", "-noD", "-noF", "-quiet"]
    subprocess.run(command, check=True, capture_output=True)
    return file


def make_sif(root: Path, file: Path) -> Path:
    """A .sif file as Apptainer writes it: header, table of 48 entries, definition, squashfs of a folder."""
    environment = root / ".singularity.d" / "env"
    environment.mkdir(parents=True, exist_ok=True)
    lines = [f'export {name}="${{{name}:-"{value}"}}"' for name, value in VARIABLES.items()]
    (environment / "10-docker2singularity.sh").write_text("\n".join(["#!/bin/sh", *lines, ""]))
    squashfs = make_squashfs(root, file.with_suffix(".squashfs")).read_bytes()
    start = 40960

    def entry(kind: int, number: int, offset: int, size: int, extra: bytes) -> bytes:
        head = struct.pack("<iBIII8q", kind, 1, number, 0xF0000001, 0, offset, size, size, 0, 0, 0, 0, 0)[:-8]
        return head.ljust(73, b"\0") + b"squash".ljust(128, b"\0") + extra.ljust(384, b"\0")

    entries = entry(0x4001, 1, 32768, 16, b"") + entry(
        0x4004, 2, start, len(squashfs), struct.pack("<ii", 1, 2)
    )
    header = b"#!/usr/bin/env run-singularity\n\0" + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)
    header += struct.pack("<8q", 0, 0, 46, 48, 4096, 48 * 585, 32768, start + len(squashfs) - 32768)
    content = header.ljust(4096, b"\0") + entries.ljust(48 * 585, b"\0")
    file.write_bytes(content.ljust(32768, b"\0") + b"bootstrap: local".ljust(start - 32768, b"\0") + squashfs)
    return file


def make_layout(folder: Path, *layers: Callable[[tarfile.TarFile], None], workdir: str = "/app") -> Path:
    """An OCI layout; each layer is made by a function that adds files to its tar."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> dict[str, object]:
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return {"digest": f"sha256:{name}", "size": len(content)}

    made = []
    for number, add in enumerate(layers):
        with tarfile.open(folder / "layer", "w:gz" if number % 2 == 0 else "w") as tar:
            add(tar)
        made.append(
            blob((folder / "layer").read_bytes())
            | {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}
        )
    config = {"config": {"Env": [f"{n}={v}" for n, v in VARIABLES.items()], "WorkingDir": workdir}}
    manifest = {"config": blob(json.dumps(config).encode()), "layers": made}
    (folder / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(manifest).encode())]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder
