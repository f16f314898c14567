"""The page in a real browser while something happens: a load, an engine that goes, a server that is not as it should be."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

import pytest
from browsing import ENTER, ESCAPE, LEFT, begun, load
from chaos import family
from gateway_server import FOLDER
from patience import until_seen
from webdriver import Browser

from hortus.config import IvyConfig, TulipConfig
from hortus.ivy.app import App
from hortus.ivy.server import serve
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine

pytestmark = pytest.mark.timeout(300)


# --- watch


def test_watching_a_load(page: Browser, run):
    with run(FakeEngine.like(FOLDER, delay_s=0.005)) as server:
        begun(page, server.url)
        assert server.app._watch.watchers == 0
        page.click("nav a:nth-child(2)")
        with load(server.url, ["one two three"] * 20, broken=True):
            page.until("document.querySelectorAll('.plot path[d*=L]').length >= 6")
            assert server.app._watch.watchers == 1
            page.until(  # of one sample: a client that is held up for a second leaves one without requests
                "document.querySelector('.plot:nth-child(8) .values').innerText.includes('model_not_found') &&"
                "[...document.querySelectorAll('.plot .values b')].slice(0, 4)"
                ".filter(b => Number(b.textContent.replace(',', '')) > 0).length === 4"
            )
            page.click("#pause")
            page.run("document.querySelector('#plots').focus()")
            page.press(LEFT, LEFT)
            page.has_text("#moment", "before the last")
            assert "Tokens a second: tokens " in page.run("return document.querySelector('#spoken').textContent")
            assert page.run("return document.querySelectorAll('.plot .mark').length") >= 6
            page.press(ESCAPE)
            page.has_text("#moment", "paused at")
            page.click("#pause")
        assert "One engine, in this process" in page.text("#replicas")
        page.click("nav a:nth-child(1)")
        page.until("document.querySelector('#view-watch').hidden")
        until_seen(lambda: not server.app._watch.watchers)  # nobody looks, so the stream has ended
        page.complaints()  # the load's own refusals are not the page's, but its stream that was broken off may be told


def test_an_engine_that_hangs_and_comes_back(page: Browser, run, monkeypatch):
    monkeypatch.setattr("hortus.ivy.health.PROBE_S", 0.3)
    with run(tulip=TulipConfig(step_timeout_s=0.3)) as server:
        page.open(server.url + "/#watch")
        page.has_text("#state", "ready")
        page.has_text("#replicas", "up")
        server.engine.hold()
        page.has_text("#state", "not ready")
        page.has_text("#notice", "503 until the engine answers again: ")
        page.has_text("#replicas", "does not answer")
        server.engine.release()
        page.has_text("#state", "ready")
        page.until("document.querySelector('#notice').hidden")


def test_an_engine_killed_while_it_is_watched(page: Browser, tmp_path: Path):
    with family(tmp_path, gateways=1, replicas=2) as running:
        page.open(f"http://127.0.0.1:{running.port}/#watch")
        page.until("document.querySelectorAll('#replicas tbody tr').length == 2")
        page.until("document.querySelectorAll('#replicas [data-state=ready]').length == 2")
        assert "gateways may share this port" in page.text("#watch-lead")
        assert "In the engines' processes" in page.text("#plots")
        # Whether a replica comes back within a second or after a minute must not matter to what is told.
        running.children()["tulip-1"].kill()
        page.has_text("#replicas", "once", seconds=60)
        page.until("document.querySelectorAll('#replicas [data-state=ready]').length == 2", seconds=60)
        running.process.send_signal(signal.SIGSTOP)  # nobody starts it again
        running.children()["tulip-1"].kill()
        page.has_text("#replicas", "down", seconds=60)
        assert page.run("return document.querySelectorAll('#replicas [data-state=failing]').length") == 1
        running.process.send_signal(signal.SIGCONT)
        page.has_text("#replicas", "2 times, last", seconds=60)
        page.until("document.querySelectorAll('#replicas [data-state=ready]').length == 2", seconds=60)
        page.open("about:blank")


# --- what a server may be


def test_a_wrong_key_then_the_right_one(page: Browser, run):
    with run(api_keys="right-key") as server:
        page.open(server.url + "/")
        page.until("document.querySelector('#key').open")
        page.type("#key-field", "wrong-key")
        page.press(ENTER)
        page.has_text("#key", "not one of this server's")
        page.click("#key-cancel")
        page.has_text("#state", "key needed")
        page.has_text("#notice", "asks for a key")
        page.click("#key-button")
        page.type("#key-field", "right-key")
        page.press(ENTER)
        page.until("document.querySelector('#tokens')?.dataset.done")
        page.has_text("#state", "ready")
        for language in ("curl", "Python", "JavaScript"):
            page.click(f"#similarity input[value={language}]")
            assert "HORTUS_API_KEY" in page.text("#similarity pre")
        assert "right-key" not in page.run("return document.documentElement.outerHTML")
        assert page.run("return [document.cookie, localStorage.length]") == ["", 0]
        begun(page, server.url)  # kept in this tab
        page.click("nav a:nth-child(2)")
        page.until("document.querySelectorAll('.plot path').length > 0")
        page.click("nav a:nth-child(3)")
        assert "$HORTUS_API_KEY" in page.text("#facts")
        page.run("sessionStorage.clear()")
        assert "401" in str(page.complaints())


def test_a_server_that_is_loading_and_then_stops(page: Browser):
    """Its states from the first to the last, as one page sees them that is open all the time."""
    import asyncio

    told: dict = {}
    up, loaded = threading.Event(), threading.Event()

    async def main() -> None:
        from hortus.tulip.scheduler import Scheduler

        metrics = Metrics()
        app, engine = App(IvyConfig(port=0), metrics), FakeEngine.like(FOLDER)
        scheduler = Scheduler(engine, TulipConfig(), metrics)
        told.update(loop=asyncio.get_running_loop(), stop=asyncio.Event(), engine=engine)

        async def start(address: str) -> None:
            told["url"] = address
            up.set()
            await asyncio.to_thread(loaded.wait, 120)
            await scheduler.start()
            app.open(FOLDER, engine.info, scheduler, probe=scheduler.probe)

        await serve(app, app.config, started=start, stop=told["stop"])
        await scheduler.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert up.wait(60)
        page.open(told["url"] + "/#watch")
        page.has_text("#state", "starting")
        page.has_text("#notice", "still loading")
        loaded.set()
        page.has_text("#served", "mini")
        page.has_text("#state", "ready")
        told["engine"].hold()
        steps = told["engine"].steps
        page.run("fetch('embed', {method: 'POST', body: JSON.stringify({inputs: 'a'})}).catch(() => 0)")
        until_seen(lambda: told["engine"].steps > steps)
        told["loop"].call_soon_threadsafe(told["stop"].set)
        page.has_text("#state", "draining")
        told["engine"].release()
        page.has_text("#state", "no answer")
        page.has_text("#notice", "Trying again")
    finally:
        loaded.set()
        if "loop" in told and thread.is_alive():
            told["engine"].release()
            with contextlib.suppress(RuntimeError):
                told["loop"].call_soon_threadsafe(told["stop"].set)
        thread.join(60)
    assert not thread.is_alive()
    page.complaints()  # a browser notes each 503 and each lost connection


def test_a_full_queue(page: Browser, run):
    with run(FakeEngine.like(FOLDER), TulipConfig(max_queue_tokens=60, in_flight=1)) as server:
        begun(page, server.url)
        server.engine.hold()
        steps = server.engine.steps
        for come in (lambda: server.engine.steps > steps, lambda: server.sample("hortus_queue_tokens") > 0):
            page.run("fetch('embed', {method: 'POST', body: JSON.stringify({inputs: 'a '.repeat(40)})}).catch(() => 0)")
            until_seen(come)  # one runs, one waits
        # Asked again and again, because the page forgets a refusal after three seconds.
        page.run("window.again = setInterval(() => document.querySelector('#similarity button').click(), 1000)")
        page.has_text("#similarity .error", "the queue is full")
        page.has_text("#state", "overloaded")
        page.has_text("#notice", "--max-queue-tokens")
        page.run("clearInterval(window.again)")
        server.engine.release()
        page.has_text("#state", "ready")
        page.complaints()  # of 429


def test_switched_off(page: Browser, run):
    with run(no_page=True) as server:
        page.open(server.url + "/")
        assert "method_not_allowed" in page.text("body")
        assert "405" in str(page.complaints())
