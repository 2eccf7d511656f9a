"""A Chromium without a window, driven over its DevTools pipe; the standard library suffices.

For PNGs of charts, and for tests that open a report as people do.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_hdp.errors import ConfigError

NAMES = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable", "chrome")
"""Commands that are looked for."""
NO_BROWSER = (
    f"no Chromium or Chrome on the search path (looked for {', '.join(NAMES)}): install one, or leave out --png"
)
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_START = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(f), fcntl.F_DUPFD, 10) for f in sys.argv[1:3]); os.dup2(r, 3); "
    "os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""The browser reads commands from file descriptor 3 and answers on 4; copies above 9 are in nobody's way."""
_SECONDS = 60.0
"""An answer takes no longer."""


def find_chromium() -> str | None:
    """A Chromium or Chrome on the search path."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Browser:
    """One page at a time; a context manager.

    Attributes:
        console: what the page wrote to its console as an error or warning, and exceptions that nobody caught.
        requested: addresses that the page loaded or tried to load.
    """

    def __init__(self, command: str | None = None) -> None:
        """Start it. Raises `ConfigError` if there is none, or it does not start."""
        found = find_chromium() if command is None else command
        if found is None:
            raise ConfigError(NO_BROWSER)
        self.console: list[str] = []
        self.requested: list[str] = []
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(prefix="hdp-report-", ignore_cleanup_errors=True)
        root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
        commands, answers = os.pipe(), os.pipe()
        self._write, self._read = commands[1], answers[0]
        arguments = [found, *_FLAGS, *root, f"--user-data-dir={self._folder.name}", "about:blank"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(commands[0]), str(answers[1]), *arguments],
                pass_fds=(commands[0], answers[1]),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(commands[0])
            os.close(answers[1])
        self._session = ""
        try:
            self._session = self._attach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, ConfigError):
            self._send("Browser.close", {}, browser=True)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        self._folder.cleanup()

    def _attach(self) -> str:
        """Find the page that is open and listen to it."""
        pages = self._call("Target.getTargets", {}, browser=True)["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        answer = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, browser=True)
        self._session = str(answer["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self._session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol. Raises `ConfigError` if the browser refuses it or does not answer."""
        return self._call(method, parameters)

    def _call(self, method: str, parameters: dict[str, Any], *, browser: bool = False) -> dict[str, Any]:
        number = self._send(method, parameters, browser=browser)
        end = time.monotonic() + _SECONDS
        while True:
            message = self._receive(end, method)
            if message.get("id") == number:
                if "error" in message:
                    raise ConfigError(f"the browser refuses {method}: {message['error'].get('message')}")
                result: dict[str, Any] = message.get("result", {})
                return result
            self._note(message)

    def _send(self, method: str, parameters: dict[str, Any], *, browser: bool) -> int:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if not browser:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        return number

    def _receive(self, end: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise ConfigError(f"the browser does not answer within {_SECONDS:.0f} s ({waiting_for})")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise ConfigError(f"the browser ended ({waiting_for}): does it start on this machine?")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page complains of and what it loads."""
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            values = (str(value.get("value", value.get("description"))) for value in parameters["args"])
            self.console.append(f"{parameters['type']}: {' '.join(values)}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(str(parameters["request"]["url"]))

    def resize(self, width: int, height: int = 900, scale: float = 1.0) -> None:
        """Pixels of the window, and device pixels of each; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 640,
        )

    def open(self, file: Path) -> None:
        """Load a file."""
        self.call("Page.navigate", url=file.resolve().as_uri())

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression, a promise's once it is there. Raises `ConfigError` if it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise ConfigError(f"the page: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = _SECONDS) -> None:
        """Until a JavaScript expression is true. Raises `ConfigError` if it never is."""
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            if time.monotonic() > end:
                raise ConfigError(f"the page does not get to {script} within {seconds:.0f} s: {self.console[:3]}")
            time.sleep(0.05)

    def screenshot(self, clip: dict[str, float] | None = None) -> bytes:
        """PNG of the whole page, or of a rectangle of it: x, y, width, height in pixels."""
        area = {} if clip is None else {"clip": {**clip, "scale": 1}}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **area)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        answer = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(answer["data"])


DRAWN = "document.documentElement?.dataset.state === 'drawn'"
"""True in a report once all its charts are drawn."""


@contextlib.contextmanager
def opened(file: Path, width: int, height: int = 900, scale: float = 1.0) -> Iterator[Browser]:
    """A report, open in a browser with all charts drawn.

    Raises:
        ConfigError: no browser, or the report does not get that far.
    """
    with Browser() as browser:
        browser.resize(width, height, scale)
        browser.open(file)
        browser.wait(f"{DRAWN} || document.documentElement?.dataset.state === 'failed'")
        if not browser.evaluate(DRAWN):
            words = browser.evaluate("document.getElementById('trouble').textContent")
            raise ConfigError(f"{file}: {words}; {browser.console[:3]}")
        yield browser
