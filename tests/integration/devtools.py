"""Headless Chromium for tests, spoken to over its own pipe.

The DevTools protocol over two file descriptors (`--remote-debugging-pipe`) needs no port and no package: messages are
JSON that end with a zero byte. The thing to watch: answers and events arrive on one pipe, so everything that is read
passes through `_next`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PIPES = """import os, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
os.dup2(int(sys.argv[2]), 4, inheritable=True)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class DevToolsError(RuntimeError):
    """The browser refused a command, an expression threw, or it did not answer."""


class Browser:
    """One browser process, for `with`."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="weightsync-chromium-", ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The descriptors' numbers are fixed, so a small process moves them in place before it becomes the browser.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _PIPES, str(commands), str(answers)),
                executable,
                *("--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"),
                f"--user-data-dir={self._profile.name}",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has no sandbox to go into
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = bytearray()
        self._count = 0
        self.events: list[dict[str, Any]] = []
        """Everything that was not an answer, oldest first."""

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close", timeout_s=5)
            self._process.wait(10)
        except (DevToolsError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def page(self, width: int = 1000, height: int = 900, *, dark: bool = False, scripts: bool = True) -> Page:
        """A new tab of that size in CSS pixels."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.call("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        return page

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None, timeout_s: float = 30
    ) -> dict[str, Any]:
        """The result of a command.

        Raises:
            DevToolsError: it was refused, or not answered in time.
        """
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError as error:
            raise DevToolsError(f"{method}: the browser is gone") from error
        deadline = time.monotonic() + timeout_s
        while (answer := self._next(deadline, method)).get("id") != number:
            if "method" in answer:
                self.events.append(answer)
        if "error" in answer:
            raise DevToolsError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise DevToolsError(f"{method}: no answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise DevToolsError(f"{method}: the browser ended")
            self._buffer += part
        message, _, rest = bytes(self._buffer).partition(b"\0")
        self._buffer = bytearray(rest)
        found: dict[str, Any] = json.loads(message)
        return found


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def open(self, url: str, timeout_s: float = 30) -> None:
        """Go there, and wait until it has loaded."""
        before = len(self._browser.events)
        error = self.call("Page.navigate", {"url": url}).get("errorText")
        if error:
            raise DevToolsError(f"{url}: {error}")
        deadline = time.monotonic() + timeout_s
        while not any(e["method"] == "Page.loadEventFired" for e in self._own(before)):
            if time.monotonic() > deadline:
                raise DevToolsError(f"{url}: not loaded after {timeout_s} s")
            time.sleep(0.02)
            self.call("Page.getFrameTree")

    def html(self) -> str:
        """The document as the browser holds it now; works without scripts too."""
        for _ in range(5):
            root = self.call("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
            # A document that reloads itself may be another one by now.
            with contextlib.suppress(DevToolsError):
                return str(self.call("DOM.getOuterHTML", {"nodeId": root})["outerHTML"])
        raise DevToolsError("the document is exchanged faster than it can be read")

    def value(self, expression: str) -> Any:
        """What an expression in the page is, by value; of a promise, what it becomes."""
        how = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", how)
        if "exceptionDetails" in found:
            raise DevToolsError(f"{expression}: {found['exceptionDetails'].get('exception', found)}")
        return found["result"].get("value")

    def text(self, selector: str) -> str | None:
        """The text of the first element that a selector finds; None if there is none."""
        found: str | None = self.value(f"document.querySelector({json.dumps(selector)})?.textContent.trim() ?? null")
        return found

    def wait(self, expression: str, expected: Any = True, timeout_s: float = 10) -> None:
        """Until an expression has a value.

        Raises:
            DevToolsError: it has another one for too long.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.value(expression)) != expected:
            if time.monotonic() > deadline:
                raise DevToolsError(f"{expression} is {found!r}, not {expected!r}, after {timeout_s} s")
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What a person would see as errors in the console: exceptions, and what a policy refused."""
        found = []
        self.call("Page.getFrameTree")  # whatever was said before its answer has been read then
        for event in self._own(0):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is visible, or of the whole page."""
        picture = self.call(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole, **self._clip(whole)}
        )
        path.write_bytes(base64.b64decode(picture["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def _own(self, since: int) -> list[dict[str, Any]]:
        return [e for e in self._browser.events[since:] if e.get("sessionId") == self._session]
