"""Route of the engine's server that runs one phase of a weight update and returns what all workers read.

The workers' checksums are added up here, in the engine, so that its answer is small: 12 kB instead of 300 kB
for a model of 707 tensors and 8 workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

UPDATE = "/update_weights/totals"
_MASK = (1 << 64) - 1


class Totals(msgspec.Struct):
    """Sums over an engine's workers after a phase."""

    workers: list[dict[str, Any]]
    """Each worker's acknowledgement, without checksums."""
    names: list[str]
    """HF tensors that some worker computed a checksum of."""
    sums: bytes
    """uint64: sum of the workers' checksums of each tensor, modulo 2**64."""
    nbytes: bytes
    """uint64: bytes that the workers read of each tensor, together."""


def add_up(acks: Sequence[dict[str, Any]]) -> Totals:
    """The totals of the workers' acknowledgements, each with ``sums`` (see ``mapped_reader.Sums``)."""
    totals: dict[str, list[int]] = {}
    for ack in acks:
        for name, (number, nbytes) in ack.get("sums", {}).items():
            total = totals.setdefault(name, [0, 0])
            total[0] = (total[0] + int(number)) & _MASK
            total[1] += int(nbytes)
    columns = np.array(list(totals.values()), np.uint64).reshape(-1, 2).T
    workers = [{key: value for key, value in ack.items() if key != "sums"} for ack in acks]
    return Totals(workers, list(totals), columns[0].tobytes(), columns[1].tobytes())


def add_route(app: Any) -> None:
    """Add the route to vLLM's FastAPI application. Its request is that of vLLM's ``/update_weights``."""
    from fastapi import Request, Response
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def update(raw_request: Request) -> Response:
        body = await raw_request.json()
        engine = raw_request.app.state.engine_client
        await engine.update_weights(request=WeightTransferUpdateRequest(update_info=body["update_info"]))
        totals = add_up(await engine.collective_rpc("rpg_ack", args=(False,)))
        return Response(msgspec.json.encode(totals), media_type="application/json")

    # FastAPI reads the types from here, since annotations of this module are strings.
    update.__annotations__ |= {"raw_request": Request, "return": None}
    app.add_api_route(UPDATE, update, methods=["POST"], response_model=None)
