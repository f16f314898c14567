"""The page in a real browser, headless: typed into, and read by everybody."""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from browsing import CONTROL, ENTER, TAB, begun, done
from gateway_server import Server
from webdriver import Browser

from hortus.tulip.fake import FakeEngine

pytestmark = pytest.mark.timeout(300)
CELLS = (
    "return [...document.querySelectorAll('#similarity tbody tr')]"
    ".map(r => [...r.querySelectorAll('td')].map(c => c.textContent))"
)
ROWS = "return [...document.querySelectorAll('#similarity tbody th bdi')].map(c => c.textContent)"


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
