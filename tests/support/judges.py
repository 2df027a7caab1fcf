"""A stand-in for a judge's server: a word of the question decides its behaviour."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

HEADERS = {307: "location: /elsewhere\r\n", 429: "retry-after: {}\r\n"}
"""By status."""
GARBAGE = (b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}')


class StandInJudge:
    """HTTP/1.1 on a port of this machine, in a thread.

    Words: "slow" answers after 60 s, "half" sends half of an answer, "broken" status 500, "refused" status
    401, "busy" 429, "moved" another place, "garbage" something else than a chat, "dies" ends the connection,
    "vague" a text without a score, "long" 4 MiB, "too long" a byte more, "once" fails the first time; any
    other text gets its number of characters as the score.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: Counter[str] = Counter()
        """Requests by the question."""
        self.most = self._running = 0
        """Requests at a time."""
        self.delay = 0.0
        self.retry_after = "7"
        """Header of the answer to "busy"."""
        self.keys: set[str] = set()

    def question(self, text: str) -> str:
        """The question that has this text."""
        return next(question for question in self.requests if text in question)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.lower().split("\r\n")[1:-2])
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                self.keys.add(fields.get("authorization", ""))
                self._running += 1
                self.most = max(self.most, self._running)
                try:
                    if "text" in body:  # a classifier of another protocol
                        status, answer = 200, b'{"good": 0.75}'
                    else:
                        status, answer = await self.answer(body["messages"][-1]["content"], fields)
                finally:
                    self._running -= 1
                kind = "content-type: application/json\r\n" + HEADERS.get(status, "").format(self.retry_after)
                writer.write(f"HTTP/1.1 {status} x\r\n{kind}content-length: {len(answer)}\r\n\r\n".encode())
                half = b'"half"' in answer
                writer.write(answer[: len(answer) // 2] if half else answer)
                await writer.drain()
                if status == 0 or half:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def answer(self, question: str, fields: dict[str, str]) -> tuple[int, bytes]:
        self.requests[question] += 1
        await asyncio.sleep(60 if "slow" in question else self.delay)
        if "dies" in question:
            raise ConnectionError
        if "broken" in question or ("once" in question and self.requests[question] == 1):
            return 500, json.dumps({"error": fields}).encode()  # a server that shows the key
        if "refused" in question:
            return 401, b"{}"
        if "busy" in question or "moved" in question:
            return 429 if "busy" in question else 307, b"{}"
        if "garbage" in question:
            return 200, GARBAGE[self.requests[question] % len(GARBAGE)]
        text = "I like it" if "vague" in question else f"It is fine. Score: {len(question)}"
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        message = {"choices": [{"message": {"content": text}}], "usage": usage}
        answer = json.dumps(message | ({"half": 1} if "half" in question else {})).encode()
        if "long" in question:  # JSON may begin with spaces
            answer = answer.rjust((4 << 20) + ("too" in question))
        return 200, answer


@contextmanager
def stand_in_judge() -> Iterator[StandInJudge]:
    """One that listens."""
    judge, loop = StandInJudge(), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(judge.connection, "127.0.0.1", 0))
    judge.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield judge
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for connection in (connections := asyncio.all_tasks(loop)):
            connection.cancel()
        if connections:
            loop.run_until_complete(asyncio.wait(connections))
        loop.close()
