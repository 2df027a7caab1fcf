"""vLLM plug-in: a weight-transfer backend by which workers pull their slices of published weights.

Start the engine with

    --weight-transfer-config '{"backend": "rpg_pull"}'
    --worker-extension-cls rpg_megatron.bridge.vllm.plugin.WorkerExtension
    --middleware rpg_megatron.bridge.vllm.plugin.BearerAuth

and, in its environment, RPG_BRIDGE_DIR (the only folder that manifests are read from), RPG_ENGINE_TOKEN
(required by every route) and VLLM_SERVER_DEV_MODE=1 (enables the routes for weight updates).

Two rules:

- A worker must never raise. At tensor parallel size 2 and more, vLLM leaves the other workers' replies in the
  queue when one raises, and every later reply is one call late. So each worker stores its result (``ack``)
  until the controller requests it.
- Between *start* and *apply* the model is not touched, so a failed check needs no repair.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publisher import node_name
from rpg_megatron.bridge.transports.cuda_ipc import gpu_of
from rpg_megatron.bridge.transports.mapped_reader import Reader, ShardError, ShardReader, own_stream
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.bridge.vllm import generate_route, peak_use, sync_route
from rpg_megatron.bridge.vllm.adapter_slots import (
    check_slots,
    load_adapters,
    split_names,
    without_wrappers,
)
from rpg_megatron.bridge.vllm.cpu_engine import adapt_to_cpu, prepare_model
from rpg_megatron.bridge.vllm.liveness import CORE_HEALTH, ProgressMark, wait_for_progress
from rpg_megatron.bridge.vllm.route_capture import accept_routes_on_cpu, return_routes_on_cpu
from rpg_megatron.bridge.vllm.trace import WorkerTrace, trace_file
from rpg_megatron.bridge.vllm.weight_loader import ModelPlan, load_published, record_plan, restore_layers
from rpg_megatron.config.cluster import BRIDGE_VARIABLE, TOKEN_VARIABLE
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.collectives import bind_stores, share_gloo_devices

BACKEND = "rpg_pull"
_NO_WEIGHTS = ModelPlan((), [])
"""Plan of an update of adapters only."""

_GOLDEN_RATIO = 0.618
"""Its multiples modulo 1 are spread evenly, for any number of engines."""

logger = init_logger("vllm." + __name__)


@dataclass
class PullInit(WeightTransferInitInfo):
    """Empty: manifests hold everything that a worker needs."""


@dataclass
class PullUpdate(WeightTransferUpdateInfo):
    """One phase of one sync."""

    transport: str
    place: dict[str, Any]
    """Location of the published weights; see ``Manifest.place``."""
    version: int
    phase: str
    """``check`` or ``apply``."""
    session: str
    """The controller's unique id of this sync, to match phases and acknowledgements."""


class PullEngine(WeightTransferEngine[PullInit, PullUpdate]):
    """Weight-transfer backend ``rpg_pull``: reads exactly this worker's slices from published shards."""

    init_info_cls, update_info_cls = PullInit, PullUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = os.environ.get(BRIDGE_VARIABLE)
        if not folder:
            raise RuntimeError(
                f"{BRIDGE_VARIABLE} is not set: set it to the folder that weights are published in"
            )
        self.folder = Path(folder).resolve()
        self._engine = int(self.vllm_config.model_config.seed)
        """Index of the engine, up to a constant: engines of a run have consecutive seeds
        (engine/command.py)."""
        self._progress = ProgressMark(self.folder)
        if self.device.type == "cpu":
            prepare_model(self.model, self.model_config, self._progress.mark)
            if self.vllm_config.aux_output_config.enabled:
                return_routes_on_cpu()
        self._readers: dict[str, Reader] = {}
        self.version: int | None = None
        self.unsettled = False
        """Whether an *apply* began and its update was not finished: the weights may be a mixture."""
        self.ack: dict[str, Any] = {}
        self._plan: ModelPlan | None = None
        self._loaded: ModelPlan | None = None
        """The plan by which the model's weights were loaded."""
        self._adapters: list[tuple[str, Box]] = []
        """Published tensors of adapters, which are read whole."""
        self._read_adapters: tuple[dict[str, torch.Tensor], float] | None = None
        """Adapters that were read, by their names in PEFT's file, and their scale."""
        self._checked: tuple[str, int] | None = None

    def init_transfer_engine(self, init_info: PullInit) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Discard an earlier check; the model is not changed until *apply*."""
        self._checked = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one phase and store its result in ``ack``. Never raises (see the module's docstring)."""
        began = time.perf_counter()
        self.ack = ack = {"rank": self.parallel_config.rank, "pid": os.getpid(), "ok": False, "sums": {}}
        try:
            ack.update({k: update_info.get(k) for k in ("session", "version", "phase", "transport")})
            with own_stream(self.device):
                self.receive_weights(self.parse_update_info(update_info), ack)
            ack["ok"] = True
        except BaseException as e:
            ack["error"] = f"{type(e).__name__}: {e}"
            known = {k: v for k, v in update_info.items() if k != "place"}  # ``place`` holds a secret
            logger.exception("Weight update failed: %s", known)
            self.abort()
        ack["seconds"] = time.perf_counter() - began

    def receive_weights(self, update_info: PullUpdate, ack: dict[str, Any] | None = None) -> None:
        """Run one phase; may raise, unlike ``update_weights``. Fills in ``ack``."""
        ack = {} if ack is None else ack
        plan: ModelPlan | None
        session = (update_info.session, update_info.version)
        if update_info.phase == "check":
            self._checked = None
            reader = self._reader(update_info.transport)
            plan = self._current_plan(reader.open(update_info.place, update_info.version))
            ack["sums"] = reader.check(plan.boxes() + self._adapters)
            ack["bytes"] = sum(n for _, n in ack["sums"].values())
            self._checked = session
        elif update_info.phase == "apply":
            if self._checked != session:
                raise RuntimeError(
                    f"session {session} was not checked (last check: {self._checked}); run phase check first"
                )
            self._checked = None
            reader, plan = self._reader(update_info.transport), self._plan
            assert plan is not None
            reader.begin()
            # From here on a failure leaves a mixture of versions.
            self.version, self.unsettled = None, True
            assert reader.manifest is not None
            scale = reader.manifest.scale
            if plan is not _NO_WEIGHTS:
                with without_wrappers(self.model):
                    load_published(self.model, self.model_config, self.device, plan, reader)
                self._loaded = plan
            tensors = {name: reader.whole(name) for name, _ in self._adapters}
            ack["sums"] = reader.end()
            ack["bytes"] = plan.nbytes + sum(tensor.nbytes for tensor in tensors.values())
            self._read_adapters = (tensors, scale) if tensors else None
            self.version = update_info.version
        else:
            raise ValueError(f"phase {update_info.phase!r} is neither 'check' nor 'apply'")
        ack["mode"] = "whole" if plan.reason else "slices"
        ack["reason"] = plan.reason
        ack["layers_in_place"] = sum(p.in_place for p in plan.layers)
        ack["layers_processed"] = sum(not p.in_place for p in plan.layers)

    def ranks_read(self) -> dict[str, list[int]]:
        """HF tensor name -> the trainer ranks that the last phase read it from. Never raises."""
        try:
            reader = self._readers[self.ack["transport"]]
            return {name: sorted(reader.ranks_read(name)) for name in self.ack["sums"]}
        except Exception:
            logger.exception("Cannot determine which trainer ranks were read")
            return {}

    def bind_adapters(self) -> None:
        """Load the adapters of the last update into vLLM's slots, and check these. Raises ShardError.

        Called when vLLM has finished the update: it then drops all adapters, which belong to old weights.
        """
        (tensors, scale), self._read_adapters = self._read_adapters or ({}, 0.0), None
        assert self._loaded is not None
        load_adapters(self.model, tensors, scale)
        check_slots(self.model, self._loaded, tensors, scale)
        self.unsettled = False

    def finish_weight_update(self) -> None:
        """The new weights may be served."""
        self._checked = None
        self.unsettled = self._read_adapters is not None

    def abort(self) -> None:
        """Restore every module's own tensors, wherever an update was interrupted. Never raises."""
        self._checked = None
        for reader in self._readers.values():
            try:
                reader.release()
            except BaseException:
                logger.exception("Could not abandon an update")
        try:
            restore_layers(self.model)
        except BaseException:
            logger.exception("Could not restore the model; the engine must be restarted")
            self.version = None

    def shutdown(self) -> None:
        """Release the trainers' weights."""
        for reader in self._readers.values():
            try:
                reader.close()
            except BaseException:
                logger.exception("Could not release the trainers' weights")

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not supported: trainers publish weights, vLLM does not send them."""
        raise NotImplementedError("rpg_pull: trainers publish with rpg_megatron.bridge.publisher")

    def _reader(self, transport: str) -> Reader:
        """The transport's reader, created on first use. Raises ShardError if the transport is unknown."""
        if transport not in self._readers:
            if transport in ("shared_memory", "cuda_ipc"):
                self._readers[transport] = ShardReader(self.folder, gpu_of(self.device), self._progress.mark)
            elif transport == "process_group":
                config = self.parallel_config
                position = self._engine, config.rank, config.world_size
                self._readers[transport] = GroupReader(
                    self.device, node_name(self.folder), self._progress.mark, position
                )
            else:
                raise ShardError(
                    f"unknown transport {transport!r}; engine and trainer run different versions"
                )
        return self._readers[transport]

    def _current_plan(self, manifest: Manifest) -> ModelPlan:
        of_model, of_adapters = split_names(manifest.tensors)
        if bool(of_adapters) != (self.vllm_config.lora_config is not None):
            raise ShardError(
                "adapters are published, but the engine was started without --enable-lora"
                if of_adapters
                else "the engine was started with --enable-lora, but no adapters are published"
            )
        self._adapters = [(name, Box.whole(manifest.tensors[name].shape)) for name in of_adapters]
        if not of_model:
            if self._loaded is None:
                raise ShardError(
                    "only adapters are published, and the engine has not loaded the model's weights"
                )
            self._plan = _NO_WEIGHTS
            return self._plan
        signature = tuple((n, manifest.tensors[n].dtype, manifest.tensors[n].shape) for n in of_model)
        if self._loaded is not None and self._loaded.signature == signature:
            self._plan = self._loaded
        if self._plan is None or self._plan.signature != signature:
            with without_wrappers(self.model):
                self._plan = record_plan(self.model, self.device, signature)
            self._plan.rotate_layers(_GOLDEN_RATIO * self._engine % 1)
            if self._plan.reason:
                logger.warning("Loading whole tensors: %s", self._plan.reason)
        if of_adapters and self._plan.reason:
            raise ShardError(f"the slots of adapters cannot be checked: {self._plan.reason}")
        return self._plan


class WorkerExtension:
    """Methods that the controller calls through vLLM's ``/collective_rpc``. None of them raises."""

    weight_transfer_engine: PullEngine
    _rpg_trace: WorkerTrace | None = None

    def rpg_abort(self) -> dict[str, Any]:
        """End an open update, if there is one; the old weights are intact unless *apply* has started."""
        engine = self.weight_transfer_engine
        engine.abort()
        engine.reset_weight_update_target()
        self._weight_update_active = False
        return {
            "rank": engine.parallel_config.rank,
            "version": engine.version,
            "unsettled": engine.unsettled,
        }

    def rpg_ack(self, sources: bool = True) -> dict[str, Any]:
        """Result of the last phase. sources: add the trainer ranks that each tensor was read from."""
        engine = self.weight_transfer_engine
        if sources and engine.ack.get("ok"):
            return {**engine.ack, "ranks_read": engine.ranks_read()}
        return engine.ack

    def rpg_bind(self) -> dict[str, Any]:
        """``PullEngine.bind_adapters``. The result holds ``error``, empty if there was none."""
        engine, error = self.weight_transfer_engine, ""
        try:
            engine.bind_adapters()
        except BaseException as e:
            engine.version, error = None, f"{type(e).__name__}: {e}"
            logger.exception("Could not load the adapters")
        return {"rank": engine.parallel_config.rank, "error": error}

    def rpg_version(self) -> dict[str, Any]:
        """Version of the served weights; None before the first sync and after a failed *apply*."""
        engine = self.weight_transfer_engine
        return {
            "rank": engine.parallel_config.rank,
            "pid": os.getpid(),
            "version": engine.version,
        }

    def rpg_trace(self, action: str) -> dict[str, Any]:
        """Record the outputs of the model's modules (``start``), write them to a file (``take``), stop
        (``stop``).

        See ``trace.WorkerTrace``. The result holds ``error``, empty if there was none.
        """
        rank = self.weight_transfer_engine.parallel_config.rank
        error = ""
        try:
            trace = self._rpg_trace
            if action == "take":
                if trace is None:
                    raise RuntimeError("no trace is active; call start first")
                trace.take(trace_file(self.weight_transfer_engine.folder, rank))
                error = trace.error
            else:
                if trace is not None:
                    trace.close()
                self._rpg_trace = (
                    WorkerTrace(self.weight_transfer_engine.model) if action == "start" else None
                )
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            logger.exception("Tracing failed: %s", action)
        return {"rank": rank, "error": error}


class BearerAuth:
    """ASGI middleware: every route, also health and unknown ones, requires the token in RPG_ENGINE_TOKEN.

    vLLM's ``--api-key`` does not cover the routes that change weights, nor all that generate. Three routes
    are added: ``CORE_HEALTH`` answers with 200 when the engine makes progress, or with 503 if its core is
    dead; ``generate_route.GENERATE`` returns tokens as bytes; ``sync_route.SYNC`` runs steps of a sync.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: set it to the token that clients send")
        self.app = app
        self._routes_added = False
        self._digest = hashlib.sha256(b"Bearer " + token.encode()).digest()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward the request, or answer 401; answers ``CORE_HEALTH`` itself."""
        if scope["type"] in ("http", "websocket"):
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            # Digests have equal length, so the time of the comparison reveals nothing about the token.
            if not hmac.compare_digest(hashlib.sha256(authorization).digest(), self._digest):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 4401})
                    return
                await _answer(send, 401, (b"www-authenticate", b"Bearer"))
                return
            if not self._routes_added:
                self._routes_added = True
                gate = generate_route.RequestGate()
                generate_route.add_route(scope["app"], gate)
                sync_route.add_route(scope["app"], gate)
                peak_use.add_metric(scope["app"].state.engine_client)
            if scope["type"] == "http" and scope["path"] == CORE_HEALTH:
                try:
                    progress = ProgressMark(Path(os.environ[BRIDGE_VARIABLE]))
                    await wait_for_progress(scope["app"].state.engine_client, progress)
                    await _answer(send, 200)
                except EngineDeadError:
                    await _answer(send, 503)
                return
        await self.app(scope, receive, send)


async def _answer(send: Any, status: int, *headers: tuple[bytes, bytes]) -> None:
    """Send an answer without content."""
    headers = ((b"content-length", b"0"), *headers)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: registers the backend in every vLLM process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PullEngine)
    if BRIDGE_VARIABLE in os.environ:
        accept_routes_on_cpu()
        adapt_to_cpu()
        _use_file_rendezvous()
        bind_stores()  # of an engine on several nodes
        share_gloo_devices()


def _use_file_rendezvous() -> None:
    """Let the workers of an engine connect through a file in the bridge folder.

    vLLM's file is in the folder for temporary files, where it stays when an engine is killed.
    """

    def private_file() -> str:
        # vLLM uses the file's name in names of shared memory.
        return f"file://{Path(os.environ[BRIDGE_VARIABLE]).resolve()}/workers:{secrets.token_hex(8)}"

    # The executors import the function by name, before or after this.
    for name in ("utils.network_utils", "v1.executor.multiproc_executor", "v1.executor.uniproc_executor"):
        if (module := sys.modules.get(f"vllm.{name}")) is not None:
            module.get_file_store_init_method = private_file  # type: ignore[attr-defined]
