"""What a person does at the page, for the tests of it in a browser."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import httpx
from webdriver import Browser

ENTER, TAB, CONTROL, LEFT, ESCAPE = "\ue007", "\ue004", "\ue009", "\ue012", "\ue00c"


def begun(page: Browser, url: str) -> None:
    """Opened, and the examples run."""
    page.open(url + "/")
    page.until("document.querySelector('#tokens')?.dataset.done")


def done(page: Browser, card: str, act: Callable[[], None]) -> None:
    """Do something that a card answers, and wait for the answer."""
    before = page.run("return document.getElementById(arguments[0]).dataset.done || '0'", card)
    act()
    page.until("Number(document.getElementById(arguments[0]).dataset.done) > Number(arguments[1])", card, before)


@contextlib.contextmanager
def load(url: str, texts: list[str], broken: bool = False) -> Iterator[None]:
    """A client that asks again and again."""
    over = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            while not over.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    http.post("/v1/embeddings", json={"model": "mini", "input": texts})
                    if broken:
                        http.post("/v1/embeddings", json={"model": "other", "input": "a"})
                over.wait(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
