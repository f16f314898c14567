"""Prompts and templates, by whatever name an API asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models_stubs import client, post, sequences

from hortus.errors import StartError
from hortus.folder import Module

pytestmark = pytest.mark.usefixtures("tokenizer_read_once")
LONG = "word " * 100


async def test_input_type_is_the_models_prompt_for_it(embed):
    for fields in ({"input_type": "query"}, {"input_type": "search_query"}, {"prompt_name": "query"}):
        await post(embed, "/v1/embeddings", model="mini", input="hi", **fields)
        assert sequences(embed.encoder.batches[-1]) == [[101, 23032, 1024, 7632, 102]]
    both = await post(embed, "/v1/embeddings", model="mini", input="hi", input_type="query", prompt_name="query")
    assert both.error["param"] == "input_type"
    assert (await post(embed, "/v1/embeddings", model="mini", input="hi", input_type="poem")).status == 400


async def test_templates_are_added_and_reloaded(folder, tmp_path):
    file = tmp_path / "templates.toml"
    file.write_text('default = "shout"\n[prompts]\nshout = "hey "\n')
    gateway = client(folder, templates=str(file))

    async def tokens() -> int:
        return (await post(gateway, "/v1/embeddings", model="mini", input="hi")).json["usage"]["total_tokens"]

    assert await tokens() == 4
    file.write_text('[prompts]\nshout = "hey you there "\n')
    assert await tokens() == 4
    gateway.app.reload()
    assert await tokens() == 3
    assert (await post(gateway, "/embed", inputs="hi", prompt_name="shout")).status == 200
    for wrong in ("default = 'none'", "[prompts]\nx = 1", "nonsense = 1", "pair = '{query}'", "= ="):
        file.write_text(wrong)
        gateway.app.reload()
        assert (await post(gateway, "/embed", inputs="hi", prompt_name="shout")).status == 200, (
            "a wrong file changes nothing"
        )


async def test_templates_for_a_model_that_pools_without_its_prompt(folder, tmp_path):
    """It could be served as long as it had no prompt; one given from outside is refused as its own would be."""
    file = tmp_path / "templates.toml"
    file.write_text('[prompts]\nquery = ""\n')
    modules = (Module("Transformer", tmp_path, {}), Module("Pooling", tmp_path, {"include_prompt": False}))
    without = replace(folder, modules=modules, prompts={})
    gateway = client(without, templates=str(file))
    file.write_text('[prompts]\nquery = "find: "\n')
    with pytest.raises(StartError, match=r"--templates .*include_prompt false"):
        client(without, templates=str(file))
    gateway.app.reload()
    await post(gateway, "/embed", inputs="hi", prompt_name="query")
    assert sequences(gateway.encoder.batches[-1]) == [[101, 7632, 102]]


async def test_a_pair_template_makes_one_text(folder, tmp_path):
    file = tmp_path / "templates.toml"
    file.write_text('pair = "query {query} document {document} end"')
    gateway = client(folder, kind="classify", width=1, templates=str(file))
    await post(gateway, "/rerank", query="{document}", documents=["you"])
    said = gateway.app._embedder.tokenizer.texts(sequences(gateway.encoder.batches[0]), skip_special=True)
    assert said == ["query { document } document you end"]
    cut = await post(gateway, "/rerank", query="a", documents=[LONG], max_tokens_per_doc=10)
    assert cut.json["usage"]["total_tokens"] == 10 + 6
    assert (await post(gateway, "/rerank", query="a", documents=[LONG])).status == 400


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncate_keeps_the_words_of_a_pair_template(folder, tmp_path, side):
    file = tmp_path / "templates.toml"
    file.write_text('pair = "query {query} document {document} end"')
    gateway = client(folder, kind="classify", width=1, templates=str(file))

    async def said(**fields: object) -> list[str]:
        gateway.encoder.batches.clear()
        reply = await post(gateway, "/rerank", truncation_side=side, truncate=True, **fields)
        assert reply.status == 200, reply.body
        read = gateway.app._embedder.tokenizer.texts
        return [t for b in gateway.encoder.batches for t in read(sequences(b), skip_special=True)]

    many = " ".join(f"{i}" for i in range(100))
    kept = [str(i) for i in (range(47, 100) if side == "left" else range(53))]
    short, cut = await said(query="one two three four five six", documents=["you", many])
    assert short == "query one two three four five six document you end"
    assert cut == " ".join(["query one two three four five six document", *kept, "end"])
    (both,) = await said(query=many, documents=[many], truncate_prompt_tokens=25)
    assert both.split()[0] == "query"
    assert both.split()[-1] == "end"
    assert (len(both.split()), both.split().index("document")) == (23, 11)
    reply = await post(gateway, "/rerank", query="a", documents=[many], truncate_prompt_tokens=6)
    assert (reply.status, reply.error["param"]) == (400, "documents[0]")
    assert "--templates" in reply.error["message"]
