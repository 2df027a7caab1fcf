"""A vLLM worker with a simulated GPU, to run vLLM's scheduler for GPUs on a CPU: async scheduling, chunked
prefill, prefix caching, preemption.

vLLM turns async scheduling off on a CPU. ``engine_arguments`` and the plug-in in this file turn it on, with
the data that model runner V2 gets, and put ``ToyWorker`` in place of the worker for CPUs. Scheduler,
EngineCore, output processing, weights and our plug-in are the real ones; only *execute_model* and
*sample_tokens* are replaced:

- The **device** is a thread that runs one step after the other, as a stream does. The engine queues a step
  and goes on; it learns the tokens when it asks for them. The device's state (sampled tokens, keys and
  values) is never read by the engine's thread.
- The **model** hashes. A token and its log-prob depend on the seed, on each token before it, on the position
  that each was stored at, and on the weights in memory when it was stored. So one wrong block, one stale
  entry of the prefix cache, one token of other weights, or a step that ran while weights were being
  replaced gives other tokens than ``respond``.

``hold`` stops the device before its next step, so that a test controls the moment.

This file is also the plug-in's code (``engine.install_plugin``): it must not import from ``tests``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

VOCAB = 101
LAYERS, EXPERTS, CHOSEN = 3, 8, 2
BLOCK = 32
PLUGIN = "plugin_0"
"""Name of this file's module in the engine."""


def engine_arguments(blocks: int, batch: int) -> list[str]:
    """Options of the engine. blocks: size of the KV cache, in blocks of BLOCK tokens. batch: maximum tokens
    of a step; longer prompts are split.
    """
    return [
        *("--skip-tokenizer-init", "--async-scheduling", "--enable-chunked-prefill"),
        *("--worker-cls", f"{PLUGIN}.ToyWorker"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)),
        *("--max-num-batched-tokens", str(batch)),
    ]


def weights_hash(weights: Mapping[str, torch.Tensor]) -> int:
    """Hash of the embedding (vLLM pads it) and all norms (HF names), which are the same on all workers."""
    names = sorted(n for n in weights if "embed_tokens" in n or n.endswith("norm.weight"))
    digest = hashlib.blake2b(digest_size=7)
    for name in names:
        tensor = weights[name].detach()
        digest.update(tensor[:VOCAB].numpy().tobytes() if tensor.ndim == 2 else tensor.numpy().tobytes())
    return int.from_bytes(digest.digest())


def sample(seed: int, stored: np.ndarray) -> tuple[int, float]:
    """Token and log-prob after these entries of the KV cache: int64 [t, 3] (token, position, weights)."""
    key = seed.to_bytes(8, "little")
    drawn = hashlib.blake2b(np.ascontiguousarray(stored).tobytes(), digest_size=8, key=key).digest()
    token, rest = int.from_bytes(drawn[:4]) % VOCAB, int.from_bytes(drawn[4:])
    return token, float(np.float32(-rest / 2**30))


def routes_of(stored: np.ndarray) -> np.ndarray:
    """Experts of each entry: uint8 [tokens, LAYERS, CHOSEN]."""
    base = (stored.sum(axis=1) % EXPERTS)[:, None, None]
    steps = np.arange(LAYERS)[:, None] + np.arange(CHOSEN)
    return ((base + steps) % EXPERTS).astype(np.uint8)


def stored_entries(tokens: Sequence[int], weights: int) -> np.ndarray:
    """The KV cache's entries of tokens that all were computed with the same weights."""
    return np.array([(t, i, weights) for i, t in enumerate(tokens)], np.int64).reshape(-1, 3)


def respond(
    prompt: Sequence[int], seed: int, weights: int, length: int, stop: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """What the engine must answer: tokens, up to and with the first of ``stop``, and their log-probs."""
    tokens, logprobs = list(prompt), []
    while len(logprobs) < length and not (logprobs and tokens[-1] in stop):
        token, logprob = sample(seed, stored_entries(tokens, weights))
        tokens.append(token)
        logprobs.append(logprob)
    return tokens[len(prompt) :], logprobs


class Hold:
    """Stops the device of an engine: while entered, no step begins, or none after ``steps`` more."""

    def __init__(self, bridge: Path, steps: int = 0):
        self._file, self._reached, self._steps = bridge / "hold", bridge / "held", steps

    def __enter__(self) -> Hold:
        self._reached.unlink(missing_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(str(self._steps))
        new.rename(self._file)
        return self

    def wait(self) -> None:
        """Until a step waits."""
        end = time.monotonic() + 60
        while not self._reached.exists():
            assert time.monotonic() < end, "no step reached the device"
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self._file.unlink()


class Device(threading.Thread):
    """Runs the queued steps, in order."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._hold, self._held = folder / "hold", folder / "held"
        self._depth, self._passed, self._lock = 0, 0, threading.Lock()
        self.deepest = 0
        """The most steps that were queued or running at the same time."""
        self.start()

    def queue(self, step: Callable[[], None]) -> threading.Event:
        """Run a step when all before it have ended. Sets the event then."""
        done = threading.Event()
        with self._lock:
            self._depth += 1
            self.deepest = max(self.deepest, self._depth)

        def work() -> None:
            self._wait()
            step()
            with self._lock:
                self._depth -= 1
            done.set()

        self._work.put(work)
        return done

    def _wait(self) -> None:
        while (steps := self._allowed()) is not None:
            if self._passed < steps:
                self._passed += 1
                return
            self._held.touch()
            time.sleep(0.002)
        self._passed = 0

    def _allowed(self) -> int | None:
        """Steps that may begin while held; None: not held."""
        try:
            return int(self._hold.read_text())
        except FileNotFoundError:
            return None

    def synchronize(self) -> None:
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def run(self) -> None:
        while True:
            self._work.get()()


class Request:
    """The worker's state of a request."""

    def __init__(self, tokens: Sequence[int], computed: int, blocks: Sequence[int], seed: int):
        self.tokens = list(tokens)
        """Used by the device only, once the request runs: the engine does not know the last ones."""
        self.prefill = len(self.tokens)
        self.computed, self.blocks, self.seed = computed, list(blocks), seed


def register() -> None:
    """Entry point of the plug-in, in every process of vLLM."""
    import vllm.config.vllm as config
    from vllm.platforms.cpu import CpuPlatform

    config.HAS_TRITON = True  # required for model runner V2, which the worker replaces
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_async_scheduling(cls: Any, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = scheduling

    CpuPlatform.check_and_update_config = classmethod(keep_async_scheduling)  # type: ignore[assignment]


def __getattr__(name: str) -> Any:
    """``ToyWorker``, made when an engine asks for it: tests read this file without vLLM."""
    if name != "ToyWorker":
        raise AttributeError(name)
    globals()[name] = worker = _make_worker()
    return worker


def _make_worker() -> type[Any]:
    from vllm.v1.outputs import (
        EMPTY_MODEL_RUNNER_OUTPUT,
        AsyncModelRunnerOutput,
        LogprobsLists,
        ModelRunnerOutput,
    )
    from vllm.v1.worker.cpu_worker import CPUWorker

    class Output(AsyncModelRunnerOutput):
        """A step's tokens, when the device has them."""

        def __init__(self, names: list[str], done: threading.Event, sampled: list[Any], routes: Any):
            self.names, self.done, self.sampled, self.routes = names, done, sampled, routes

        def get_output(self) -> ModelRunnerOutput:
            self.done.wait()
            for error in self.sampled:
                if isinstance(error, BaseException):
                    raise error
            tokens = [[] if s is None else [s[0]] for s in self.sampled]
            rows = [(0, 0.0) if s is None else s for s in self.sampled]
            output = ModelRunnerOutput(
                req_ids=self.names,
                req_id_to_index={name: i for i, name in enumerate(self.names)},
                sampled_token_ids=tokens,
                logprobs=LogprobsLists(
                    np.array([[t] for t, _ in rows]),
                    np.array([[p] for _, p in rows], np.float32),
                    np.ones(len(rows), np.int64),
                ),
            )
            if self.routes is not None:
                count = np.array([len(t) for t in tokens])
                self.routes.enqueue_cpu_copy(count, np.zeros_like(count))
                output.aux_output_connector_output = self.routes.process_output()
            return output

    class ToyWorker(CPUWorker):  # type: ignore[misc]
        def init_device(self) -> None:
            self.use_v2_model_runner = False  # needs Triton; V1's loads the weights
            super().init_device()
            import os

            self.toy = Device(Path(os.environ["RPG_BRIDGE_DIR"]))
            self.requests: dict[str, Request] = {}
            self.stored = np.zeros((0, 3), np.int64)
            """The KV cache, of the device only: [blocks * BLOCK, 3]."""
            self.preempted = self.chunks = self.cached = 0
            self.step: Any = None

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            super().initialize_from_config(kv_cache_config)
            self.stored = np.zeros((kv_cache_config.num_blocks * BLOCK, 3), np.int64)
            self.connector = getattr(self.model_runner, "rpg_routes", None)

        def synchronize_device(self) -> None:
            self.toy.synchronize()

        def toy_counts(self) -> dict[str, int]:
            """Counts of what the scheduler did so far."""
            return {
                "deepest": self.toy.deepest,
                "preempted": self.preempted,
                "chunks": self.chunks,
                "cached": self.cached,
            }

        def execute_model(self, scheduled: Any) -> Any:
            if self.connector is not None:
                self.connector.begin_step(scheduled.aux_output_connector_metadata)
            self.preempted += len(scheduled.preempted_req_ids or ())
            for name in scheduled.finished_req_ids:
                self.requests.pop(name, None)
            for new in scheduled.scheduled_new_reqs:
                tokens = new.prefill_token_ids or new.prompt_token_ids
                self.cached += new.num_computed_tokens
                self.requests[new.req_id] = Request(
                    tokens, new.num_computed_tokens, new.block_ids[0], new.sampling_params.seed
                )
            cached = scheduled.scheduled_cached_reqs
            for i, name in enumerate(cached.req_ids):
                request, blocks = self.requests[name], cached.new_block_ids[i]
                if name in cached.resumed_req_ids:  # by runner V1's data; V2's has them as new
                    tokens = cached.all_token_ids[name]
                    self.requests[name] = request = Request(tokens, 0, [], request.seed)
                request.computed = cached.num_computed_tokens[i]
                request.blocks += blocks[0] if blocks else []
            if not scheduled.total_num_scheduled_tokens:
                return EMPTY_MODEL_RUNNER_OUTPUT
            self.step = [
                (name, self.requests[name], self.requests[name].computed, count)
                for name, count in scheduled.num_scheduled_tokens.items()
            ]
            return None

        def sample_tokens(self, _: Any) -> Output:
            step, self.step = self.step, None
            names = [name for name, *_ in step]
            counts = [count for *_, count in step]
            starts = np.array([start for _, _, start, _ in step])
            self.chunks += sum(start + count < r.prefill for _, r, start, count in step)
            # Copies: the engine adds blocks to a request's list while the device still runs.
            parts = [(r, start, count, np.array(r.blocks)) for _, r, start, count in step]
            routes = None
            if self.connector is not None:
                from types import SimpleNamespace

                routes = self.connector.prepare_output(
                    SimpleNamespace(
                        req_ids=names,
                        query_start_loc_np=np.cumsum([0, *counts]),
                        num_computed_tokens_np=starts,
                    )
                )
            sampled: list[Any] = []

            def run() -> None:
                try:
                    weights = weights_hash(dict(self.model_runner.get_model().named_parameters()))
                    results, experts = zip(*[self._compute(weights, *part) for part in parts], strict=True)
                    if routes is not None:  # in place of the snapshot, which was taken too early here
                        rows = torch.from_numpy(np.concatenate(experts))
                        routes.routed_experts_gpu = rows.to(routes.routed_experts_gpu.dtype)
                    sampled.extend(results)
                except BaseException as e:
                    sampled.append(e)

            return Output(names, self.toy.queue(run), sampled, routes)

        def _compute(self, weights: int, request: Request, start: int, count: int, blocks: np.ndarray) -> Any:
            """On the device: the token after ``count`` more, None within a prompt; and their experts."""
            positions = np.arange(start + count)
            slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
            for i in range(start, start + count):
                self.stored[slots[i]] = request.tokens[i], i, weights
            experts = routes_of(self.stored[slots[start:]])
            if start + count < request.prefill:
                return None, experts
            token, logprob = sample(request.seed, self.stored[slots])
            del request.tokens[start + count :]
            request.tokens.append(token)
            return (token, logprob), experts

    return ToyWorker
