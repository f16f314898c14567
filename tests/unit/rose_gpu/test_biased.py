"""Products with a bias as a GPU multiplies them: which tile, and what a model makes of parts. PyTorch plays quack's part."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.rose import engine as engines
from hortus.rose import loader
from hortus.rose.kernels import PROCESSORS, biased, fp8, preload, twin
from hortus.rose.kernels.linear import library, plain
from hortus.types import TokenBatch

BERTS = {"bge-base": (768, 3072), "MiniLM": (384, 1536)}


def multiplied(x, weight, tile, *, bias=None, activation=None, many=False):
    """preload.product, in parts as it would be."""
    assert x.shape[1] % (preload.DEPTH * tile.parts) == 0
    bias = torch.zeros(tile.parts, 1) if bias is None else bias
    shares = zip(x.chunk(tile.parts, 1), weight.chunk(tile.parts, 1), bias, strict=False)
    parts = torch.stack([share @ of.t() + b for share, of, b in shares])
    assert len(parts) == tile.parts
    if tile.parts > 1:
        return parts
    return parts[0] if activation is None else torch.nn.functional.gelu(parts[0])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[biased.Tile]:
    """The tiles that were multiplied by."""
    used: list[biased.Tile] = []

    def product(x, weight, tile, **how):
        used.append(tile)
        return multiplied(x, weight, tile, **how)

    monkeypatch.setattr(preload, "can_run", lambda weight: not any(size % 8 for size in weight.shape))
    monkeypatch.setattr(preload, "product", product)
    monkeypatch.setattr(biased, "_works", lambda dtype, index, activation, tile: True)
    return used


def test_tiles_run_at_once_and_are_whole() -> None:
    sizes, found = (64, 384, 768, 1000, 1024, 1152, 1536, 2304, 3072, 4096), 0
    for tokens, width, depth in itertools.product((1, 16, 64, 65, 128, 129, 256, 257, 512, 513, 4096), sizes, sizes):
        for tile in (
            biased.whole(tokens, width, depth, None),
            biased.whole(tokens, width, depth, "gelu"),
            biased.summed(tokens, width, depth),
        ):
            if tile is not None:
                found += 1
                assert tokens <= 512
                assert tile.programs(tokens, width) <= PROCESSORS
                assert depth % (64 * tile.parts) == 0
                assert depth // tile.parts <= biased.MOST_DEPTH
    assert found > 500


@pytest.mark.parametrize(("hidden", "inner"), BERTS.values(), ids=BERTS)
def test_berts_products_are_cut_up_to_512_tokens(hidden: int, inner: int) -> None:
    for tokens in (1, 64, 65, 128, 192, 256, 384, 512):
        assert biased.whole(tokens, 3 * hidden, hidden, None) is not None
        assert biased.whole(tokens, inner, hidden, "gelu") is not None
        for depth in (hidden, inner):
            tile = biased.summed(tokens, hidden, depth)
            assert tile is not None or (hidden, tokens) == (384, 192) or tokens > 128, (tokens, depth)


def test_products_are_the_librarys_where_they_cannot_be_cut(gpu: list[biased.Tile]) -> None:
    for width, depth, bias, activation in ((1001, 768, True, None), (768, 768, False, None), (768, 768, True, "tanh")):
        weight, b = torch.randn(width, depth), torch.randn(width) if bias else None
        x = torch.randn(5, depth)
        assert torch.equal(biased.linear(weight, b, activation)(x), plain(weight, b, activation)(x))
    assert gpu == []


@pytest.mark.parametrize("tokens", [1, 64, 65, 300, 512, 513, 8192])
def test_products_with_a_bias(gpu: list[biased.Tile], tokens: int) -> None:
    weight, bias, x = torch.randn(768, 768) / 28, torch.randn(768), torch.randn(tokens, 768)
    for activation in (None, "gelu"):
        torch.testing.assert_close(
            biased.linear(weight, bias, activation)(x), plain(weight, bias, activation)(x), rtol=1e-4, atol=1e-4
        )
    got = biased.added(weight, bias)(x)
    torch.testing.assert_close(got if got.dim() == 2 else got.sum(0), plain(weight, bias)(x), rtol=1e-4, atol=1e-4)
    assert len(gpu) == (0 if tokens == 513 else 3), "between few and many the library's"


def test_one_that_does_not_work_is_the_librarys(gpu: list[biased.Tile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "_works", lambda dtype, index, activation, tile: tile is biased._MANY)
    weight, bias = torch.randn(768, 384), torch.randn(768)
    for tokens in (5, 8192):
        biased.linear(weight, bias)(torch.randn(tokens, 384))
    assert gpu == [biased._MANY]


def sums(norm):
    """A norm of the `ops` modules that is also given parts."""
    return lambda x, *args: norm(x.sum(0) if x.dim() == 3 else x, *args)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"vocab_size": 90, "max_position_embeddings": 64, "type_vocab_size": 1}
MODELS = {
    "bert": {"model_type": "bert"},
    "adapters": {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "lora_adaptations": ["a", "b"]},
    "convolution": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "pos_att_type": "c2p",
        "conv_kernel_size": 3,
    },
    "two norms": {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
    "turned": {"model_type": "new", "type_vocab_size": 0},
    "norms before": {"model_type": "modernbert", "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    "no biases": {"model_type": "modernbert"},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_gives_the_same_vectors_by_products_in_parts(
    model: str, tmp_path: Path, gpu: list[biased.Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | MODELS[model]))
    folder = open_folder(str(tmp_path))

    def dummy(shapes, *, device, dtype):
        seed = torch.Generator().manual_seed(0)
        made = {name: torch.randn(shape, generator=seed) / 5 for name, shape in shapes.items()}
        return {name: w + 1 if w.dim() == 1 and name.endswith("weight") else w for name, w in made.items()}

    monkeypatch.setattr(loader, "dummy_weights", dummy)  # with biases
    config = RoseConfig(device="cpu", load_format="dummy")
    batch = TokenBatch.of([[3 + i % 50 for i in range(n)] for n in (1, 9, 40)])
    types = np.arange(batch.total_tokens, dtype=np.uint8) % 3
    batches = [batch] if model != "adapters" else [batch, TokenBatch(batch.ids, batch.cu_seqlens, types)]
    plainly = engines.open_engine(folder, config)
    want = [plainly.step(b).result() for b in batches]
    plainly.close()
    ops = SimpleNamespace(**vars(twin))
    ops.add_layer_norm, ops.add_layer_norm_ = sums(twin.add_layer_norm), sums(twin.add_layer_norm_)
    made = engines._kit

    def kit(*args, **knobs):
        plain_kit, attention = made(*args, **knobs)
        return replace(plain_kit, ops=ops, linear=biased.linear, added=biased.added, few=None), attention

    monkeypatch.setattr(engines, "_kit", kit)
    monkeypatch.setattr(biased, "FEWEST", 1)  # tiny
    monkeypatch.setattr(preload, "DEPTH", 4)
    engine = engines.open_engine(folder, config)
    for b, rows in zip(batches, want, strict=True):
        np.testing.assert_allclose(engine.step(b).result(), rows, rtol=0, atol=2e-5)
    assert any(tile.parts > 1 for tile in gpu) == (model != "no biases")
    engine.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_librarys_products_are_all_there_is_where_they_are_asked_for(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "prove", lambda device: None)
    kits = [
        engines._kit(RoseConfig(dtype=dtype, products=products), torch.device("cuda"), torch.bfloat16)[0]
        for products in ("library", "auto")
    ]
    assert kits[0].linear is (fp8.library if dtype == "fp8" else library)
    assert kits[0].added is kits[0].attended is None
    assert kits[1].linear is (fp8.linear if dtype == "fp8" else biased.linear)


@pytest.mark.parametrize(("scores", "unseen"), [(None, None), (object(), None), (None, object())])
def test_a_model_that_is_never_captured_multiplies_by_the_library(
    scores: object, unseen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception): ...

    def build(folder: object, family: object, spec: object, kit: engines.Kit, **knobs: object) -> None:
        raise Made((kit.linear is plain, kit.added is None, kit.attended is None))

    chosen = (torch.device("cuda"), torch.bfloat16, None, SimpleNamespace(scores=scores))
    monkeypatch.setattr(engines, "_chosen", lambda *args: chosen)
    monkeypatch.setattr(engines, "_unseen", lambda *args: unseen)
    monkeypatch.setattr(engines, "build_network", build)
    with pytest.raises(Made) as made:
        engines.open_engine(SimpleNamespace(), RoseConfig())
    assert made.value.args[0] == (scores is not unseen,) * 3
