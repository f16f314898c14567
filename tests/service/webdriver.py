"""A headless Chromium, driven over the W3C WebDriver protocol: as much of it as the page's tests need, on httpx.

Typing goes through the DevTools protocol (`Input.insertText`), because chromedriver's own keys know no emoji.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

DRIVERS = ("chromedriver", "/usr/lib/chromium/chromedriver")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb", "--lang=en",
)  # fmt: skip


def missing() -> str | None:
    """What of a browser and its driver this machine lacks."""
    for what, names in ("chromedriver", DRIVERS), ("chromium", BROWSERS):
        if not any(map(shutil.which, names)):
            return f"no {what} on this machine; Debian and Ubuntu: apt-get install chromium chromium-driver"
    return None


def _found(names: tuple[str, ...]) -> str:
    return next(path for name in names if (path := shutil.which(name)))


class Browser:
    """One session: one window with one page. What a script throws, and what an element lacks, is an AssertionError here."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        options = {"binary": _found(BROWSERS), "args": list(FLAGS)}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        wanted["timeouts"] = {"script": 120_000, "pageLoad": 120_000}  # ms
        self._at = ""
        self._at = f"/session/{self._call('POST', '/session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def _call(self, method: str, path: str, **body: Any) -> Any:
        answer = self._http.request(method, self._at + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value['error']}: {value['message']}"
        return value

    def quit(self) -> None:
        self._call("DELETE", "")

    def open(self, url: str) -> None:
        self._call("POST", "/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """The value of a script's `return`."""
        return self._call("POST", "/execute/sync", script=script, args=args)

    def run_async(self, script: str, *args: Any) -> Any:
        """What the body of an async function returns."""
        wrapped = (
            "const done = arguments[arguments.length - 1]; const args = [...arguments].slice(0, -1);"
            f"(async (...args) => {{ {script} }})(...args).then(done, (e) => done({{failed: String(e)}}))"
        )
        value = self._call("POST", "/execute/async", script=wrapped, args=args)
        assert not (isinstance(value, dict) and "failed" in value), value
        return value

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", cmd=command, params=params)

    def until(self, script: str, *args: Any, seconds: float = 60) -> Any:
        """Wait until a script's expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}", *args)):
            assert time.monotonic() < end, f"it never came: {script} {args}\n{self.text('body')}"
            time.sleep(0.03)
        return value

    def text(self, css: str) -> str:
        """The text of an element as it is seen."""
        return self.run("return document.querySelector(arguments[0]).innerText", css)

    def has_text(self, css: str, text: str, seconds: float = 60) -> None:
        self.until("document.querySelector(arguments[0])?.innerText.includes(arguments[1])", css, text, seconds=seconds)

    def _element(self, css: str) -> str:
        return self._call("POST", "/element", using="css selector", value=css)[ELEMENT]

    def click(self, css: str) -> None:
        self._call("POST", f"/element/{self._element(css)}/click")

    def type(self, css: str, text: str) -> None:
        """Put the focus into a field and type over what it holds."""
        self.run("const f = document.querySelector(arguments[0]); f.focus(); f.select()", css)
        self.devtools("Input.insertText", text=text)

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus, each pressed and let go; \\ue00X as WebDriver names them."""
        self.keys([(kind, key) for key in keys for kind in ("keyDown", "keyUp")])

    def keys(self, events: list[tuple[str, str]]) -> None:
        """(keyDown or keyUp, key), in order."""
        told = [{"type": kind, "value": key} for kind, key in events]
        self._call("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": told}])

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def scheme(self, which: str) -> None:
        """light or dark"""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": which}])

    def picture(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked: errors and warnings, refused requests among them."""
        return [
            e["message"] for e in self._call("POST", "/se/log", type="browser") if e["level"] in ("SEVERE", "WARNING")
        ]


@contextlib.contextmanager
def driver() -> Iterator[Callable[[], Browser]]:
    """Makes browsers; all are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="hortus-browser-", ignore_cleanup_errors=True) as home:
        log = Path(home) / "log"
        environ = os.environ | {"HOME": home, "TMPDIR": home}
        with log.open("wb") as out:
            process = subprocess.Popen([_found(DRIVERS), "--port=0"], stdout=out, stderr=out, env=environ)
        made: list[Browser] = []
        try:
            end = time.monotonic() + 60
            while not (port := re.search(r"started successfully on port (\d+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.02)
            with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=150, trust_env=False) as http:

                def make() -> Browser:
                    made.append(Browser(http))
                    return made[-1]

                yield make
                for browser in made:
                    browser.quit()
        finally:
            process.terminate()
            process.wait(20)
