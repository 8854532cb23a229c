"""A page in headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("Page", "opened_browser")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A tab. What it asked the network for, and what went wrong in it, is kept.

    :ivar requests: addresses that it asked for, in their order.
    :ivar errors: uncaught errors, errors of the console, and what its own rule forbade.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._commands = commands
        self._replies = os.fdopen(replies, "rb")
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        """Open a file, and wait until it is loaded. ``width`` is in CSS pixels; a narrow page is a phone's."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.prefer(scheme)
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._read())

    def prefer(self, scheme: str) -> None:
        """The colours that the system prefers: ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, program: str) -> Any:
        """The value of an expression in the page; of a promise, what it becomes."""
        found = self.call("Runtime.evaluate", expression=program, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.run(f"{found}.map((one) => one.textContent.trim())"))

    def type_into(self, selector: str, text: str) -> None:
        """Write into a field, or choose in a list, as a user does."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        self.run(f"{field}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (reply := self._read()).get("id") != self._number:
            self._note(reply)
        assert "error" not in reply, reply["error"]
        return dict(reply["result"])

    def close(self) -> None:
        self._replies.close()
        os.close(self._commands)

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return dict(json.loads(data))

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in {"error", "warning", "assert"}:
            self.errors.append(str(values["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(values["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True


@contextmanager
def opened_browser(folder: Path) -> Iterator[Page]:
    """A browser of its own, with its files in ``folder``. It has ended after the ``with`` block."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: neither chromium nor chromium-browser nor google-chrome is in PATH")

    read_commands, commands = os.pipe()
    replies, write_replies = os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read_commands, write_replies)]
    os.close(read_commands)
    os.close(write_replies)

    def take_pipes() -> None:  # the browser reads from descriptor 3 and writes to 4
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'browser'}", "about:blank"]
    how: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    how |= {"env": os.environ | {"HOME": str(folder)}, "start_new_session": True, "pass_fds": (3, 4)}
    process = subprocess.Popen(command, preexec_fn=take_pipes, **how)
    for fd in theirs:
        os.close(fd)
    try:
        page = Page(commands, replies)
        try:
            yield page
            page.call("Browser.close")
        finally:
            page.close()
            process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
