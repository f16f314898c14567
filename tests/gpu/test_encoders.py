"""Every kind of encoder, and Gemma, with the GPU's operations: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1).

tests/unit/rose_gpu runs this same file the second way. That each is right is tests/model's; here, that it is the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.engine import open_engine
from hortus.rose.kernels import linear, twin
from hortus.rose.models import Kit, find
from hortus.rose.network import Inputs, ranges
from hortus.types import TokenBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if INTERPRETED or torch.cuda.is_available():
    from hortus.rose.kernels import fused

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 80}
SIZES |= {"vocab_size": 90, "max_position_embeddings": 640}
GPU_LENGTHS = [1, 5, 300, 64, 600]
ALIBI = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
DEBERTA = {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 16}
GEMMA = {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 8, "sliding_window_pattern": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
CONFIGS = {
    "bert": {"model_type": "bert"},
    "xlm-roberta": {"model_type": "xlm-roberta", "type_vocab_size": 1},
    "jina v3": {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "type_vocab_size": 1}
    | {"lora_adaptations": ["a", "b", "c"]},
    "mpnet": {"model_type": "mpnet"},
    "jina": ALIBI,
    "jina, code": ALIBI | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
    "deberta": DEBERTA,
    "deberta, convolution": DEBERTA | {"conv_kernel_size": 3},
    "deberta, shared": DEBERTA | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    "nomic": {"model_type": "nomic_bert"},
    "new": {"model_type": "new", "type_vocab_size": 0, "rope_scaling": {"type": "ntk", "factor": 2.0}},
    "modernbert": {"model_type": "modernbert", "local_attention": 8},
    "embeddinggemma": GEMMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    "gemma 3": GEMMA | {"model_type": "gemma3_text"},
    "gemma": GEMMA | {"model_type": "gemma", "num_key_value_heads": 1},
    "gemma, stretched": GEMMA | {"model_type": "gemma", "rope_scaling": YARN},
    "modernbert, biases": {"model_type": "modernbert", "attention_bias": True, "mlp_bias": True, "norm_bias": True},
}


def weights(config: dict, device: str = DEVICE) -> dict[str, torch.Tensor]:
    family = find(config["model_type"])
    torch.manual_seed(0)
    made = {}
    for name, shape in family.shapes(family.spec_from_config(config)).items():
        w = torch.randn(shape) * (0.2 if len(shape) == 2 else 0.3)
        made[name] = (w + 1 if len(shape) == 1 and name.endswith("weight") else w).to(device)
    return made


def types_of(config: dict, tokens: int) -> np.ndarray:
    """[tokens] int32: all the types that the model tells apart, in turn."""
    adapters = config.get("lora_adaptations")
    return np.arange(tokens, dtype=np.int32) % (1 + len(adapters) if adapters else 2)


@pytest.mark.parametrize("case", CONFIGS)
def test_every_position_of_a_gpu_run_has_a_row(case: str) -> None:
    """An index beyond a table ends the process' CUDA context, and with it all tests that follow: so no GPU is needed to see it.

    Positions may begin at 2 or later, so a table has fewer than max_position_embeddings.
    """
    config = SIZES | CONFIGS[case]
    assert find(config["model_type"]).spec_from_config(config).positions >= max(GPU_LENGTHS)


@pytest.mark.parametrize(
    ("case", "typed"), [*((case, False) for case in CONFIGS), ("bert", True), ("nomic", True), ("jina v3", True)]
)
def test_fused_operations_are_the_plain_ones(case: str, typed: bool) -> None:
    config = SIZES | CONFIGS[case]
    family = find(config["model_type"])
    spec = family.spec_from_config(config)
    lengths = np.array([1, 4, 2] if INTERPRETED else GPU_LENGTHS, np.int32)
    positions, cu = ranges(np.zeros_like(lengths), lengths)
    ids = np.random.default_rng(0).integers(0, 90, cu[-1]).astype(np.int32)
    rows = []
    for ops in (twin, fused):
        trunk = family.build(spec, weights(config), Kit(ops=ops, linear=linear.plain, attention=TwinAttention))
        inputs = Inputs(
            ids=torch.from_numpy(ids).to(DEVICE),
            positions=torch.from_numpy(positions).to(DEVICE),
            token_types=torch.from_numpy(types_of(config, int(cu[-1]))).to(DEVICE) if typed else None,
            cu_seqlens=torch.from_numpy(cu).to(DEVICE),
        )
        trunk.plan(cu, inputs.cu_seqlens, int(lengths.max()))
        ends = inputs.cu_seqlens[1:] - 1
        with torch.inference_mode():
            rows.append(trunk.forward(inputs))
            torch.testing.assert_close(trunk.forward(inputs, ends), rows[-1][ends], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=2e-4)


@pytest.mark.skipif(INTERPRETED, reason="attention and graphs are the device's own")
@pytest.mark.parametrize("case", CONFIGS)
def test_engines_agree(case: str, tmp_path: Path) -> None:
    """bfloat16 on the GPU against float32 on the CPU; each shape three times, so that graphs are captured and replayed."""
    from safetensors.torch import save_file

    config = SIZES | CONFIGS[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights(config, "cpu"), tmp_path / "model.safetensors")
    folder = open_folder(str(tmp_path))
    cpu, gpu = (open_engine(folder, RoseConfig(device=d)) for d in ("cpu", "cuda"))
    rng = np.random.default_rng(0)
    for lengths in ([1], [40, 3], [41, 2], [42, 1], [64] * 9, [500, 17, 90]):
        batch = TokenBatch.of([rng.integers(0, 90, n).tolist() for n in lengths])
        if "lora_adaptations" in config:
            batch = TokenBatch(batch.ids, batch.cu_seqlens, types_of(config, sum(lengths)).astype(np.uint8))
        want, got = cpu.step(batch).result(), gpu.step(batch).result()
        cosines = (want * got).sum(1) / np.linalg.norm(want, axis=1) / np.linalg.norm(got, axis=1)
        # Attention that yarn sharpens doubles what bfloat16 costs: plain PyTorch is then as near as 0.9980.
        assert cosines.min() > (0.996 if case == "gemma, stretched" else 0.998), (case, lengths, cosines)
    gpu.close()


@pytest.mark.skipif(INTERPRETED, reason="the products are a Hopper GPU's")
def test_a_bert_as_wide_as_they_are_is_the_same_by_quacks_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those above are too narrow to be cut in parts. Few tokens and many, in a graph and not, against PyTorch's products."""
    from safetensors.torch import save_file

    from hortus.rose.kernels import preload

    if not preload._here(None):
        pytest.skip("needs a Hopper GPU and quack")
    used: list[preload.Tile] = []
    product = preload.product

    def noted(x: torch.Tensor, weight: torch.Tensor, tile: preload.Tile, **how: object) -> torch.Tensor:
        used.append(tile)
        return product(x, weight, tile, **how)

    monkeypatch.setattr(preload, "product", noted)
    wide = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    made = weights(SIZES | wide, "cpu")
    # As narrow ones have them: what a product gives is of the size of what it takes.
    save_file(
        {k: w * 5 / w.shape[1] ** 0.5 if w.dim() == 2 else w for k, w in made.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(SIZES | wide))
    folder = open_folder(str(tmp_path))
    rows = {}
    rng = np.random.default_rng(0)
    lengths = ([5], [60], [50, 50], [200], [300, 200], [600], [512] * 4, [512] * 35)
    batches = [TokenBatch.of([rng.integers(0, 90, n).tolist() for n in each]) for each in lengths]
    for products in ("library", "auto"):
        engine = open_engine(folder, RoseConfig(device="cuda", products=products))
        used.clear()
        for at, batch in enumerate(batches):
            first, *again = [engine.step(batch).result() for _ in range(3)]
            assert all(np.array_equal(first, other) for other in again), "eager, captured, replayed"
            rows[products, at] = first
        assert bool(used) == (products == "auto")
        engine.close()
    assert {tile.parts for tile in used} >= {1, 2, 4}
    for at, each in enumerate(lengths):
        want, got = rows["library", at], rows["auto", at]
        cosines = (want * got).sum(1) / np.linalg.norm(want, axis=1) / np.linalg.norm(got, axis=1)
        assert cosines.min() > 0.9998, (each, cosines.min())
