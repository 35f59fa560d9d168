"""Firefox for the viewer's tests, driven by WebDriver BiDi.

Playwright supports only the newest release of Firefox, which isn't Debian's firefox-esr, and Selenium needs
geckodriver, which Debian doesn't have. Firefox itself speaks BiDi over a WebSocket
(https://w3c.github.io/webdriver-bidi), of which the tests need a few commands.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import websocket

from tests.waiting import HANG

FIREFOX = os.environ.get("MANYHEADS_FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")
MISSING = "Firefox isn't installed: apt-get install firefox-esr"


class Firefox:
    """A headless Firefox with one page. `errors` has the messages of console.error and uncaught exceptions.

    Args:
        profile: A new folder for the profile.
    """

    def __init__(self, profile: Path) -> None:
        assert FIREFOX is not None
        profile.mkdir()
        self.errors: list[str] = []
        self._sent = 0
        self._process = subprocess.Popen(
            [FIREFOX, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        address = next(found[0] for line in self._process.stderr if (found := re.search(r"ws://\S+", line)))
        self._socket = websocket.create_connection(f"{address}/session", timeout=HANG, suppress_origin=True)
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded"])
        self._context = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def send(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv())).get("id") != self._sent:
            entry = message.get("params", {})
            if message.get("method") == "log.entryAdded" and entry["level"] == "error":
                self.errors.append(entry["text"])
        assert message["type"] == "success", message
        return message["result"]

    def open(self, url: str, width: int, height: int) -> None:
        """Open a page in a viewport of a size in pixels."""
        size = {"width": width, "height": height}
        self.send("browsingContext.setViewport", context=self._context, viewport=size)
        self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, through JSON."""
        result = self.send(
            "script.evaluate",
            expression=f"JSON.stringify(({expression}) ?? null)",
            target={"context": self._context},
            awaitPromise=True,
        )
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def wait_until(self, expression: str) -> Any:
        """Return the value of a JavaScript expression once it is true."""
        end = time.monotonic() + HANG
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"still false after {HANG} s: {expression}"
            time.sleep(0.05)
        return value

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Move the pointer to a place in the viewport, and click there if `click`."""
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "x": round(x), "y": round(y)}]
        if click:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._act({"type": "pointer", "id": "mouse", "actions": actions})

    def press(self, key: str) -> None:
        """Press a key."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def screenshot(self, path: Path) -> None:
        """Save a PNG of the viewport."""
        png = self.send("browsingContext.captureScreenshot", context=self._context)["data"]
        path.write_bytes(base64.b64decode(png))

    def close(self) -> None:
        """Close the browser."""
        self.send("browser.close")
        self._socket.close()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait(HANG)

    def _act(self, source: dict[str, Any]) -> None:
        self.send("input.performActions", context=self._context, actions=[source])
