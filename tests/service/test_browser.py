"""The page in a real browser, headless: typed into, watched under load, and shown everything that may go wrong."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from chaos import family
from gateway_server import FOLDER, Server
from patience import until_seen
from webdriver import Browser, driver, missing

from hortus.config import IvyConfig, TulipConfig
from hortus.ivy.app import App
from hortus.ivy.server import serve
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine

pytestmark = pytest.mark.timeout(300)
ENTER, TAB, CONTROL, LEFT, ESCAPE = "\ue007", "\ue004", "\ue009", "\ue012", "\ue00c"
CELLS = (
    "return [...document.querySelectorAll('#similarity tbody tr')]"
    ".map(r => [...r.querySelectorAll('td')].map(c => c.textContent))"
)
ROWS = "return [...document.querySelectorAll('#similarity tbody th bdi')].map(c => c.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if why := missing():
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with driver() as make:
        browser = make()
        browser.size(1200, 900)
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser, back at nothing; the test may leave no complaint in its console but those it takes out itself."""
    browser.complaints()
    yield browser
    told = browser.complaints()
    browser.open("about:blank")
    browser.size(1200, 900)
    browser.scheme("light")
    assert not told


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


# --- try


def test_typing_ranking_and_reading_tokens(page: Browser, server: Server):
    begun(page, server.url)
    assert page.run("return document.title") == "mini · Try · Hortus"
    page.type("#similarity-texts", "one\ntwo\n\none")
    done(page, "similarity", lambda: page.click("#similarity button"))
    assert page.run(ROWS) == ["one", "two", "one"]
    cells = page.run(CELLS)
    assert [cells[0][0], cells[0][2], cells[2][0]] == ["1.00"] * 3
    assert cells[0][1] == cells[1][0] != "1.00"
    legend = page.text("#similarity .legend")
    assert all(f"{part} " in legend for part in ("tokenise", "queue", "device", "encode"))

    documents = ["a b", "c d", "e f g"]
    page.type("#rank-documents", "\n".join(documents))
    page.type("#rank-query", "c d?")
    done(page, "rank", lambda: page.press(ENTER))
    asked = {"query": "c d?", "documents": documents}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        wanted = [documents[r["index"]] for r in http.post("/rerank", json=asked).json()["results"]]
    assert page.run("return [...document.querySelectorAll('#rank .bars bdi')].map(b => b.textContent)") == wanted

    page.type("#tokens-text", "unaffable café")
    done(page, "tokens", lambda: page.click("#tokens button"))
    chips = page.run("return [...document.querySelectorAll('.token bdi')].map(b => b.textContent)")
    assert (chips[0], chips[-1], "".join(chips[1:-1])) == ("[CLS]", "[SEP]", "unaffablecafé")


def test_the_lines_to_copy_do_the_same(page: Browser, server: Server, tmp_path: Path):
    begun(page, server.url)
    page.devtools(
        "Browser.grantPermissions", origin=server.url, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    texts = ['it\'s "quoted" \\ $HOME `x`', "naïve 🌷", "null"]
    page.type("#similarity-texts", "\n".join(texts))
    page.run("document.querySelector('#similarity-cut').click()")
    done(page, "similarity", lambda: page.click("#similarity button"))
    page.type("#rank-query", texts[0])
    done(page, "rank", lambda: page.click("#rank button"))
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    page.run(  # counted, because the button says so for a moment only
        "window.copied = 0;"
        "const count = (changes) => { window.copied += changes.filter(c => c.target.textContent === 'Copied').length; };"
        "for (const b of document.querySelectorAll('.copy')) new MutationObserver(count).observe(b, {childList: true});"
    )
    programs = []
    for card in ("similarity", "rank", "tokens"):
        copied = []
        for language in ("curl", "Python", "JavaScript"):
            page.click(f"#{card} input[value={language}]")
            said = page.run("return window.copied")
            page.click(f"#{card} .copy")
            page.until("window.copied > arguments[0]", said)
            copied.append(page.run_async("return await navigator.clipboard.readText()"))
            assert copied[-1] == page.run("return document.querySelector(arguments[0]).textContent", f"#{card} pre")
        curl, python, javascript = copied
        (tmp_path / "curl.sh").write_text(curl)
        told = subprocess.run(["sh", tmp_path / "curl.sh"], capture_output=True, check=True, timeout=120).stdout
        ours = page.run_async(javascript.replace("console.log(await answer.json())", "return await answer.json()"))
        if card == "tokens":
            assert json.loads(told) == ours
        else:
            assert json.loads(told)["usage"] == ours["usage"]
        programs.append(python)
    assert '"truncate": True' in programs[0]
    printed = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)], capture_output=True, check=True, timeout=60, text=True
    ).stdout
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        vector = http.post("/v1/embeddings", json={"model": "mini", "input": texts[0]}).json()["data"][0]["embedding"]
    first = json.loads(printed.splitlines()[0].partition(" ")[2])
    assert first == pytest.approx(vector[:4])
    assert "relevance_score" in printed
    assert "[CLS]" in printed


def test_whatever_is_typed_is_text(page: Browser, server: Server):
    begun(page, server.url)
    texts = [
        "<script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
        "שלום עולם, مرحبا بالعالم",
        "👩‍👩‍👧‍👦 🌷 e\u0301 \u202eright to left\u202c",
        "</textarea><svg onload=alert(1)>",
        "\u0000x\ufeff" * 3,
    ]
    page.type("#similarity-texts", "\n".join(texts[:5]))
    done(page, "similarity", lambda: page.click("#similarity button"))
    assert page.run(ROWS) == texts[:5]
    for text in texts:
        page.type("#tokens-text", text)
        done(page, "tokens", lambda: page.click("#tokens button"))
    page.type("#rank-query", texts[0])
    page.type("#rank-documents", "\n".join(texts[:5]))
    done(page, "rank", lambda: page.click("#rank button"))
    assert page.run("return document.querySelectorAll('main script, main img, main svg:not(.plot svg)').length") == 0
    assert page.run("return window.hacked") is None
    assert page.run("return document.cookie") == ""
    assert page.run("return localStorage.length + sessionStorage.length") == 0


def test_ten_thousand_characters(page: Browser, server: Server):
    begun(page, server.url)
    page.type("#similarity-texts", "tulip " * 1667 + "\nshort")
    page.click("#similarity button")
    page.has_text("#similarity .error", "this model takes at most 256")
    assert page.text("#similarity .result") == ""
    page.click("#similarity-cut")
    done(page, "similarity", lambda: page.click("#similarity button"))
    assert not page.run("return document.querySelector('#similarity .error')")
    assert page.run(CELLS)[0][0] == "1.00"
    page.type("#tokens-text", "tulip " * 1667)
    done(page, "tokens", lambda: page.click("#tokens button"))
    assert "so this text would be refused" in page.text("#tokens .result")
    page.type("#similarity-texts", "\n".join(f"text {i}" for i in range(50)))
    done(page, "similarity", lambda: page.click("#similarity button"))
    assert "first 30 of 50" in page.text("#similarity .status")
    page.size(360, 700)
    assert page.run("return document.documentElement.scrollWidth") == 360
    page.type("#similarity-texts", " \n ")
    page.click("#similarity button")
    page.has_text("#similarity .error", "Type a text first")
    assert "400" in str(page.complaints())  # the browser notes each refused request


def test_the_keyboard_is_enough(page: Browser, server: Server):
    begun(page, server.url)
    page.press(TAB)
    assert page.run("return document.activeElement.textContent") == "Skip to the view"
    page.press(TAB, TAB, ENTER)
    page.until("!document.querySelector('#view-watch').hidden")
    page.run("document.querySelector('nav a').focus()")
    page.press(ENTER, TAB, TAB, TAB)
    assert page.run("return document.activeElement.id") == "similarity-texts"

    def control_enter() -> None:
        events = [("keyDown", CONTROL), ("keyDown", ENTER), ("keyUp", ENTER), ("keyUp", CONTROL)]
        page.keys(events)

    done(page, "similarity", control_enter)


@pytest.mark.parametrize(
    ("engine", "cards", "shown"),
    [
        ({"kind": "classify", "labels": ("LABEL_0",)}, ["rank", "tokens"], "#rank .bars li"),
        ({"kind": "classify", "labels": ("good", "bad", "<b>")}, ["classify", "tokens"], "#classify .bars li"),
        ({"kind": "sparse", "width": 30522}, ["similarity", "tokens"], "#similarity .heat"),
    ],
    ids=["reranker", "classifier", "sparse"],
)
def test_other_kinds_of_models(page: Browser, run, engine: dict, cards: list[str], shown: str):
    with run(FakeEngine(name="mini", max_tokens=256, **engine)) as server:
        begun(page, server.url)
        assert page.run("return [...document.querySelectorAll('.try')].map(card => card.id)") == cards
        assert page.run("return document.querySelectorAll(arguments[0]).length", shown) >= 3
        assert not page.run("return document.querySelector('.try .error')")
        if cards[0] == "classify":
            assert "<b>" in page.text("#classify .bars")


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


# --- for everybody


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_nothing_serious_stands_in_anybodys_way(page: Browser, server: Server, scheme: str, width: int):
    page.scheme(scheme)
    page.size(width, 800)
    begun(page, server.url)
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    page.run(axe + "; return 0")
    for at, ready in (1, "#tokens .token"), (2, ".plot path"), (3, "#facts dd"):
        page.click(f"nav a:nth-child({at})")
        page.until("document.querySelector(arguments[0])", ready)
        found = page.run_async(
            "const {violations} = await axe.run(document);"
            "return violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html + ' ' + n.failureSummary)])"
        )
        assert not [v for v in found if v[0] in ("serious", "critical")], json.dumps(found, indent=1)
        assert page.run("return document.documentElement.scrollWidth") == width
    names = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert names
    assert all(name.startswith(server.url + "/") for name in names)


# --- pictures for the documentation


@pytest.mark.timeout(400)
def draw_pictures(page: Browser):
    where = Path(os.environ["PAGE_PICTURES"])
    words = [sys.executable, "-m", "hortus.cli", "serve", "demo", "--port", "0"]
    over = threading.Event()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.split()[:1] == ["address"])
        page.size(1200, 820, 1.25)
        begun(page, url)
        page.click("nav a:nth-child(2)")
        bulk = ["A gardener waters tulips before the sun is up." for _ in range(12)]

        def ask() -> None:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                turn = 0
                while not over.is_set():
                    turn += 1
                    body = {"model": "all-MiniLM-L6-v2", "input": bulk[: turn % 13] or "A tulip."}
                    http.post("/v1/embeddings", json=body if turn % 40 else {"model": "another", "input": "a"})
                    over.wait(0.02 * (turn % 7))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(100)
        for at, view in (2, "watch"), (1, "try"), (3, "about"):
            if at == 1:
                over.set()
                for thread in threads:
                    thread.join(60)
            page.click(f"nav a:nth-child({at})")
            if at == 1:
                done(page, "similarity", lambda: page.click("#similarity button"))
            for scheme in ("light", "dark"):
                page.scheme(scheme)
                page.run_async("await new Promise(r => setTimeout(r, 1200))")
                (where / f"page-{view}-{scheme}.png").write_bytes(page.picture())
    finally:
        over.set()
        process.terminate()
        process.communicate(timeout=120)
    page.complaints()


if "PAGE_PICTURES" in os.environ:  # a folder; docs/page.md has the command
    test_pictures = draw_pictures
