"""Route of the engine's server that returns sampled tokens and log-probs as bytes instead of JSON.

Requests are those of vLLM's ``/inference/v1/generate``, with the same checks and limits. A response of 8,192
tokens takes 64 KiB instead of 1.3 MB, and neither side processes its tokens one by one.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np

GENERATE = "/inference/v1/generate/bytes"


class SampledBytes(msgspec.Struct, array_like=True):
    """One response; an answer is a msgpack list of them."""

    index: int
    """Position in the request's ``n`` responses."""
    finish: str
    """vLLM's finish reason."""
    tokens: bytes
    """int32 in the machine's byte order."""
    logprobs: bytes
    """float32, of the sampled tokens; empty if the request has no ``logprobs``."""
    version: int | None = None
    """Version of the weights that sampled all tokens; None before the first sync, if they changed during the
    request, or if there are no tokens.
    """
    routes: bytes = b""
    """If the engine returns routes and the request has ``logprobs``: the experts chosen in each layer for
    each token but the last, as uint8 or uint16.
    """
    routes_shape: tuple[int, int, int] = (0, 0, 0)
    """Tokens (after the first ``routed_experts_prompt_start`` of the prompt), layers, experts per token."""


class RequestGate:
    """Ends requests for a weight update, so that the tokens of one answer are of one version."""

    def __init__(self) -> None:
        self.closed = False
        """While it is closed, requests end at once, without tokens."""
        self.running = 0
        """Number of requests that are not answered yet."""


def add_route(app: Any, gate: RequestGate) -> None:
    """Add the route to vLLM's FastAPI application.

    A request that a weight update interrupts returns the tokens so far, with finish reason "abort".
    """
    from fastapi import Depends, Request, Response
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
    from vllm.lora.request import LoRARequest

    from rpg_megatron.bridge.vllm.adapter_slots import ADAPTER_ID, ADAPTER_NAME

    class ServingBytes(ServingTokens):
        def _maybe_get_adapters(self, request: Any, *_: Any, **__: Any) -> Any:
            # The policy's adapter, whatever the request's ``model``: without it vLLM would sample from the
            # base model.
            if self.engine_client.vllm_config.lora_config is None:
                return None
            return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "/adapters-come-over-the-bridge")

        async def serve_tokens_full_generator(
            self, request: Any, result_generator: Any, request_id: str, *_: Any, **__: Any
        ) -> Any:
            final = None
            async for result in result_generator:
                final = result
            assert final is not None
            for output in final.outputs:
                self._raise_if_error(output.finish_reason, request_id)
            with_logprobs = request.sampling_params.logprobs is not None
            return [_packed(output, with_logprobs) for output in final.outputs]

    @with_cancellation  # type: ignore[untyped-decorator]
    async def generate(request: GenerateRequest, raw_request: Request) -> Response:
        serving = copy.copy(raw_request.app.state.serving_tokens)
        serving.__class__ = ServingBytes
        request.sampling_params.flat_logprobs = True
        if gate.closed:
            result = [SampledBytes(i, "abort", b"", b"") for i in range(request.sampling_params.n)]
        else:
            gate.running += 1
            try:
                result = await serving.serve_tokens(request, raw_request)
            finally:
                gate.running -= 1
        if isinstance(result, ErrorResponse):
            return JSONResponse(content=result.model_dump(), status_code=result.error.code)
        return Response(msgspec.msgpack.encode(result), media_type="application/msgpack")

    # FastAPI reads the types from here, since annotations of this module are strings.
    generate.__annotations__ |= {"request": GenerateRequest, "raw_request": Request, "return": None}
    app.add_api_route(
        GENERATE,
        generate,
        methods=["POST"],
        dependencies=[Depends(validate_json_request)],
        response_model=None,
    )


def _packed(output: Any, with_logprobs: bool) -> SampledBytes:
    """Packs vLLM's CompletionOutput with flat log-probs, which has one log-prob per sampled token."""
    tokens = np.asarray(output.token_ids, np.int32)
    logprobs = np.zeros(0, np.float32)
    if with_logprobs and len(tokens):
        if not np.array_equal(output.logprobs.token_ids, tokens):
            raise RuntimeError("vLLM returned log-probs of other tokens than it sampled")
        logprobs = np.asarray(output.logprobs.logprobs, np.float32)
    versions = [span.version for span in output.weight_versions or []]
    version = int(versions[0]) if len(versions) == 1 and versions[0].isdigit() else None
    finish = output.finish_reason or "stop"
    sampled = SampledBytes(output.index, finish, tokens.tobytes(), logprobs.tobytes(), version)
    if with_logprobs and output.routed_experts is not None:
        sampled.routes, sampled.routes_shape = output.routed_experts.tobytes(), output.routed_experts.shape
    return sampled
