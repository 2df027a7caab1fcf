"""Limits of sandboxes (``sandbox.py``), and whether this machine can hold programs to them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_FIRST_USER = 1_000_000_000
"""As root, the user of a sandbox's programs is this plus its pid: nobody else's. Containers may have few."""
LEAST_BWRAP = (0, 4)
"""Version of bubblewrap: the first with all options that are used."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandbox."""

    seconds: float = 30.0
    """Time for a call."""
    memory_mib: int = 512
    """Of all processes of a call together, with /tmp and what the kernel keeps for them; the address space of
    each is limited to four times as much."""
    processes: int = 32
    files_mib: int = 64
    """Files in /work in total; they are in memory. There are at most 256 for each MiB."""
    output: int = 65536
    """Bytes of a call's output that are kept; if it writes more than 100 times as much, it is ended."""
    folders: tuple[str, ...] = ()
    """Folders of the machine that programs can read, such as a virtual environment."""
    image: str = ""
    """File or folder of an Apptainer image, in which programs run; empty: no Apptainer. ``files_mib`` is then
    the limit of each file, on the disk of $TMPDIR."""
    root: str = ""
    """Folder of an unpacked image (``images.py``), in which programs run by bubblewrap with a writable layer
    of ``files_mib`` in memory; empty: programs of the machine."""
    workdir: str = "/"
    """With ``root``: where programs start."""
    variables: tuple[tuple[str, str], ...] = ()
    """With ``root``: their environment variables."""
    network: bool = False
    """With ``root``: whether programs have the machine's network, and no filter of system calls, until tests
    begin; for programs that are trusted."""


_LEAST_MEMORY = 8
"""MiB. With less, whether a short program is ended depends on the pages that others share."""


def own_user(number: int, uid_map: str | None = None) -> int:
    """A user for a sandbox of root, in the last of the ranges of users that this container has.

    number: of the sandbox, its pid. 0 owns the files of images, 1 runs tests in them, and 2 owns nothing.
    uid_map: for tests. Raises OSError if root is the only user.
    """
    last = (uid_map or Path("/proc/self/uid_map").read_text()).splitlines()[-1]
    first, _, count = map(int, last.split())
    if first + count > 2 * _FIRST_USER:
        return _FIRST_USER + number
    if first + count < 100:
        raise OSError(errno.EINVAL, "root is the only user of this container; run as another user than root")
    return first + count - 1 - number % (count // 2)  # the first ones are the system's


def find_problem(limits: SandboxLimits = SandboxLimits()) -> str | None:
    """Why this machine cannot run programs with these limits; None if it can. Another process tries it."""
    for name in ("seconds", "memory_mib", "processes", "files_mib", "output"):
        if not 0 < (value := getattr(limits, name)) < math.inf:
            return f"{name} is {value}; give a number above 0"
    if limits.memory_mib < _LEAST_MEMORY:
        return f"memory_mib is {limits.memory_mib}, too low for any program; give at least {_LEAST_MEMORY}"
    image, least = limits.image, ".".join(map(str, LEAST_BWRAP))
    if shutil.which("apptainer" if image else "bwrap") is None:
        return (
            "apptainer is not on the PATH; install it or load its module, or use sandboxes without image"
            if image
            else f"bwrap is not on the PATH; install the package bubblewrap ({least} or newer) on each node"
        )
    if "://" in image or (image and not os.path.exists(image)):
        return f"{image} is no image on this machine; make one with: apptainer pull FILE.sif docker://NAME"
    for folder in map(os.path.normpath, limits.folders):
        if not os.path.isabs(folder) or not os.path.isdir(folder):
            return f"folders: {folder} is no folder of this machine; give absolute paths of folders"
        if folder in ("/", "/tmp", "/work") or folder.split("/")[1] in ("sys", "proc", "dev"):
            return f"folders: {folder} is a sandbox's own; name folders in it, or others"
    if not image:
        said = _output(["bwrap", "--version"])
        if tuple(map(int, re.findall(r"\d+", said))) < LEAST_BWRAP:
            return f"{said or 'bwrap'} is too old; install the package bubblewrap, {least} or newer"
    module = "rpg_megatron.environments.sandbox_process"
    said = _output([sys.executable, "-P", "-m", module, json.dumps(asdict(limits))])
    if said == "ok":  # its exit code is not known in a fork server, whose children the kernel reaps
        return None
    if limits.root:
        return (
            f"images need a writable layer above them ({said}), that is Linux 6.6 with its overlay, and user "
            "namespaces: sysctl user.max_user_namespaces above 0"
        )
    if image:
        return f"apptainer cannot run {image}: {said}"
    return (
        f"bwrap cannot make a sandbox ({said}); it needs Linux 5.14 and user namespaces: sysctl "
        "user.max_user_namespaces above 0, and kernel.apparmor_restrict_unprivileged_userns=0 or a profile"
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "no answer within a minute"
    except OSError as e:
        return str(e)
    return (done.stdout.strip() or done.stderr.strip())[-300:].decode(errors="replace")
