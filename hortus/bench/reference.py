"""Random Qwen3 models of a true shape, written as folders, and what transformers says of them in float32.

The truth that the GPU checks compare with: the same random weights, one sequence at a time, no packing, no bfloat16.
Does not know our engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hortus.bench.results import cosines
from hortus.types import Float32, TokenBatch

__all__ = ["SHAPES", "Qwen3Shape", "batch_of", "config_json", "cosines", "random_model", "truth", "write_folder"]


class Qwen3Shape(NamedTuple):
    """Sizes of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


SHAPES = {
    "0.6b": Qwen3Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "4b": Qwen3Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "tiny": Qwen3Shape(64, 2, 4, 2, 16, 96, 500),
}


def config_json(shape: Qwen3Shape, *, causal: bool) -> dict[str, Any]:
    """config.json of Qwen3-Embedding (causal) or pplx-embed."""
    return {
        "architectures": ["Qwen3Model" if causal else "PPLXQwen3Model"],
        "model_type": "qwen3" if causal else "bidirectional_pplx_qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": not causal,
        "dtype": "float32",
    }


def write_folder(folder: Path, shape: Qwen3Shape, *, causal: bool) -> Path:
    """A sentence-transformers folder without weights: mean pooling, or the last token for a causal model."""
    pooling = folder / "1_Pooling"
    pooling.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(shape, causal=causal)))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    mode = "pooling_mode_lasttoken" if causal else "pooling_mode_mean_tokens"
    (pooling / "config.json").write_text(json.dumps({"word_embedding_dimension": shape.hidden, mode: True}))
    return folder


def random_model(
    shape: Qwen3Shape, folders: Sequence[Path], *, device: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """transformers' Qwen3Model in float32 with random weights, which are saved once for all the folders, as `dtype`."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3Model

    config = config_json(shape, causal=True)
    del config["architectures"], config["use_bidirectional_attention"], config["model_type"], config["dtype"]
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3Model(Qwen3Config(**config))
        # Norm weights start as ones, which would hide a norm that ignores them.
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.uniform_(0.5, 1.5)
    model.requires_grad_(False).eval()
    first = folders[0] / "model.safetensors"
    save_file({k: v.to(dtype).cpu().contiguous() for k, v in model.state_dict().items()}, first)
    for other in folders[1:]:
        (other / "model.safetensors").unlink(missing_ok=True)
        (other / "model.safetensors").symlink_to(first)
    return model


@torch.inference_mode()
def truth(model: Any, batch: TokenBatch, *, causal: bool) -> Float32:
    """[sequences, hidden]: each sequence alone through transformers, then its last token or the mean of all."""
    for layer in model.layers:
        layer.self_attn.is_causal = causal
    rows = []
    for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.ids[a:b].astype(np.int64)).to(model.device)[None]
        # A mask of None leaves the choice to each layer's is_causal.
        hidden = model(ids, attention_mask={"full_attention": None}, use_cache=False).last_hidden_state[0]
        rows.append((hidden[-1] if causal else hidden.mean(0)).float().cpu().numpy())
    return np.stack(rows)


def batch_of(rng: np.random.Generator, lengths: Sequence[int], vocab: int) -> TokenBatch:
    """Random ids in sequences of these lengths."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return TokenBatch(rng.integers(0, vocab, int(cu[-1])).astype(np.int32), cu)
