"""LLM judge as a reward: an OpenAI-compatible server (``/chat/completions``) scores responses.

``reward.type: rpg_megatron.rewards.judge:Judge``; it runs in the worker of an async function (``pool``).
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rpg_megatron.rewards.worker_process import NoReward
from rpg_megatron.system.http_client import HttpClient, ServerError, with_retries

logger = logging.getLogger(__name__)

_MAX_BYTES = 4 * 1024**2
"""Size of the largest valid answer."""
_ASK_SECONDS = 10.0
"""Time limit of the request before a run."""
_COUNTS = (
    *("requests", "failures", "skipped", "timeouts", "errors", "garbage", "unreadable"),
    *("tokens", "cost"),
)


class JudgeSettings(BaseModel):
    """The judge's server, the question, and what to do without an answer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str
    """Base URL of the server, such as http://host:8001/v1; or $NAME, an environment variable with the URL,
    which may differ when a run is resumed."""
    model: str
    """Name of the model on the server."""
    question: str
    """The judge's prompt; {prompt}, {response} and {answer} (the reference) are replaced."""
    system: str | None = None
    """System message; null: none."""
    pattern: str = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
    """Regular expression; the first group of its last match in the judge's text is the score."""
    lowest: float = 0.0
    """Score that becomes the reward 0."""
    highest: float = 10.0
    """Score that becomes the reward 1. Scores below ``lowest`` or above ``highest`` are invalid."""
    max_tokens: int = Field(512, ge=1)
    """Maximum tokens of the judge's text."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; 0: greedy."""
    body: dict[str, Any] = {}
    """Further keys of the request, such as sampling parameters of the server."""
    key_variable: str | None = None
    """Environment variable with the server's API key; null: the server needs none."""
    timeout: float = Field(60.0, gt=0)
    """Time limit for one request, in seconds."""
    retries: int = Field(3, ge=0)
    """Number of retries of a request that timed out, failed, or returned no chat completion."""
    backoff: float = Field(1.0, ge=0)
    """Seconds before the first retry; doubles before each further one, up to 30."""
    rest_after: int = Field(8, ge=1)
    """Number of consecutive responses without an answer after which the judge counts as down."""
    rest: float = Field(30.0, ge=0)
    """Seconds for which a judge that is down gets no requests; responses then fail at once."""
    prompt_cost: float = Field(0.0, ge=0)
    """Cost of a million prompt tokens, for the metric ``cost``."""
    output_cost: float = Field(0.0, ge=0)
    """Cost of a million completion tokens."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s@]+|\$\w+", value):
            raise ValueError("must begin with http:// or https://, and hold no user or password")
        return value.rstrip("/")

    @field_validator("question")
    @classmethod
    def _check_template(cls, value: str) -> str:
        if "{response}" not in value:
            raise ValueError("must hold {response}, the place of the text that is judged")
        return value

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as e:
            raise ValueError(f"is no regular expression: {e}") from None
        if not groups:
            raise ValueError("needs a group, in parentheses, around the score")
        return value

    @model_validator(mode="after")
    def _check_range(self) -> JudgeSettings:
        if self.highest <= self.lowest:
            raise ValueError("highest must be above lowest")
        return self


class Judge:
    """Scores one response a call; a response without a score has no reward (``reward.failed``)."""

    def __init__(self, settings: JudgeSettings):
        """Raises ValueError if an environment variable that the settings name is not set."""
        self.server = settings.url
        """The URL as in the settings, for messages."""
        if settings.url.startswith("$"):
            url = _variable(settings.url[1:])
            settings = JudgeSettings.model_validate(settings.model_dump() | {"url": url})
        self._settings = settings
        self._pattern = re.compile(settings.pattern)
        self._http = HttpClient("" if settings.key_variable is None else _variable(settings.key_variable))
        self._failures = 0
        """Number of consecutive responses without an answer."""
        self._down_until = 0.0
        self._warned: set[str] = set()

    async def __call__(self, response: str, answer: str, prompt: str) -> tuple[float, dict[str, float]]:
        """The reward and counts: ``requests``; ``failures``, responses without a score; ``skipped``, those of
        them while the judge was down; ``timeouts``, ``errors`` and ``garbage``, failed requests;
        ``unreadable``, answers without a score; ``tokens``; and ``cost``.

        Raises NoReward if there is no score.
        """
        s, counts = self._settings, dict.fromkeys(_COUNTS, 0.0)
        try:
            if time.monotonic() < self._down_until:
                counts["skipped"] += 1
                raise ServerError(f"no request during the rest after {s.rest_after} failures")
            score = await self._score(self._request(response, answer, prompt), counts)
        except ServerError as e:
            counts["failures"] += 1
            raise NoReward(f"judge {self.server}: {e}", counts) from None
        return (score - s.lowest) / (s.highest - s.lowest), counts

    async def find_problem(self) -> str | None:
        """Ask the server once for its models; returns why it cannot be used, None if it can.

        A server without that route can be used.
        """
        s, variable = self._settings, self._settings.key_variable
        try:
            await self._http.request(
                f"{s.url}/models", seconds=min(s.timeout, _ASK_SECONDS), limit=_MAX_BYTES
            )
        except ServerError as e:
            if e.status in (401, 403):
                key = f"the key in {variable}" if variable else "a request without a key (key_variable)"
                return f"refuses {key} (status {e.status})"
            return None if 0 < e.status < 500 else str(e)
        finally:
            await self._http.close()
        return None

    async def _score(self, body: dict[str, Any], counts: dict[str, float]) -> float:
        """The judge's score. Raises ServerError."""
        s = self._settings

        async def ask() -> str:
            counts["requests"] += 1
            try:
                return await self._ask(body, counts)
            except ServerError as e:
                counts[e.kind] += 1
                self._warn_once(str(e))
                raise

        try:
            text = await with_retries(ask, s.retries, s.backoff)
        except ServerError:
            self._failures += 1
            if self._failures >= s.rest_after:
                self._down_until = time.monotonic() + s.rest
            raise
        self._failures = 0
        return self._read(text, counts)

    def _request(self, response: str, answer: str, prompt: str) -> dict[str, Any]:
        s, values = self._settings, {"prompt": prompt, "response": response, "answer": answer}
        question = re.sub(r"\{(prompt|response|answer)\}", lambda m: values[m[1]], s.question)
        messages = [{"role": "user", "content": question}]
        if s.system is not None:
            messages.insert(0, {"role": "system", "content": s.system})
        sampling = {"max_tokens": s.max_tokens, "temperature": s.temperature}
        return {"model": s.model, "messages": messages} | sampling | s.body

    async def _ask(self, body: dict[str, Any], counts: dict[str, float]) -> str:
        """The judge's text. Raises ServerError."""
        s = self._settings
        url = f"{s.url}/chat/completions"
        reply = await self._http.request(url, body, seconds=s.timeout, limit=_MAX_BYTES)
        try:
            text = reply["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError
        except (LookupError, TypeError):
            raise ServerError("answered with something else than a chat completion") from None
        usage = reply.get("usage")
        used = usage if isinstance(usage, dict) else {}
        read, written = (_count(used.get(key)) for key in ("prompt_tokens", "completion_tokens"))
        counts["tokens"] += read + written
        counts["cost"] += (read * s.prompt_cost + written * s.output_cost) / 1e6
        return text

    def _read(self, text: str, counts: dict[str, float]) -> float:
        matches = list(self._pattern.finditer(text))
        try:
            score = float(matches[-1][1])
        except (IndexError, TypeError, ValueError):
            score = float("nan")
        if not self._settings.lowest <= score <= self._settings.highest:
            counts["unreadable"] += 1
            missing = "no score between lowest and highest where pattern looks for it"
            self._warn_once(missing)
            raise ServerError(missing)
        return score

    def _warn_once(self, problem: str) -> None:
        """Log each kind of failure once: counts do not distinguish a wrong key from a server that is down."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("judge %s: %s (later ones are only counted)", self.server, problem)


def _variable(name: str) -> str:
    if not (value := os.environ.get(name, "")):
        raise ValueError(f"the environment variable {name} is not set; export it")
    return value


def _count(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0
