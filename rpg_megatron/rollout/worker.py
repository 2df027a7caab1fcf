"""A sampler worker: generates groups on engines, detokenises and grades responses, keeps the trajectories.

With ``rollout.workers: 1`` it runs inside the sampler's process. With more, each is a process of its own,
``python -m rpg_megatron.rollout.worker RUN_DIR WORK_DIR NUMBER ADDRESS STOP_TOKEN...``, which the sampler
starts and restarts. It serves the sampler at a unix socket in WORK_DIR. The data-parallel leaders fetch their
trajectories there too, or at ADDRESS if that is not empty.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec

from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.data.prompts import TextCodec, load_codec
from rpg_megatron.data.rollout_files import iter_rollouts, write_rollouts
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineClient, EngineError, EngineUnavailable
from rpg_megatron.engine.process import engine_address
from rpg_megatron.engine.restarts import incarnation_of
from rpg_megatron.evaluation.answer_classes import classify_answers
from rpg_megatron.rewards.failures import MOST, FailureCount, RewardFailure, first_of_each
from rpg_megatron.rewards.grader import Grader
from rpg_megatron.rewards.reward import Score, Scorer
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.episode_pool import EpisodePool, EpisodeRunner, LocalEpisode
from rpg_megatron.rollout.episode_scores import EpisodeRewards
from rpg_megatron.rollout.gateway import Gateway
from rpg_megatron.rollout.groups import (
    Generated,
    GroupAnswers,
    GroupScores,
    GroupTask,
    by_response,
    scores_of,
)
from rpg_megatron.rollout.running_group import RunningGroup
from rpg_megatron.rollout.seeds import segment_seed
from rpg_megatron.rollout.teacher_client import TeacherClient
from rpg_megatron.rollout.worker_files import CODEC
from rpg_megatron.system.http_client import ServerError
from rpg_megatron.system.messages import Server, methods_of
from rpg_megatron.system.process_groups import WARNINGS

_TOKENS_PER_REQUEST = 4096
"""Token budget of one request to an engine; a request is for at least one response."""
logger = logging.getLogger("rpg_megatron.sampler")


class Worker:
    """Generates and grades groups, and keeps their trajectories until ``drop``. For one event loop."""

    def __init__(
        self,
        settings: Settings,
        codec: TextCodec,
        engines: Sequence[EngineClient],
        work: Path,
        stop_token_ids: Sequence[int],
        episode: EpisodeRunner | None = None,
    ):
        """codec: the tokenizer. work: the folder shared with the launcher. stop_token_ids: tokens that end a
        response. episode: None: that of the settings.
        """
        self._codec, self._engines, self._work, self._stops = codec, engines, work, list(stop_token_ids)
        self._settings = settings
        rollout, reward = settings.rollout, settings.reward
        self._stop_texts = rollout.stop
        self._max_sequences = settings.engine.most_sequences
        self._ahead = rollout.ahead > 0
        self._scorer = Scorer(reward, rollout.max_response_tokens, rollout.workers)
        # Its own, so that ``reward/timeouts`` counts the grading of responses only.
        self._comparer = Grader(workers=1, deadline=reward.deadline)
        self._groups: dict[int, RunningGroup] = {}
        self._teacher: TeacherClient | None = None
        if settings.teacher is not None and settings.teacher.url is not None:
            vocab = read_model_shape(settings.model.path).vocab_size
            self._teacher = TeacherClient(settings.teacher, rollout.workers, vocab)
        self._episode: EpisodeRunner | None = episode
        self._rewards = EpisodeRewards(rollout.episode)
        self._vocab = 0
        if rollout.episode is not None:
            self._episode = episode or EpisodePool(settings, work / CODEC)
            self._vocab = read_model_shape(settings.model.path).vocab_size
        self._repeatable = self._scorer.repeatable and rollout.episode is None
        """Whether a group that is sampled again by the same weights gets the same scores."""
        self._logged: set[tuple[str, ...]] = set()
        """Kinds of failures of the reward that are in the log."""
        self._gateway = Gateway(settings, codec, work, self._stops) if rollout.episode else None
        self._arrived = asyncio.Event()
        """Set when a group was added."""

    async def generate(self, task: GroupTask, engine: int, incarnation: int) -> Generated:
        """Generate the missing responses of a group on one engine; grading starts when they are complete.

        A request is for a few responses, so that answers arrive over time. incarnation: of the engine;
        answers of another one are discarded. Raises EngineError if the engine refuses the request.
        """
        if self._gateway is not None:
            await self._gateway.start()
        group = self._group(task)
        if group.task.version > task.version:  # discarded meanwhile, and submitted again
            return Generated(False)
        resent, failure, halted = 0, "", False

        async def request(due: list[Conversation]) -> None:
            nonlocal resent, failure, halted
            first, turns = due[0], [conversation.turn for conversation in due]
            try:
                samples = await self._engines[engine].generate(
                    first.row.context,
                    n=len(due),
                    max_tokens=first.room,
                    seed=segment_seed(task.seed + first.number, first.place),
                    stop_token_ids=self._stops,
                    temperature=task.temperature,
                    top_p=task.top_p,
                    top_k=task.top_k,
                    stop=self._stop_texts,
                    logprobs=task.logprobs,
                    interruptible=task.interruptible,
                    routes_from=first.row.computed,
                )
                if incarnation_of(self._work, engine) != incarnation:
                    raise EngineUnavailable("")  # the answer may be from a restarted engine, without weights
            except EngineUnavailable as e:
                failure, resent, halted = failure or str(e), resent + 1, True
                return
            finally:
                for conversation in due:
                    conversation.requested = False
                group.changed.set()
            for conversation, turn, sample in zip(due, turns, samples, strict=True):
                if self._ahead and sample.version is None and len(sample.tokens):
                    raise EngineError(
                        f"engine {engine} does not report which weights sampled a response, as rollout.ahead "
                        "needs; start it with the vLLM plug-in of this package, or set rollout.ahead to 0"
                    )
                halted = halted or sample.finish == "abort"
                if conversation.turn is turn:  # else the episode has cancelled it
                    conversation.add(sample)

        limit = min(self._max_sequences, max(1, _TOKENS_PER_REQUEST // task.max_tokens))
        running: set[asyncio.Task[None]] = set()
        try:
            while not group.complete:
                if not halted:
                    running |= {asyncio.create_task(request(due)) for due in group.take_due(limit)}
                elif not running:
                    break  # the rest needs another engine, or new weights
                group.changed.clear()
                await group.changed.wait()
                for request_task in [r for r in running if r.done()]:
                    running.remove(request_task)
                    request_task.result()
        finally:
            for request_task in running:
                request_task.cancel()
        complete = group.complete and not group.dropped
        if complete and group.grading is None:
            group.grading = asyncio.create_task(self._grade(group))
        return Generated(complete, resent, failure)

    async def score(self, ticket: int) -> GroupScores:
        """The scores of a complete group, when it is graded."""
        scores, failures = scores_of(await self._graded(ticket)), self._groups[ticket].failures
        return msgspec.structs.replace(scores, repeatable=self._repeatable, failures=failures)

    async def answers(self, ticket: int) -> GroupAnswers:
        """Texts and verdicts of a complete group, when it is graded."""
        responses = by_response(await self._graded(ticket))
        last = [rows[-1] for rows in responses]
        correct, extracted = [t.correct for t in last], [t.extracted for t in last]
        return GroupAnswers(
            responses=[t.text for t in last],
            correct=correct,
            extracted=extracted,
            classes=await classify_answers(extracted, correct, self._comparer),
            lengths=[sum(t.sampled for t in rows) for rows in responses],
            finishes=[t.finish for t in last],
        )

    async def drop(self, tickets: list[int]) -> None:
        """Discard groups."""
        for ticket in tickets:
            if group := self._groups.pop(ticket, None):
                group.drop()

    async def save(self, tickets: list[int], file: Path) -> None:
        """Write complete groups to a rollout file, in which ``group`` is the ticket. Raises UserError."""
        trajectories = [t for ticket in tickets for t in await self._graded(ticket)]
        try:
            await asyncio.to_thread(write_rollouts, file, trajectories)
        except OSError as e:
            raise UserError(
                f"{file} cannot be written ({e}); free disk space, then rerun the same command"
            ) from e

    async def load(self, tickets: list[int], file: Path) -> list[GroupScores]:
        """Read groups from a file that ``save`` wrote. Raises UserError if it is missing or damaged."""
        by_ticket: dict[int, list[Trajectory]] = {ticket: [] for ticket in tickets}
        for t in iter_rollouts(file):
            if t.group in by_ticket:
                by_ticket[t.group].append(t)
        for ticket, trajectories in by_ticket.items():
            if not trajectories:
                raise UserError(f"{file}: group {ticket} is missing; restore the file")
            self._groups[ticket] = group = RunningGroup(_task_of(ticket, trajectories))
            group.graded.set_result(trajectories)
        self._arrived.set()
        return [scores_of(trajectories) for trajectories in by_ticket.values()]

    async def fetch(self, tickets: list[int], rows: list[int]) -> list[Trajectory]:
        """Trajectories of complete groups, by their number in the group; waits for groups that are generated
        again.
        """
        return [(await self._graded(ticket))[row] for ticket, row in zip(tickets, rows, strict=True)]

    async def counts(self) -> dict[str, float]:
        """Metrics ``reward/*`` since the last call: failures, and counts of reward functions; and ``env/*``
        of the gateway.
        """
        return self._scorer.pop_counts()

    def close(self) -> None:
        """End the reward workers."""
        self._scorer.close()
        self._comparer.close()
        if self._teacher is not None:
            self._closing = asyncio.ensure_future(self._teacher.close())  # a reference, until the loop ends
        if self._gateway is not None:
            self._gateway.close()
        if isinstance(self._episode, EpisodePool):
            self._episode.close()

    def _group(self, task: GroupTask) -> RunningGroup:
        known = self._groups.get(task.ticket)
        if known is not None and known.task.version >= task.version:
            return known
        if known is not None:
            known.drop()
        group = self._groups[task.ticket] = RunningGroup(task)
        episode = self._episode if task.graded else None
        gateway = self._gateway if episode else None
        group.start(episode or LocalEpisode(), self._codec, self._scorer, self._vocab, gateway)
        self._arrived.set()
        return group

    async def _graded(self, ticket: int) -> list[Trajectory]:
        """A group's trajectories; waits for it if this worker was restarted and does not have it yet."""
        while ticket not in self._groups:
            self._arrived.clear()
            await self._arrived.wait()
        return await asyncio.shield(self._groups[ticket].graded)

    async def _grade(self, group: RunningGroup) -> None:
        try:
            trajectories = await self._trajectories(group)
        except Exception as e:
            group.graded.set_exception(e)
            return
        group.conversations.clear()
        if not group.graded.done():
            group.graded.set_result(trajectories)

    async def _trajectories(self, group: RunningGroup) -> list[Trajectory]:
        """The graded responses of a group. Raises the error of an episode."""
        task, results = group.task, group.results()
        responses = [conversation.response() for conversation in group.conversations]
        if not task.graded:
            scores = [Score(0.0, False, None, "not graded", {})] * len(responses)
        else:
            results, run_scores = self._rewards.complete(results, responses, task.prompt_id), None
            if self._rewards.needs_run_scores(results):
                run_scores = await self._scorer.score(
                    responses, task.answer, task.context, first_only=task.correctness_only
                )
            failures = [conversation.failures for conversation in group.conversations]
            scores = self._rewards.scores(results, run_scores, failures)
        each = zip(group.conversations, responses, scores, strict=True)
        rows = [conversation.trajectories(response, score) for conversation, response, score in each]
        if task.graded:
            if self._teacher is not None and not task.set:
                unanswered = await asyncio.gather(*map(self._ask_teacher, rows))
                scores = [
                    s._replace(failures=s.failures + u) for s, u in zip(scores, unanswered, strict=True)
                ]
            group.failures = self._count_failures(task, scores)
        return list(chain.from_iterable(rows))

    async def _ask_teacher(self, rows: list[Trajectory]) -> tuple[RewardFailure, ...]:
        """Set ``anchor`` of a response's rows; returns the failure if the teacher's server gives none."""
        assert self._teacher is not None
        try:
            await asyncio.gather(*map(self._teacher.score, rows))
        except ServerError as e:
            return (RewardFailure("teacher", "error", f"the server {e}"),)
        return ()

    def _count_failures(self, task: GroupTask, scores: list[Score]) -> FailureCount:
        """Count the failures of a group; the first of each kind is logged at once."""
        failed = [score.failures for score in scores if score.failures]
        if not failed:
            return FailureCount(task.set, 0, task.samples)
        prompt = self._codec.decode(task.prompt.tolist())
        first = [f.at(task.set, task.prompt_id, prompt) for f in first_of_each(sum(failed, ()))]
        for failure in first:
            if failure.key not in self._logged and len(self._logged) < MOST:
                self._logged.add(failure.key)
                logger.warning("the reward failed: %s (later ones are only counted)", failure)
        return FailureCount(task.set, len(failed), task.samples, first)


def _task_of(ticket: int, group: list[Trajectory]) -> GroupTask:
    first = group[0]
    return GroupTask(
        ticket,
        first.prompt_id,
        first.prompt,
        first.answer,
        len(by_response(group)),
        first.seed,
        max_tokens=0,
        version=int(first.versions.max(initial=0)),
    )


# -- the process ---------------------------------------------------------------------------------------------


def worker_socket(work: Path, number: int) -> Path:
    """Unix socket at which worker ``number`` listens."""
    return work / f"worker-{number}.sock"


def engine_clients(settings: Settings, work: Path, token: str) -> list[EngineClient]:
    """A client for each engine of the run."""
    replay = settings.training.router_replay == "rollout"
    experts = read_model_shape(settings.model.path).experts if replay else None
    timeout = settings.engine.request_timeout
    return [
        EngineClient(i, engine_address(work, i), token, timeout=timeout, experts=experts)
        for i in range(settings.engine.replicas)
    ]


async def _run(
    settings: Settings, work: Path, number: int, address: str, stops: list[int], token: str
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, stop.set)
    for warning in WARNINGS:  # schedulers signal all processes of a job; the sampler still needs this one
        loop.add_signal_handler(warning, lambda: None)
    engines = engine_clients(settings, work, token)
    codec = load_codec(work / CODEC, settings.model.path)
    worker = Worker(settings, codec, engines, work, stops)
    gc.freeze()  # as in the sampler

    async def where() -> str:
        return listening

    server = Server(token, methods_of(Worker, worker, where=where))
    listening = server.listen(f"ipc://{worker_socket(work, number)}")
    if address:
        listening = server.listen(address)
    serving = asyncio.create_task(server.serve())
    await stop.wait()
    serving.cancel()
    worker.close()
    for engine in engines:
        await engine.close()


def main() -> int:
    """Run the process; returns its exit code: 2 after a UserError, whose message is the log's last line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        run, work, number, address = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        settings, stops = load_settings(run / "config.yaml"), [int(token) for token in sys.argv[5:]]
        asyncio.run(_run(settings, work, number, address, stops, os.environ[TOKEN_VARIABLE]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
