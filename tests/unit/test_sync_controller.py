"""The controller's half of a sync: order of calls, what each failure leads to, and the checksum rule.

The engine is a stand-in that answers like vLLM's routes and reads real published files, so that every failure
can be made at will. Not covered: vLLM itself (tests/integration).
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from rpg_megatron.bridge.checksum import MODULUS, checksum
from rpg_megatron.bridge.controller import (
    ApplyFailed,
    CheckFailed,
    EngineLost,
    compare_checksums,
    sync_engine,
)
from rpg_megatron.bridge.transports.mapped_reader import ShardError, ShardReader
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.bridge.vllm.generate_route import RequestGate
from rpg_megatron.bridge.vllm.sync_route import SYNC, StepFailed, run_steps, sum_acks
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.tiny_models import TINY, random_state_dict


class StandInEngine:
    """Two workers: matrices are read half and half by rows, vectors by both.

    It is also the engine's client of vLLM's server, on which the plug-in's route runs the steps.
    """

    def __init__(self, folder, fail=None, status=None, skip=(), unsettled=False, summed_by=(0, 1)):
        self.unsettled, self.summed_by = unsettled, summed_by
        self.folder, self.fail, self.status, self.skip = folder, fail, status or {}, skip
        self.calls, self.acks, self.posts = [], {}, 0
        self.gate = RequestGate()
        self.vllm_config = SimpleNamespace(lora_config=None)

    async def post(self, path, body, timeout):
        self.posts += 1
        if path == SYNC:
            body = json.loads(json.dumps(body))
            try:
                results = await run_steps(self, body["steps"], body["update_info"], dict, self.gate)
            except StepFailed as e:
                return 500, str(e)
            return 200, msgspec.json.encode(results).decode()
        assert path == "/collective_rpc", path
        return 200, json.dumps({"results": await self.collective_rpc(body["method"])})

    def called(self, name):
        self.calls.append(name)
        if name in self.status:
            raise RuntimeError(self.status[name])

    async def collective_rpc(self, method, args=()):
        self.called(method)
        if method == "rpg_abort":
            return [{"rank": r, "version": 3, "unsettled": self.unsettled} for r in range(2)]
        if method == "rpg_bind":
            return [{"rank": r, "error": self.status.get("bind", "")} for r in range(2)]
        assert method == "rpg_ack"
        return list(self.acks.values())

    async def update_weights(self, request):
        info = request["update_info"]
        self.called(info["phase"])
        for rank in range(2):
            self.work(rank, info)

    async def wake_up(self, tags):
        self.called(f"wake up {tags}")

    async def pause_generation(self, mode):
        self.called(f"pause, {mode}")

    async def start_weight_update(self):
        self.called("start")

    async def finish_weight_update(self, weight_version):
        assert int(weight_version) >= 0
        self.called("finish")

    async def reset_prefix_cache(self, running_requests_too):
        assert running_requests_too
        self.calls.append("reset the prefix cache")
        return "reset" not in self.status

    async def resume_generation(self):
        self.called("resume")

    def work(self, rank, info):
        ack = {"rank": rank, "ok": True, "mode": "slices", "bytes": 0, "sums": {}}
        ack.update(session=info["session"], phase=info["phase"])
        if self.fail == (info["phase"], rank):
            ack.update(ok=False, error="out of memory")
        elif info["phase"] == "check":
            reader = ShardReader(self.folder)
            try:
                manifest = reader.open(info["place"], info["version"])
                if rank in self.summed_by:
                    ack["sums"] = {n: self.read(reader, n, t, rank) for n, t in manifest.tensors.items()}
            except ShardError as e:
                ack.update(ok=False, error=str(e))
        if self.fail != ("silent", rank):
            self.acks[rank] = ack

    def read(self, reader, name, tensor, rank):
        box = Box.whole(tensor.shape)
        if len(tensor.shape) == 2 and len(self.summed_by) == 2:
            half = tensor.shape[0] // 2
            box = Box((rank * half, 0), (half + rank * (tensor.shape[0] % 2), tensor.shape[1]))
        if name in self.skip:
            return 0, 0
        parts = list(reader.cut(name, box))
        return (
            sum(checksum(p, b.start) for p, b in parts) % MODULUS,
            sum(p.nbytes for p, _ in parts),
        )


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "bridge"
    folder.mkdir(mode=0o700)
    layout = mapping_for(TINY)
    (place,) = grid(TINY, 1, 1)
    params = stage_values(layout, place, 1, random_state_dict(layout))
    pub = SharedMemoryPublisher(folder, place, params, layout, torch.bfloat16)
    return pub, pub.publish(4)


def sync(engine, manifest, version=4, **options):
    return asyncio.run(
        sync_engine(engine.post, manifest, version=version, engine_tensor=2, timeout=5, **options)
    )


def test_a_sync_makes_these_calls_in_this_order(published):
    _, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent)
    report = sync(engine, manifest)
    assert engine.calls == [
        "pause, keep",
        "rpg_abort",
        "start",
        "check",
        "rpg_ack",
        "apply",
        "rpg_ack",
        "finish",
        "reset the prefix cache",
        "resume",
    ]
    assert engine.posts == 4
    assert report.version == 4
    assert report.mode == "slices"
    assert list(report.seconds) == ["pause", "start", "check", "apply", "finish", "resume"]


def test_adapters_are_bound_before_anything_is_served(published):
    _, manifest = published
    for problem in ("", "slots hold [None]"):
        engine = StandInEngine(Path(manifest.place["manifest"]).parent, status={"bind": problem})
        engine.vllm_config.lora_config = object()
        if problem:
            with pytest.raises(ApplyFailed, match=r"worker rank 0: slots hold \[None\]; worker rank 1"):
                sync(engine, manifest)
            assert engine.calls[-2:] == ["finish", "rpg_bind"]
        else:
            sync(engine, manifest)
            assert engine.calls[-4:] == ["finish", "rpg_bind", "reset the prefix cache", "resume"]


def test_a_sleeping_engine_has_weights_before_it_has_a_kv_cache(published):
    """VLLM serves again as soon as all its memory is there: it must not be before the weights are."""
    _, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent)
    report = sync(engine, manifest, asleep=True)
    assert engine.calls[:2] == ["wake up ['weights']", "pause, keep"]
    assert engine.calls[-4:] == ["finish", "wake up ['kv_cache']", "reset the prefix cache", "resume"]
    assert {"wake", "wake KV cache"} < set(report.seconds)


def test_a_sleeping_engine_that_refuses_weights_is_not_resumed(published):
    _, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent, fail=("check", 1))
    with pytest.raises(CheckFailed, match="the engine waits: worker rank 1"):
        sync(engine, manifest, asleep=True)
    assert engine.calls[-1] == "rpg_abort"
    engine.fail = None
    sync(engine, manifest, asleep=True)
    assert engine.calls[-1] == "resume"


def test_a_worker_that_reports_no_checksums_fails_the_sync(published):
    """Although those of the other worker cover every tensor: its own weights are unknown."""
    _, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent, summed_by=(0,))
    with pytest.raises(ApplyFailed, match=r"worker ranks \[1\] reported no checksums; restart the engine"):
        sync(engine, manifest)
    assert "finish" not in engine.calls
    assert "resume" not in engine.calls


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"fail": ("check", 1)}, "worker rank 1: out of memory"),
        ({"fail": ("silent", 0)}, "worker rank 0: did not run check"),
        ({"status": {"check": "broken"}}, "/sync_steps answered 500: check: RuntimeError: broken"),
        ({"skip": ["lm_head.weight"]}, r"lm_head\.weight: workers read 0 bytes"),
    ],
)
def test_failed_checks_leave_the_engine_running(published, engine, message):
    _, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent, **engine)
    with pytest.raises(CheckFailed, match=message):
        sync(engine, manifest)
    assert engine.calls[-2:] == ["rpg_abort", "resume"]


def test_a_flipped_bit_names_tensor_worker_and_file(published):
    pub, manifest = published
    pub._shards["decoder.layers.3.self_attention.linear_proj.weight"].view(torch.int16)[20, 5] ^= 64
    engine = StandInEngine(Path(manifest.place["manifest"]).parent)
    with pytest.raises(
        CheckFailed,
        match=r"model\.layers\.3\.self_attn\.o_proj\.weight: checksum differs .* worker rank 0, 1 "
        r"\(damaged: shard-00000\.bin of trainer rank 0\)",
    ):
        sync(engine, manifest)


def test_a_stale_or_half_written_publication_is_refused(published):
    pub, manifest = published
    engine = StandInEngine(Path(manifest.place["manifest"]).parent)
    with pytest.raises(CheckFailed, match="holds version 4, asked for 5"):
        sync(engine, manifest, version=5)
    pub._word.fill_(-1)
    with pytest.raises(CheckFailed, match="must not be read now"):
        sync(engine, manifest)


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ({"fail": ("apply", 0)}, ApplyFailed),
        ({"status": {"apply": "broken"}}, ApplyFailed),
        ({"status": {"finish": "broken"}}, ApplyFailed),
        ({"status": {"reset": "broken"}}, ApplyFailed),
        ({"status": {"pause, keep": "broken"}}, EngineLost),
        ({"status": {"start": "broken"}}, EngineLost),
        ({"fail": ("check", 0), "status": {"resume": "broken"}}, EngineLost),
        ({"fail": ("check", 0), "unsettled": True}, ApplyFailed),
    ],
)
def test_an_engine_that_cannot_be_trusted_is_not_resumed(published, engine, error):
    _, manifest = published
    resumes = engine.get("status", {}).get("resume")
    engine = StandInEngine(Path(manifest.place["manifest"]).parent, **engine)
    with pytest.raises(error) as e:
        sync(engine, manifest)
    assert e.type is error
    assert ("resume" in engine.calls) == bool(resumes)


def test_an_engine_that_does_not_answer_is_lost(published):
    _, manifest = published

    async def post(path, body, timeout):
        raise ConnectionRefusedError("no such socket")

    with pytest.raises(EngineLost, match="ConnectionRefusedError no such socket"):
        asyncio.run(sync_engine(post, manifest, version=4, engine_tensor=1, timeout=1))


def test_tensors_read_k_times_must_sum_to_k_times_the_checksum(published):
    _, manifest = published
    sums = {n: (manifest.checksum(n), 2 * torch.Size(t.shape).numel()) for n, t in manifest.tensors.items()}
    backwards = dict(reversed(sums.items()))
    for workers in (1, 2, 3):
        acks = [{"rank": r, "sums": backwards if workers == 2 else sums} for r in range(workers)]
        assert compare_checksums(manifest, sum_acks(acks)) == {}
    one_off = {**sums, "model.norm.weight": ((sums["model.norm.weight"][0] + 1) % MODULUS, 48)}
    acks = [{"rank": 0, "sums": sums}, {"rank": 1, "sums": one_off}]
    assert list(compare_checksums(manifest, sum_acks(acks))) == ["model.norm.weight"]
    sums["another"] = sums.pop("model.norm.weight")
    wrong = compare_checksums(manifest, sum_acks([{"rank": 0, "sums": sums}]))
    assert wrong == {"another": "is not published", "model.norm.weight": "workers read 0 bytes of 48"}
