"""Targets as typed, requests and answers of the routes, texts of exact length, padding."""

import base64
import json

import numpy as np
import pytest

from hortus.bench.served import graph_counts, openai_route, openai_rows, tei_route
from hortus.bench.started import infinity_words
from hortus.bench.targets import Spec, parse
from hortus.bench.texts import Corpus, sentences
from hortus.config import RoseConfig
from hortus.engines import open_model
from hortus.errors import StartError
from hortus.ivy.tokenize import Tokenizer
from hortus.types import TokenBatch


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("engine", Spec("engine", "engine", "")),
        ("serve:--gateways 2", Spec("serve", "serve", "--gateways 2")),
        ("two=serve:--gateways 2", Spec("two", "serve", "--gateways 2")),
        ("vLLM=openai:http://h:8000/v1", Spec("vLLM", "openai", "http://h:8000/v1")),
        ("tei:http://h:80", Spec("tei", "tei", "http://h:80")),
        ("infinity:a/bin/python --engine torch", Spec("infinity", "infinity", "a/bin/python --engine torch")),
        ("serve:--name=x", Spec("serve", "serve", "--name=x")),  # the = of a flag is not ours
    ],
)
def test_targets_as_typed(text, spec):
    assert parse(text) == spec


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("engin", "no kind 'engin'; kinds: engine, "),
        ("openai", "needs its base URL"),
        ("openai:https://h", "TLS is not measured"),
        ("openai:http://", "names no host"),
        ("openai:http:///v1", "names no host"),
        ("openai:http://h:0/v1", "names no port"),
        ("openai:http://h:99999", "is no URL"),
        ("tei:http://h:abc", "is no URL"),
        ("tei:http://h/?x=1", "a base URL has no ?"),
        ("openai:http://h/v1#x", "a base URL has no #"),
        ("openai:http://me:pw@h/v1", "a user in the URL is not sent; give --header"),
        ("vllm", "needs the python"),
        ("engine:x", "takes nothing after the colon"),
        ("=engine", "an empty name"),
        ("", "no kind"),
    ],
)
def test_bad_targets_are_named(text, what):
    with pytest.raises(StartError) as e:
        parse(text)
    assert what in str(e.value)
    assert repr(text) in str(e.value)


def test_openai_route():
    route = openai_route("/v1", "m", "base64")
    assert route.path == "/v1/embeddings"
    assert json.loads(route.body(["a"])) == {"model": "m", "input": "a", "encoding_format": "base64"}
    assert json.loads(route.body(["a", "b"]))["input"] == ["a", "b"]
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for form in (lambda r: r.tolist(), lambda r: base64.b64encode(r.tobytes()).decode()):
        # Out of order on purpose: `index` counts.
        data = [{"index": i, "embedding": form(rows[i])} for i in (1, 0)]
        np.testing.assert_array_equal(openai_rows(json.dumps({"data": data}).encode()), rows)


def test_tei_route():
    route = tei_route("")
    assert route.path == "/embed"
    assert json.loads(route.body(["a"])) == {"inputs": ["a"], "truncate": True}
    assert route.rows(b"[[1, 2], [3, 4]]").dtype == np.float32
    assert route.rows(b"[[1, 2], [3, 4]]").tolist() == [[1, 2], [3, 4]]


def test_graph_steps_from_metrics():
    page = 'hortus_graph_steps_total{how="eager"} 3.0\nhortus_graph_steps_total{how="replay"} 1e+03\nother{how="x"} 2\n'
    assert graph_counts(page) == {"eager": 3, "replay": 1000}
    assert graph_counts("# nothing\n") is None


def test_infinity_answers_from_the_model_not_from_its_cache(tmp_path):
    assert "--no-vector-disk-cache" in infinity_words("x/bin/python", tmp_path, 1)
    assert infinity_words("x/bin/python", tmp_path, 1)[0] == "x/bin/infinity_emb"


@pytest.fixture(scope="module")
def encode():
    folder = open_model("demo", None, RoseConfig(), weights=False)
    tokenizer = Tokenizer(folder, max_tokens=1 << 20)
    yield tokenizer.encode
    tokenizer.close()


@pytest.mark.parametrize("tokens", [3, 16, 128, 256, 511])
def test_texts_have_exactly_the_wanted_tokens(encode, tokens):
    corpus = Corpus(encode)
    inputs = corpus.inputs(20, tokens)
    assert inputs.ids.lengths.tolist() == [tokens] * 20
    assert len(set(inputs.texts)) > 15
    assert Corpus(encode).inputs(20, tokens).texts == inputs.texts  # the same each run


def test_own_texts(encode, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Only a few words.\n")
    with pytest.raises(StartError, match="--texts: 4 words are too few"):
        Corpus(encode, [file])
    file.write_text("internationalisation extraordinarily " * 60)
    inputs = Corpus(encode, [file]).inputs(10, 17)
    assert inputs.ids.lengths.tolist() == [17] * 10
    assert "internationalisation" in inputs.texts[0]
    first, second, *_ = Corpus(encode, [file]).several(1, 17, 64)
    assert first.texts != second.texts, "their answers are compared"
    file.write_text("the " * 200)
    with pytest.raises(StartError, match=r"--texts: every text of 17 tokens comes out alike .'the the"):
        Corpus(encode, [file]).several(1, 17, 64)


def test_texts_of_a_script_without_spaces(encode, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\u4e00\u4e8c\u4e09\u56db\u4e94" * 9)
    with pytest.raises(StartError, match="--texts: 45 characters are too few"):
        Corpus(encode, [file])
    file.write_text(("\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03" * 3 + "\n") * 99)
    inputs = Corpus(encode, [file]).inputs(10, 17)
    assert inputs.ids.lengths.tolist() == [17] * 10
    assert all(text.startswith(tuple("\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03")) for text in inputs.texts)


def test_sentences():
    assert sentences("One. Two! \n\nThree? four") == ("One.", "Two!", "Three?", "four")


def test_padding():
    from hortus.bench.inprocess import padded

    ids, mask = padded(TokenBatch.of([[5, 6, 7], [8]]))
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
