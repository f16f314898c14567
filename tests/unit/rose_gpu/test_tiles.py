"""How products and attention are cut on a GPU, by size: pure choices, measured on one (docs/decisions/010)."""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hortus.bench import tiles
from hortus.bench.tiles import ROOM as MOST
from hortus.bench.tiles import Product, cut, neighbours
from hortus.rose.attention import fa4
from hortus.rose.gpu import BATCH_TOKENS, PIECE_TOKENS, PIECES, REHEARSED
from hortus.rose.kernels import (
    PROCESSORS,
    attend,
    biased,
    dense,
    heads,
    launch,
    linear,
    pooling,
    preload,
    quack,
    rms,
    skinny,
)
from hortus.rose.kernels.skinny import Tile

TOKENS = (1, 16, 17, 63, 64, 65, 128, 129, 192, 256, 257, 320, 512, 513, 4096)
ROOM = 164 * 1024
"""Bytes of shared memory that launch.roomy() asks a device for."""


def check(tile: Tile | None, tokens: int, width: int, depth: int, taken: int = 1) -> None:
    if tile is None:
        return
    assert width % tile.cols == 0
    assert depth % (tile.parts * tile.depth) == 0
    assert width // tile.cols * -(-tokens // tile.rows) * tile.parts <= PROCESSORS, "all at once"
    assert (tile.rows + taken * tile.cols) * tile.depth * 2 * tile.stages <= ROOM, "what a program holds"


def test_every_cut_is_even_fits_and_runs_at_once() -> None:
    sizes = (64, 384, 896, 1000, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 9728)
    for tokens, width, depth in itertools.product(TOKENS, sizes, sizes):
        check(skinny.split(tokens, width, depth), tokens, width, depth)
        check(skinny.whole(tokens, width, depth), tokens, width, depth)
        check(skinny.gated(tokens, width, depth), tokens, width, depth, taken=2)


def test_a_shape_of_06b_is_cut_up_to_256_tokens_and_its_shallow_part_up_to_512() -> None:
    for tokens in (t for t in TOKENS if t <= 256):
        assert skinny.whole(tokens, 4096, 1024) is not None
        assert skinny.gated(tokens, 3072, 1024) is not None
        for depth in (2048, 3072):
            cut = skinny.split(tokens, 1024, depth)
            assert cut is not None
            assert cut.parts > 1
    assert skinny.split(512, 1024, 2048) is not None
    assert skinny.split(512, 1024, 3072) is None
    assert skinny.split(513, 1024, 2048) is None


@pytest.mark.parametrize("tokens", TOKENS)
def test_wide_models_are_the_librarys(tokens: int) -> None:
    assert skinny.split(tokens, 2560, 4096) is None
    assert skinny.split(tokens, 2560, 9728) is None
    assert skinny.whole(tokens, 6144, 2560) is None
    assert skinny.gated(tokens, 9728, 2560) is None


@pytest.mark.parametrize("size", [(1000, 1024), (1024, 1000)])
def test_sizes_that_cannot_be_cut_are_the_librarys(size: tuple[int, int]) -> None:
    assert skinny.split(64, *size) is None
    assert skinny.gated(100, *size) is None
    assert skinny.whole(64, size[0] * 4 + 1, size[1]) is None


def test_the_product_that_turns_runs_where_its_tiles_fill_the_gpu() -> None:
    sizes = (*range(64, 1025, 64), *range(1280, 4097, 256))
    assert [t for t in sizes if not quack.fill(t, 4096)] == [*range(64, 385, 64), 576, 640, 704, 768]
    assert quack.fill(51200, 4096)


def test_attention_takes_small_tiles_where_all_run_at_once() -> None:
    assert [fa4.tile(t, 1, 16, 128) for t in (1, 64, 512, 513, 4096)] == [(64, 64)] * 3 + [None] * 2
    assert [fa4.tile(t, 1, 32, 128) for t in (256, 257)] == [(64, 64), None], "more heads are more programs"
    assert [fa4.tile(t, 1, 12, 64) for t in (704, 705, 2112, 2113)] == [(64, 64), (128, 128), (128, 128), None]
    assert [fa4.tile(t, 8, 12, 64) for t in (4096, 4224, 4225)] == [(128, 128), None, None], (
        "of 512 tokens: a few waves"
    )
    assert [fa4.tile(t, 100, 12, 64) for t in (12800, 12801)] == [(128, 128), None], "short sequences"
    assert fa4.tile(64, 1, 3, 256) is None, "not measured"
    assert [fa4.tile(300, n, 16, 128) for n in (256, 257)] == [(64, 64), None], "another kernel, and only one"


def test_programs_go_on_from_tile_to_tile_where_tiles_are_alike() -> None:
    assert fa4.goes_on(4096, 1, 16, causal=False)
    assert [fa4.goes_on(t, 8, 32, causal=True) for t in (2111, 2112, 4096, 4097)] == [False, True, True, False]
    assert [fa4.goes_on(300, n, 16, causal=True) for n in (256, 257)] == [False, True], "another kernel, and only one"


@pytest.mark.parametrize(
    ("dtype", "hidden", "normed", "taken"),
    [("bfloat16", 64, True, 1), ("float32", 64, True, 0), ("bfloat16", 60, True, 0), ("bfloat16", 64, False, 0)],
)
@pytest.mark.parametrize(("few", "many"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_product_that_turns_is_for_two_bytes_and_aligned_rows(
    monkeypatch, dtype, hidden, normed, taken, few, many
) -> None:
    """It rounds angles to halves, and products of float32 to less, and its proof would let both pass. No other reads its rows."""
    asked: list[torch.dtype] = []

    def turned(dtype: torch.dtype, index: int | None, eps: float, heads: int) -> object:
        asked.append(dtype)
        return print if many else None

    monkeypatch.setattr(heads, "_may_turn", lambda cos: True)
    monkeypatch.setattr(quack, "turned", turned)
    monkeypatch.setattr(preload, "can_turn", lambda weight, heads, eps: few)
    monkeypatch.setattr(heads, "look_up", lambda table, positions: table[positions])
    norm = torch.ones(128, dtype=getattr(torch, dtype)) if normed else None
    rotary = heads.Rotary(torch.ones(8, 64), torch.zeros(8, 64))
    weight = torch.ones(4 * 128, hidden, dtype=getattr(torch, dtype))
    heads.Turned(weight, None, norm, norm, rotary, 2, 1, 1e-6, linear.plain)
    assert len(asked) == taken
    heads.Turned(weight, None, norm, norm, rotary, 2, 1, 1e-6, linear.library)
    assert len(asked) == taken
    least = heads.FEW_TURNED if few else heads.MANY_TURNED
    rows = rotary.at(torch.zeros(least, dtype=torch.int32)).rows
    assert (rows is not None) == bool(taken and (few or many))
    assert rows is None or rows.shape == (least, 256)
    assert rotary.at(torch.zeros(least - 1, dtype=torch.int32)).rows is None


def _tiles_of(pick, *sizes) -> list[object]:
    return [pick(tokens, *sizes) for tokens in (1, 16, *range(64, 1025, 64))]


def test_tiles_that_read_weights_ahead_run_at_once_and_are_whole() -> None:
    sizes = (64, 384, 896, 1000, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 9728)
    found = 0
    for tokens, width, depth in itertools.product((*TOKENS, 448, 449, 768, 769), sizes, sizes):
        for pick, rows in ((preload.gated, 2 * width), (preload.added, width), (preload.turned, width)):
            if (tile := pick(tokens, width, depth)) is None:
                continue
            found += 1
            assert preload.FEWEST <= tile.programs(tokens, rows) <= PROCESSORS
            assert depth % (tile.parts * 64) == 0
            assert depth // tile.parts <= preload.MOST_DEPTH
            assert math.prod(tile.cluster) <= 4, "what the package allows"
            assert tokens <= 768
    assert found > 100


def test_0_6b_and_4b_read_weights_ahead_where_it_was_measured() -> None:
    for tokens in (1, 64, 65, 128, 129, 192, 256, 257, 512):
        assert preload.gated(tokens, 3072, 1024) is not None
        assert preload.added(tokens, 1024, 2048) is not None
        assert (preload.added(tokens, 1024, 3072) is None) == (tokens <= 64), "skinny.py's there"
        assert (preload.turned(tokens, 4096, 1024) is None) == (tokens <= 64), "attend.py's there"
        assert (preload.gated(tokens, 9728, 2560) is None) == (tokens > 256)
    for depth in (4096, 9728):
        assert [preload.added(t, 2560, depth) is not None for t in (16, 64, 128, 192, 256, 257)] == [
            True, True, True, False, True, False
        ]  # fmt: skip
    assert _tiles_of(preload.added, 1024, 3072)[-4:] == [None] * 4, "the library's from 769 on"


def kernels(
    tokens: int, sequences: int, hidden: int, inner: int, q_heads: int, kv_heads: int, head_dim: int
) -> list[object]:
    """What a step of so many tokens is run by, wherever sizes decide. (quack's products are compiled before any step.)"""
    width, mixed = (q_heads + 2 * kv_heads) * head_dim, q_heads * head_dim
    norms = {"RMSNorm": preload.added, "LayerNorm": biased.summed}
    sums = [(norm, pick(tokens, hidden, depth)) for depth in (mixed, inner) for norm, pick in norms.items()]
    cut = fa4.tile(tokens, sequences, q_heads, head_dim)
    return [
        ("o", skinny.split(tokens, hidden, mixed)),
        ("down", skinny.split(tokens, hidden, inner)),
        ("whole", skinny.whole(tokens, width, hidden)),
        ("gated", skinny.gated(tokens, inner, hidden)),
        *(
            (
                f"attention, causal {c}",
                cut,
                cut != fa4.SMALL and fa4.goes_on(tokens, sequences, q_heads, causal=c),
                sequences > fa4.MANY,
            )
            for c in (False, True)
        ),
        ("parts of a pool", pooling._parts(tokens, sequences)),
        ("keys of attend", None if tokens > attend.MOST_TOKENS else tokens <= attend._ROWS),
        ("rows of a norm", tokens >= rms.MANY),
        *((f"parts that {norm} adds", tile.parts) for norm, tile in sums if tile is not None and tile.parts > 1),
    ]


SHAPES = {
    "qwen3 0.6B": (1024, 3072, 16, 8, 128),
    "qwen3 4B": (2560, 9728, 32, 8, 128),
    "llama 1B": (2048, 8192, 32, 8, 64),
    "qwen2 0.5B": (896, 4864, 14, 2, 64),
    "bert": (768, 3072, 12, 12, 64),
    "minilm": (384, 1536, 12, 12, 32),
    "512 wide": (512, 1536, 8, 4, 64),
    "1280 wide": (1280, 5120, 20, 20, 64),
}


SEQUENCES = (1, 2, 8, 32, 128, 256, 257, 1024)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [BATCH_TOKENS, PIECE_TOKENS])
def test_a_rehearsal_meets_every_kernel(shape: str, most: int) -> None:
    """So that nobody waits for a compiler: see GpuEngine.rehearse. A text by itself may be longer than a batch."""
    rehearsed = REHEARSED + (PIECES if most > BATCH_TOKENS else ())
    met = {str(k) for tokens, sequences in rehearsed for k in kernels(tokens, sequences, *SHAPES[shape])}
    sizes = [*itertools.product(range(1, BATCH_TOKENS + 1), SEQUENCES)]
    larger = range(BATCH_TOKENS, PIECE_TOKENS + 1, 128)
    sizes += itertools.product(larger, SEQUENCES if most > BATCH_TOKENS else (1,))
    for tokens, sequences in sizes:
        for kernel in map(str, kernels(tokens, min(sequences, tokens), *SHAPES[shape])):
            assert kernel in met, f"{tokens} tokens in {sequences} sequences run {kernel}, which no rehearsal does"


def _searched(module: str, kind: str, width: int, depth: int, tokens: int) -> tuple[object, list[object], Product]:
    product = Product(module, kind, width, depth)
    today = getattr({"skinny": skinny, "preload": preload}[module], kind)(tokens, width, depth)
    others = neighbours(today, product, tokens)
    assert len(others) == len(set(others)) >= 5
    for tile in others:
        assert sum(a != b for a, b in zip(tile, today, strict=True)) == 1, "one change"
    return today, others, product


@pytest.mark.parametrize("tokens", [16, 64, 128, 256])
@pytest.mark.parametrize("asked", [("split", 1024, 2048), ("gated", 3072, 1024), ("whole", 4096, 1024)])
def test_the_search_tries_cuts_that_can_run(asked: tuple[str, int, int], tokens: int) -> None:
    _, others, product = _searched("skinny", *asked, tokens)
    taken = 2 if product.kind == "gated" else 1
    for tile in others:
        assert tile.divides(product.width, product.depth)
        assert tile.programs(tokens, product.width) <= 2 * PROCESSORS
        assert (tile.parts > 1) == (product.kind == "split")
        assert (tile.rows + taken * tile.cols) * tile.depth * 2 * tile.stages <= MOST


@pytest.mark.parametrize("tokens", tiles.SIZES)
@pytest.mark.parametrize(
    "asked", [("gated", 3072, 1024), ("added", 1024, 2048), ("added", 1024, 3072), ("turned", 4096, 1024)]
)
def test_the_search_tries_cuts_that_quacks_kernel_allows(asked: tuple[str, int, int], tokens: int) -> None:
    if getattr(preload, asked[0])(tokens, *asked[1:]) is None:
        return  # nothing to vary
    _, others, product = _searched("preload", *asked, tokens)
    for tile in others:
        assert tile.rows in (64, 128, 192, 256, 320)
        assert tile.cols % 32 == 0
        assert 32 <= tile.cols <= (160 if tile.rows == 320 else 256)
        assert tile.cols == 128 or product.kind != "turned", "a head"
        assert math.prod(tile.cluster) <= 4
        assert tile.parts == 1 or product.kind == "added"
        assert product.depth % (tile.parts * 64) == 0
        weight_rows = 2 * product.width if product.kind == "gated" else product.width
        assert tile.programs(tokens, weight_rows) <= 2 * PROCESSORS


def test_the_search_varies_each_field_of_a_tile_that_reads_weights_ahead() -> None:
    today, others, _ = _searched("preload", "added", 1024, 3072, 256)
    assert today == preload.Tile(64, 64, (1, 4))
    assert {t.rows for t in others} == {64, 128, 192, 256, 320}
    assert {t.cols for t in others} == {*range(32, 257, 32)}
    assert {t.cluster for t in others} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    assert {t.parts for t in others} == {1, 2, 3, 4}, "8 are more than two rounds"
    split = preload.Tile(64, 64, (1, 1), 4)
    assert split._replace(parts=1) in neighbours(split, Product("preload", "added", 1024, 2048), 64)
    few = neighbours(split, Product("preload", "added", 1024, 2048), 64)
    assert {t.parts for t in few} == {1, 2, 4, 8}, "2,048 are not cut in three"


def test_the_search_cuts_one_product_of_one_size_for_as_long_as_it_lasts() -> None:
    o, other, seen = Product("skinny", "split", 1024, 2048), Tile(64, 64, 64, 8, 4, 5), {}
    ahead, ahead_other = Product("preload", "gated", 3072, 1024), preload.Tile(64, 128, (1, 2))
    down, larger = skinny.split(64, 1024, 3072), skinny.split(65, 1024, 2048)
    same_name, wider = skinny.gated(64, 3072, 1024), preload.gated(65, 3072, 1024)
    before = {(module, kind): getattr(module, kind) for module, kind in _functions()}
    with cut(64, {o: other, ahead: ahead_other}, seen):
        assert skinny.split(64, 1024, 2048) == other
        assert skinny.split(64, 1024, 3072) == down
        assert skinny.split(65, 1024, 2048) == larger
        assert skinny.whole(64, 6144, 2560) is None
        assert skinny.gated(64, 3072, 1024) == same_name, "another module's"
        assert preload.gated(64, 3072, 1024) == ahead_other
        assert preload.gated(65, 3072, 1024) == wider
        assert preload.turned(64, 4096, 1024) is None, "nothing to vary"
    assert seen == {
        o: other,
        Product("skinny", "split", 1024, 3072): down,
        Product("skinny", "gated", 3072, 1024): same_name,
        ahead: ahead_other,
    }
    assert {(module, kind): getattr(module, kind) for module, kind in _functions()} == before


def _functions() -> list[tuple[object, str]]:
    return [
        ({"skinny": skinny, "preload": preload}[name], kind) for name, kinds in tiles.TABLES.items() for kind in kinds
    ]


def test_the_search_tells_the_best_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step here takes as long as its cut is deep; some do not run, for a reason or without a word, and one is wrong."""
    monkeypatch.setattr(tiles, "SECONDS", 0.5)

    class Engine:
        def step(self, batch: object) -> Engine:
            tile = skinny.split(64, 1024, 2048)
            assert tile is not None
            self.tile = getattr(self, "tile", tile)
            self.ahead = getattr(self, "ahead", preload.added(64, 1024, 2048))
            return self

        def result(self) -> np.ndarray:
            if self.tile.warps == 8:
                raise RuntimeError("out of resources\nand more")
            if self.ahead.cluster == (2, 2):
                raise AssertionError
            time.sleep(self.tile.depth / 1e5)
            return np.array([[1.0, -1.0 if self.tile.stages == 4 else 1.0]], np.float32)

        def close(self) -> None: ...

    told: list[str] = []
    bench = SimpleNamespace(batch=lambda n: n, again=Engine, add=lambda note, **_: told.append(note))
    tiles._size(bench, 40)
    assert told[0].startswith("tiles: skinny.split 1024 x 2048: 64 32 32 "), "the least deep"
    assert "tiles: as it is" in told
    said = capsys.readouterr().out
    assert "64 32 128 4 8 5 does not run: RuntimeError: out of resources\n" in said
    assert "preload.added 1024 x 2048: 64 64 (2, 2) 4 does not run: AssertionError: \n" in said
    assert "WRONG: skinny.split 1024 x 2048: 64 32 128 4 4 4" in said


@pytest.mark.parametrize(
    ("kilobytes", "ours"), [(100, False), (164, False), (228, True)], ids=["GeForce", "A100", "H100"]
)
def test_a_gpu_with_little_shared_memory_multiplies_by_the_library(
    monkeypatch: pytest.MonkeyPatch, kilobytes: int, ours: bool
) -> None:
    monkeypatch.setattr(launch, "_shared", lambda index: kilobytes * 1024)
    weight = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), dtype=torch.bfloat16)
    assert dense._fast(weight, linear.plain) == ours
    assert not dense._fast(weight, linear.library), "--products library"
