"""Controller side of the live bridge: take one engine from the weights it serves to a published generation.

    pause -> start -> check -> compare checksums -> apply -> finish -> reset the prefix cache -> resume

A failure up to the comparison leaves the engine serving its old weights. A failure after it means that the
engine may hold a mixture: it stays paused and must be restarted.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.bridge.manifest import CHECKSUM_MODULUS, Manifest

Post = Callable[[str, Any | None, float], Awaitable[tuple[int, str]]]
"""``await post(path, json body or None, timeout in seconds)`` -> (HTTP status, text)."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class SyncError(Exception):
    """An engine did not take new weights."""


class CheckFailed(SyncError):
    """Refused before anything was changed: the engine serves its old weights."""


class EngineLost(SyncError):
    """The engine cannot be trusted any more; restart it, then sync it."""


class ApplyFailed(EngineLost):
    """Failed while weights were being changed: the engine is paused, with a mixture of old and new."""


@dataclass
class SyncReport:
    """What a sync did and what it cost."""

    generation: int
    mode: str = ""
    """``slices``, or ``whole`` if some worker had to load whole tensors."""
    bytes_per_worker: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: pause, start, check, apply, finish, resume."""
    workers: tuple[dict[str, Any], ...] = ()
    """The workers' own figures for *apply*."""

    @property
    def total_seconds(self) -> float:
        """Wall time of the whole sync."""
        return sum(self.seconds.values())


async def sync_engine(
    post: Post, manifest: Manifest, *, generation: int, engine_tensor: int, timeout: float
) -> SyncReport:
    """Move one engine to a published generation and let it serve again.

    engine_tensor: number of the engine's workers. timeout: seconds for each call. Published files must stay
    unchanged until this returns.
    Raises CheckFailed (names tensor, rank and file; the engine goes on with its old weights), ApplyFailed or
    EngineLost (restart the engine). Do not run two syncs of one engine at a time. If this is cancelled, the
    engine stays paused, and the next sync finds its way from there.
    """
    session = uuid.uuid4().hex
    report = SyncReport(generation)
    call = _Caller(post, timeout)
    info = {"manifest": str(manifest.path), "generation": generation, "session": session}

    try:
        with _clock(report, "pause"):
            await call("/pause?mode=keep")
        with _clock(report, "start"):
            # A controller that died during a sync left it open; starting twice would make workers raise.
            await call("/collective_rpc", {"method": "rpg_abort"})
            await call("/start_weight_update")
    except _CallFailed as e:
        raise EngineLost(f"engine cannot start a weight update: {e}") from None

    problem: str | None = None
    with _clock(report, "check"):
        try:
            await call("/update_weights", {"update_info": {**info, "phase": "check"}})
        except _CallFailed as e:
            problem = str(e)
        acks = _take_acks(manifest.path.parent, session, "check", engine_tensor)
        if problem is None:
            problem = await _verdict(manifest, generation, acks)
    if problem is not None:
        try:
            await call("/collective_rpc", {"method": "rpg_abort"})
            await call("/resume")
        except _CallFailed as e:
            raise EngineLost(f"check failed ({problem}), and the engine did not resume: {e}") from None
        raise CheckFailed(f"generation {generation} refused, the old weights are served on: {problem}")

    try:
        with _clock(report, "apply"):
            await call("/update_weights", {"update_info": {**info, "phase": "apply"}})
            done = _take_acks(manifest.path.parent, session, "apply", engine_tensor)
            if failed := _failures(done):
                raise _CallFailed(failed)
        with _clock(report, "finish"):
            await call("/finish_weight_update")
        with _clock(report, "resume"):
            answer = await call("/reset_prefix_cache?reset_running_requests=true")
            if '"success":true' not in answer.replace(" ", ""):
                raise _CallFailed(f"the prefix cache of the old weights could not be dropped: {answer[:200]}")
            await call("/resume")
    except _CallFailed as e:
        raise ApplyFailed(f"generation {generation}: {e}; restart the engine") from None
    report.mode = "whole" if any(a["mode"] == "whole" for a in done) else "slices"
    report.bytes_per_worker = tuple(int(a["bytes"]) for a in acks)
    report.workers = tuple({k: v for k, v in a.items() if k != "sums"} for a in done)
    return report


def compare_checksums(manifest: Manifest, acks: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What is wrong with the workers' reading, by HF tensor name; empty if all that was published was read.

    Workers partition some tensors and read others alike (norms, replicated key/value heads). Together they
    read a tensor a whole number of times, k, and their partial sums must add up to k times the published one.
    """
    wrong: dict[str, str] = {}
    for name, tensor in manifest.tensors.items():
        parts = {int(a["rank"]): a["sums"][name] for a in acks if name in a["sums"]}
        total = sum(int(s) for s, _ in parts.values()) % CHECKSUM_MODULUS
        nbytes = sum(int(n) for _, n in parts.values())
        whole = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        times, rest = divmod(nbytes, whole)
        if rest or not times:
            wrong[name] = f"workers read {nbytes} bytes of {whole}"
        elif total != tensor.checksum * times % CHECKSUM_MODULUS:
            ranks = ", ".join(map(str, sorted(parts)))
            wrong[name] = f"checksum differs from the published one as read by worker rank {ranks}"
    return wrong


class _CallFailed(Exception):
    """A call did not answer 200, or workers did not acknowledge."""


class _Caller:
    def __init__(self, post: Post, timeout: float) -> None:
        self.post, self.timeout = post, timeout

    async def __call__(self, path: str, body: Any | None = None) -> str:
        """The answer's text. Raises _CallFailed for any other status and for every transport error."""
        try:
            status, text = await asyncio.wait_for(self.post(path, body, self.timeout), self.timeout + 5)
        except Exception as e:
            raise _CallFailed(f"POST {path}: {type(e).__name__} {e}".rstrip()) from e
        if status != 200:
            raise _CallFailed(f"POST {path} answered {status}: {text[:500]}")
        return text


class _clock:
    """Adds the wall time of a block to the report."""

    def __init__(self, report: SyncReport, phase: str) -> None:
        self.report, self.phase = report, phase

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.report.seconds[self.phase] = time.perf_counter() - self.began


def _take_acks(folder: Path, session: str, phase: str, workers: int) -> list[dict[str, Any]]:
    """Each worker's answer, in rank order; the files are removed. A missing answer becomes a failed one."""
    acks = []
    for rank in range(workers):
        file = folder / f"ack-{session}-{phase}-{rank}.json"
        try:
            acks.append(json.loads(file.read_text(encoding="utf-8")))
            file.unlink()
        except (OSError, ValueError) as e:
            acks.append({"rank": rank, "ok": False, "error": f"no acknowledgement ({type(e).__name__})"})
    return acks


def _failures(acks: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"worker rank {a['rank']}: {a.get('error')}" for a in acks if not a.get("ok"))


async def _verdict(manifest: Manifest, generation: int, acks: Sequence[dict[str, Any]]) -> str | None:
    """Why these weights must not be applied, or None."""
    if failed := _failures(acks):
        return failed
    wrong = compare_checksums(manifest, acks)
    if not wrong:
        return None
    named = []
    for name, why in list(wrong.items())[:5]:
        files = await asyncio.to_thread(_damaged_files, manifest, generation, name)
        named.append(f"{name}: {why}{files}")
    more = f"; and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""
    return "; ".join(named) + more


def _damaged_files(manifest: Manifest, generation: int, name: str) -> str:
    """Say which trainer's file is damaged, by reading the tensor once more here."""
    from rpg_megatron.bridge.reader import ShardError, ShardReader

    reader = ShardReader(manifest.path.parent)
    try:
        reader.open(manifest.path, generation)
        files = sorted({f"{f.name} of trainer rank {f.rank}" for f in reader.damaged_files(name)})
    except ShardError as e:
        return f" ({e})"
    finally:
        reader.close()
    return f" (damaged: {', '.join(files)})" if files else " (the files are intact: the reading was not)"
