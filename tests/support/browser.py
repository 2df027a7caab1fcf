"""A real headless Chromium, driven over two pipes by its DevTools protocol. No package needed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The browser's path, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one tab. ``problems`` collects errors, warnings and exceptions of its console."""

    def __init__(self, program: str):
        self._profile = tempfile.mkdtemp(prefix="browser-")
        out_read, self._out = os.pipe()
        self._in, in_write = os.pipe()
        # It reads from 3 and writes to 4. Both ends move to 20 and above first, so neither is overwritten.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (out_read, in_write)]
        os.close(out_read)
        os.close(in_write)
        script = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [f"--user-data-dir={self._profile}"]
        with open(Path(self._profile) / "log", "wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "bash", program, *options, "about:blank"],
                pass_fds=ends,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for end in ends:
            os.close(end)
        self.problems: list[str] = []
        self._number, self._rest, self._session = 0, b"", None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove its profile."""
        try:
            self._send("Browser.close", {}, None)
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
        for handle in (self._in, self._out):
            os.close(handle)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser and wait for its answer."""
        self._send(method, parameters, self._session)
        number = self._number
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Show a file; returns the seconds until its scripts had finished."""
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        start = time.monotonic()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self.run("document.documentElement?.dataset.ready === 'yes'"):
            assert time.monotonic() - start < 60, self.problems
            time.sleep(0.05)
        return time.monotonic() - start

    def wait_for_event(self, name: str) -> None:
        """Wait for an event, such as Page.loadEventFired, without any request in between."""
        while (message := self._receive()).get("method") != name:
            self._note(message)

    def size(self, width: int, height: int) -> None:
        """Size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON would give it."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event at a point of the window: mouseMoved, mousePressed, mouseReleased."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A screenshot as PNG: of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, file: Path) -> None:
        """The page as it is printed, on A4."""
        sheet = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        file.write_bytes(base64.b64decode(sheet["data"]))

    def _send(self, method: str, parameters: dict[str, Any], session: str | None) -> None:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        with open(self._out, "wb", closefd=False) as pipe:
            pipe.write(data)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], 120)
            piece = os.read(self._in, 1 << 20) if ready else b""
            if not piece:
                log = (Path(self._profile) / "log").read_text(errors="replace")
                raise RuntimeError(f"the browser does not answer; its log ends in\n{log[-2000:]}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.problems.append(parameters["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(parameters["args"]))
