"""Controller of a weight sync: drives one vLLM engine, over HTTP, to a published version of the weights.

    pause -> start -> check -> apply -> finish -> reset the prefix cache -> resume

For a sleeping engine, memory for the weights is allocated first, and the KV cache after *finish*.

Checksums are compared after *check* where memory is shared, and after *apply* where weights are sent. If
*check* or an earlier call fails, the engine keeps serving its old weights. If a later call fails, the engine
may hold a mixture of both: it stays paused and must be restarted.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.vllm.sync_route import SYNC, StepsDone, Totals

Post = Callable[[str, Any | None, float], Awaitable[tuple[int, str]]]
"""``await post(path, json body or None, timeout in seconds)`` -> (HTTP status, text)."""

_STEPS_DONE = msgspec.json.Decoder(StepsDone)
_PHASES = {"abort": "start", "reset": "resume", "interrupt": "pause"}
"""Steps whose time a report adds to another phase."""


class SyncError(Exception):
    """The weights of an engine could not be updated."""


class CheckFailed(SyncError):
    """Refused before anything was changed: the engine serves its old weights, or still has none."""


class EngineLost(SyncError):
    """The engine is in an unknown state; restart it, then sync it."""


class ApplyFailed(EngineLost):
    """Failed while weights were being changed: the engine is paused with a mixture of old and new weights."""


@dataclass
class SyncReport:
    """Result and cost of the sync of one engine."""

    version: int
    mode: str = ""
    """``slices``, or ``whole`` if some worker had to load whole tensors."""
    bytes_per_worker: tuple[int, ...] = ()
    """Bytes that each worker loaded into its model."""
    bytes_checked: tuple[int, ...] = ()
    """Bytes that each worker read in *check*; 0 where checksums are computed while weights arrive."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: pause, start, check, apply, finish, resume; also wake and wake KV cache.
    """
    workers: tuple[dict[str, Any], ...] = ()
    """Each worker's acknowledgement of *apply*, without its checksums."""


async def sync_engine(
    post: Post,
    manifest: Manifest,
    *,
    version: int,
    engine_tensor: int,
    timeout: float,
    asleep: bool = False,
    interrupt: bool = False,
) -> SyncReport:
    """Move one engine to a published version and let it serve again.

    engine_tensor: number of the engine's workers. timeout: seconds for each call. asleep: the engine may be
    asleep without weights: memory for them is allocated first, and the KV cache after they are loaded; until
    then nothing is served. interrupt: end running requests, which return the tokens that they have; otherwise
    there must be none. Published weights must not change until this returns.
    Raises CheckFailed (names tensor, rank and file; the engine keeps its old weights), ApplyFailed or
    EngineLost (restart the engine). Run one sync of an engine at a time. If this is cancelled, the engine
    stays paused until the next sync.
    """
    session = uuid.uuid4().hex
    report = SyncReport(version)
    call = _Caller(post, timeout)
    info = {
        "transport": manifest.transport,
        "place": manifest.place,
        "version": version,
        "session": session,
    }

    pause = "interrupt" if interrupt else "pause"
    try:
        started = await call.run([*(["wake"] if asleep else []), pause, "abort", "start"], report)
        # A controller that died during a sync left it open, and workers raise on a second start.
        unsettled = any(a.get("unsettled") for a in started.aborted)
    except _CallFailed as e:
        raise EngineLost(f"engine cannot start a weight update: {e}") from None

    problem: str | None = None
    try:
        checked, totals = await _run_phase(call, "check", info, engine_tensor, report)
        problem = _failures(checked) or await _find_mismatch(call, manifest, totals)
    except _CallFailed as e:
        problem = str(e)
    if problem is not None:
        if unsettled:
            raise ApplyFailed(
                f"an earlier update was interrupted, and this one was refused: {problem}; restart the engine"
            )
        try:
            await call.run(["abort"] if asleep else ["abort", "resume"], report)
        except _CallFailed as e:
            raise EngineLost(
                f"check failed ({problem}), and the engine did not resume: {e}; restart the engine"
            ) from None
        if asleep:
            raise CheckFailed(f"version {version} refused, the engine waits: {problem}")
        raise CheckFailed(f"version {version} refused, the engine keeps its old weights: {problem}")

    try:
        done, totals = await _run_phase(call, "apply", info, engine_tensor, report)
        if wrong := _failures(done) or await _find_mismatch(call, manifest, totals):
            raise _CallFailed(wrong)
        if silent := [
            a["rank"] for a, b in zip(checked, done, strict=True) if not (a["summed"] or b["summed"])
        ]:
            raise _CallFailed(f"worker ranks {silent} reported no checksums")
        await call.run(["finish", *(["wake KV cache"] if asleep else []), "reset", "resume"], report, info)
    except _CallFailed as e:
        raise ApplyFailed(f"version {version}: {e}; restart the engine") from None
    report.mode = "whole" if any(a["mode"] == "whole" for a in done) else "slices"
    report.bytes_per_worker = tuple(int(a["bytes"]) for a in done)
    report.bytes_checked = tuple(int(a["bytes"]) for a in checked)
    report.workers = tuple(done)
    return report


def compare_checksums(manifest: Manifest, totals: Totals) -> dict[str, str]:
    """Compare what an engine's workers read with what is published; returns HF tensor name -> problem.

    Workers partition some tensors and each read all of others (norms, replicated key/value heads). Together
    they read a tensor k times, k a positive integer, and their partial checksums must add up to k times the
    published one.
    """
    names, published, whole = manifest.totals
    sums, nbytes = np.frombuffer(totals.sums, np.uint64), np.frombuffer(totals.nbytes, np.uint64)
    wrong = {name: "is not published" for name in totals.names if name not in manifest.tensors}
    if totals.names != names:
        place = {name: i for i, name in enumerate(totals.names)}
        order = [place.get(name, -1) for name in names]  # the last: nothing
        sums, nbytes = np.append(sums, np.uint64(0))[order], np.append(nbytes, np.uint64(0))[order]
    times, rest = np.divmod(nbytes, whole)
    in_part = (rest != 0) | (times == 0)
    for i in np.flatnonzero(in_part | (sums != published * times)):
        read = f"workers read {nbytes[i]} bytes of {whole[i]}"
        wrong[names[i]] = read if in_part[i] else "checksum differs from the published one"
    return wrong


class _CallFailed(Exception):
    """A call was not answered with status 200, or workers did not acknowledge a phase."""


class _Caller:
    def __init__(self, post: Post, timeout: float) -> None:
        self.post, self.timeout = post, timeout

    async def __call__(self, path: str, body: Any | None = None) -> str:
        """The response text. Raises _CallFailed for any status but 200 and for every transport error."""
        try:
            status, text = await asyncio.wait_for(self.post(path, body, self.timeout), self.timeout + 5)
        except Exception as e:
            raise _CallFailed(f"POST {path}: {type(e).__name__} {e}".rstrip()) from e
        if status != 200:
            raise _CallFailed(f"POST {path} answered {status}: {text[:500]}")
        return text

    async def run(
        self, steps: Sequence[str], report: SyncReport, info: dict[str, Any] | None = None
    ) -> StepsDone:
        """Run steps in the engine and add their wall time to the report; the first one includes overhead."""
        began = time.perf_counter()
        try:
            done = _STEPS_DONE.decode(await self(SYNC, {"steps": steps, "update_info": info or {}}))
        except msgspec.DecodeError as e:
            raise _CallFailed(f"cannot parse the engine's answer ({e})") from None
        extra = time.perf_counter() - began - sum(done.seconds.values())
        for step, seconds in done.seconds.items():
            phase = _PHASES.get(step, step)
            report.seconds[phase] = report.seconds.get(phase, 0.0) + seconds + extra
            extra = 0.0
        return done


async def _run_phase(
    call: _Caller, phase: str, info: dict[str, Any], workers: int, report: SyncReport
) -> tuple[list[dict[str, Any]], Totals]:
    """Run *check* or *apply*; returns each worker's acknowledgement, in rank order, and their totals.

    A missing acknowledgement counts as failed.
    """
    totals = (await call.run([phase], report, info)).totals
    if totals is None:
        raise _CallFailed(f"no results of {phase}")
    by_rank = {int(ack.get("rank", -1)): ack for ack in totals.workers}
    expected = info["session"], phase
    acks = []
    for rank in range(workers):
        ack = by_rank.get(rank, {})
        if (ack.get("session"), ack.get("phase")) != expected:
            ack = {"rank": rank, "ok": False, "error": f"did not run {phase}"}
        acks.append(ack)
    return acks, totals


def _results(text: str) -> list[dict[str, Any]]:
    """The workers' results in the response of ``/collective_rpc``."""
    try:
        results = json.loads(text)["results"]
        if not all("rank" in r for r in results):
            raise ValueError("an answer without a rank")
    except (ValueError, KeyError, TypeError) as e:
        raise _CallFailed(f"cannot parse the workers' results ({type(e).__name__}: {e})") from None
    return list(results)


def _failures(acks: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"worker rank {a['rank']}: {a.get('error')}" for a in acks if not a.get("ok"))


async def _find_mismatch(call: _Caller, manifest: Manifest, totals: Totals) -> str | None:
    """How the weights that the workers read differ from the published ones; None if they do not.

    The workers' own acknowledgements are requested only if they differ.
    """
    if not totals.names or not (wrong := compare_checksums(manifest, totals)):
        return None
    acks = _results(await call("/collective_rpc", {"method": "rpg_ack"}))
    return await _describe(manifest, wrong, acks)


async def _describe(manifest: Manifest, wrong: dict[str, str], acks: Sequence[dict[str, Any]]) -> str:
    problems = []
    for name, why in list(wrong.items())[:5]:
        ranks = ", ".join(str(a["rank"]) for a in acks if name in a["sums"]) or "(none)"
        where = await asyncio.to_thread(_locate_damage, manifest, name, acks)
        problems.append(f"{name}: {why}, read by worker rank {ranks}{where}")
    more = f"; and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""
    return "; ".join(problems) + more


def _locate_damage(manifest: Manifest, name: str, acks: Sequence[dict[str, Any]]) -> str:
    """Where a tensor is damaged: the file, found by rereading it, or the trainer ranks that were read."""
    if manifest.transport != "shared_memory":  # a GPU's memory cannot be read from this process
        read = {rank for a in acks for rank in a.get("ranks_read", {}).get(name, ())}
        return f" (from trainer ranks {', '.join(map(str, sorted(read)))})"
    from rpg_megatron.bridge.transports.mapped_reader import ShardError, ShardReader

    path = Path(manifest.place["manifest"])
    if not path.is_absolute():  # on several nodes the file may be on another one
        return ""
    reader = ShardReader(path.parent)
    try:
        reader.open(manifest.place, manifest.version)
        files = sorted(map(str, reader.damaged(name)))
    except ShardError as e:
        return f" ({e})"
    finally:
        reader.close()
    return (
        f" (damaged: {', '.join(files)})"
        if files
        else " (the files are intact; the workers read them wrongly)"
    )
