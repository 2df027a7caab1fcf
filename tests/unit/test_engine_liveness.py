"""A hung engine is distinguished from a busy one: by its core's answer, or by the marks of its workers.

Why: the core answers nothing in the middle of a long weight update or prefill. Cores are stand-ins. Not
covered: that a real core answers and real workers leave marks (tests/integration/test_rollout_engine.py,
test_bridge_vllm.py), what follows from a hang (test_engine_pool.py).
"""

import asyncio
import os
from pathlib import Path

import pytest

from rpg_megatron.bridge.vllm import liveness
from rpg_megatron.bridge.vllm.liveness import ProgressMark, wait_for_progress


class Core:
    """vLLM's engine client: answers, fails, or hangs."""

    def __init__(self, error: Exception | None = None, hangs: bool = False):
        self.error, self.hangs, self.cancelled = error, hangs, False

    async def is_paused(self) -> bool:
        try:
            await asyncio.sleep(600 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return False


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_POLL_SECONDS", 0.01)


def test_an_answer_of_the_core_is_enough(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(wait_for_progress(Core(), ProgressMark(tmp_path)), 10))
    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(wait_for_progress(Core(RuntimeError("dead")), ProgressMark(tmp_path)))


def test_a_mark_of_a_worker_is_enough_and_an_old_one_is_not(tmp_path: Path) -> None:
    worker, server, core = ProgressMark(tmp_path), ProgressMark(tmp_path), Core(hangs=True)
    worker.mark()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    os.utime(file, (1, 1))

    async def scene() -> None:
        waiting = asyncio.create_task(wait_for_progress(core, server))
        assert not (await asyncio.wait([waiting], timeout=0.1))[0]
        worker.mark()  # too early to touch the file again
        assert not (await asyncio.wait([waiting], timeout=0.1))[0]
        worker._marked = 0.0
        worker.mark()
        async with asyncio.timeout(10):
            await waiting
        await asyncio.sleep(0)

    asyncio.run(scene())
    assert core.cancelled


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    progress = ProgressMark(tmp_path / "gone")
    progress.mark()
    assert progress.last() == 0
