"""Route of the engine's server that runs several steps of a weight sync in one call.

The workers' checksums are summed here, in the engine. So the process that syncs all engines sends four calls
instead of ten to each, and parses less: 50 kB instead of 440 kB for 707 tensors and 8 workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rpg_megatron.bridge.vllm.generate_route import RequestGate

SYNC = "/sync_steps"
_MASK = (1 << 64) - 1


class Totals(msgspec.Struct):
    """Sums over an engine's workers after *check* or *apply*."""

    workers: list[dict[str, Any]]
    """Each worker's acknowledgement, with the number of its checksums (``summed``) instead of ``sums``."""
    names: list[str]
    """HF tensors of which any worker computed a checksum."""
    sums: bytes
    """uint64 [names]: sum of the workers' checksums of each tensor, modulo 2**64."""
    nbytes: bytes
    """uint64 [names]: total number of bytes of each tensor that the workers read."""


class StepsDone(msgspec.Struct):
    """Answer of the route."""

    seconds: dict[str, float]
    """Wall time of each step."""
    aborted: list[dict[str, Any]] = []
    """Each worker's result of *abort*."""
    totals: Totals | None = None
    """Totals of *check* or *apply*; None if neither was run."""


class StepFailed(Exception):
    """A step raised; the message names it."""


def sum_acks(acks: Sequence[dict[str, Any]]) -> Totals:
    """The totals of the workers' acknowledgements, each with ``sums`` (see ``mapped_reader.ReadSums``)."""
    totals: dict[str, list[int]] = {}
    for ack in acks:
        for name, (number, nbytes) in ack.get("sums", {}).items():
            total = totals.setdefault(name, [0, 0])
            total[0] = (total[0] + int(number)) & _MASK
            total[1] += int(nbytes)
    columns = np.array(list(totals.values()), np.uint64).reshape(-1, 2).T
    workers = [{**ack, "summed": len(ack.get("sums", ()))} for ack in acks]
    for worker in workers:
        worker.pop("sums", None)
    return Totals(workers, list(totals), columns[0].tobytes(), columns[1].tobytes())


async def run_steps(
    engine: Any, steps: Sequence[str], info: dict[str, Any], request: Callable[..., Any], gate: RequestGate
) -> StepsDone:
    """Run steps in order until one fails.

    engine: vLLM's engine client. info: the workers' ``PullUpdate`` without its phase, for *check*, *apply*
    and *finish*. request: vLLM's WeightTransferUpdateRequest. Raises StepFailed.
    """
    done = StepsDone({})
    for step in steps:
        began = time.perf_counter()
        try:
            if step == "wake":
                await engine.wake_up(["weights"])
            elif step == "pause":
                await engine.pause_generation(mode="keep")
            elif step == "interrupt":
                await _interrupt(engine, gate)
            elif step == "abort":
                done.aborted = await engine.collective_rpc("rpg_abort")
            elif step == "start":
                await engine.start_weight_update()
            elif step in ("check", "apply"):
                await engine.update_weights(request=request(update_info={**info, "phase": step}))
                done.totals = sum_acks(await engine.collective_rpc("rpg_ack", args=(False,)))
            elif step == "finish":
                await engine.finish_weight_update(weight_version=str(info["version"]))
                if engine.vllm_config.lora_config is not None:
                    await _bind_adapters(engine)
            elif step == "wake KV cache":
                await engine.wake_up(["kv_cache"])
            elif step == "reset":
                if not await engine.reset_prefix_cache(True):  # running requests too
                    raise RuntimeError("the prefix cache could not be reset")
            elif step == "resume":
                await engine.resume_generation()
                gate.closed = False
            else:
                raise ValueError("unknown step; engine and trainer run different versions")
        except Exception as e:
            raise StepFailed(f"{step}: {type(e).__name__}: {e}") from e
        done.seconds[step] = time.perf_counter() - began
    return done


async def _bind_adapters(engine: Any) -> None:
    results = await engine.collective_rpc("rpg_bind")
    if failed := [f"worker rank {r['rank']}: {r['error']}" for r in results if r["error"]]:
        raise RuntimeError("; ".join(failed))


async def _interrupt(engine: Any, gate: RequestGate) -> None:
    """Pause, and end all requests, which return the tokens that they have."""
    gate.closed = True
    await engine.pause_generation(mode="abort")
    while gate.running:  # a request that had not reached the core is waiting there now
        await engine.pause_generation(mode="abort")


def add_route(app: Any, gate: RequestGate) -> None:
    """Add the route to vLLM's FastAPI application."""
    from fastapi import Request, Response
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.v1.engine.exceptions import EngineDeadError

    one_at_a_time = asyncio.Lock()  # steps of a client that has disconnected may still be running

    async def sync_steps(raw_request: Request) -> Response:
        body = await raw_request.json()
        engine = raw_request.app.state.engine_client
        try:
            async with one_at_a_time:
                done = await run_steps(
                    engine, body["steps"], body["update_info"], WeightTransferUpdateRequest, gate
                )
        except StepFailed as e:
            if isinstance(e.__cause__, EngineDeadError):  # vLLM then ends the server
                raise e.__cause__ from None
            return Response(str(e), status_code=500)
        return Response(msgspec.json.encode(done), media_type="application/json")

    # FastAPI reads the types from here, since annotations of this module are strings.
    sync_steps.__annotations__ |= {"raw_request": Request, "return": None}
    app.add_api_route(SYNC, sync_steps, methods=["POST"], response_model=None)
