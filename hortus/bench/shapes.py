"""Folders of true shapes with random weights and a tokenizer, which every server and library can open; what `--shape` names.

Qwen3's are written by reference.py; the encoders here are published ones: config.json holds what those models' own holds, as
far as it decides how long they take. Weights are bfloat16, and large enough that what attention gives shows in the vectors:
a check of vectors that all look alike checks nothing. Does not know what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hortus.bench import reference
from hortus.bench.texts import lee_sentences, sentences
from hortus.rose.models import find

END = "<|endoftext|>"
AROUND = ("[CLS]", "[SEP]")
"""Tokens around an encoder's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """A config.json, and what comes after the trunk."""

    config: dict[str, Any]
    pooling: str
    """The true key among `pooling_mode_*`."""
    normalize: bool


_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "num_attention_heads": 12,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
_MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "dtype": "bfloat16",
}
_SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 500}
ENCODERS = {
    "minilm": EncoderShape(
        config=_BERT | {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
        pooling="mean_tokens",
        normalize=True,
    ),
    "bge-base": EncoderShape(
        config=_BERT | {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
        pooling="cls_token",
        normalize=True,
    ),
    "modernbert-base": EncoderShape(config=_MODERNBERT, pooling="mean_tokens", normalize=False),
    "tiny-bert": EncoderShape(config=_BERT | _SMALL | {"num_hidden_layers": 2}, pooling="cls_token", normalize=True),
    "tiny-modernbert": EncoderShape(
        config=_MODERNBERT | _SMALL | {"num_hidden_layers": 4, "local_attention": 16},
        pooling="mean_tokens",
        normalize=False,
    ),
}
SHAPES = (*reference.SHAPES, *ENCODERS)


def model_name(shape: str) -> str:
    """What the shape's model is called in results."""
    return f"{shape}-random" if shape in ENCODERS else f"qwen3-{shape}-random"


def shape_folder(work: Path, shape: str, *, texts: Sequence[Path] = (), device: str = "cpu") -> Path:
    """work/its name: random bfloat16 weights and a byte-level BPE tokenizer of the texts (none: of the Lee corpus).

    Qwen3's look both ways and are pooled by mean, as pplx-embed. device: where the weights are made.
    """
    path = work / model_name(shape)
    lines = [s for f in texts for s in sentences(f.read_text(encoding="utf-8"))] if texts else lee_sentences()
    if shape in ENCODERS:
        encoder = ENCODERS[shape]
        _write_encoder(path, encoder, device=device)
        _write_tokenizer(path, lines, encoder.config["vocab_size"], encoder.config["max_position_embeddings"], AROUND)
    else:
        _write_qwen3(path, reference.SHAPES[shape], device=device)
        _write_tokenizer(path, lines, reference.SHAPES[shape].vocab, 32768)
    return path


def _write_qwen3(path: Path, shape: reference.Qwen3Shape, *, device: str) -> None:
    """As transformers and vLLM know it."""
    reference.write_folder(path, shape, causal=False)
    config = reference.config_json(shape, causal=False) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    reference.random_model(shape, [path], device=device, dtype=torch.bfloat16)


def _write_encoder(path: Path, shape: EncoderShape, *, device: str) -> None:
    from safetensors.torch import save_file

    modes = {f"pooling_mode_{shape.pooling}": True, "word_embedding_dimension": shape.config["hidden_size"]}
    kinds = ("Transformer", "Pooling", "Normalize")[: 3 if shape.normalize else 2]
    paths = [f"{n}_{kind}" if n else "" for n, kind in enumerate(kinds)]
    for part in paths:
        (path / part).mkdir(parents=True, exist_ok=True)
    modules = [
        {"idx": n, "name": str(n), "path": part, "type": f"sentence_transformers.models.{kind}"}
        for n, (part, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / paths[1] / "config.json").write_text(json.dumps(modes))
    (path / "config.json").write_text(json.dumps(shape.config))
    family = find(shape.config["model_type"])
    spec = family.spec_from_config(shape.config)
    sizes = family.shapes(spec)
    if shape.config["model_type"] == "bert":  # its checkpoints have the pooler, which no vector goes through
        sizes |= spec.classifier[0].shapes
    torch.manual_seed(0)
    made = {}
    for name, size in sizes.items():
        weight = torch.empty(size, device=device)
        if len(size) == 1:  # neither 0 nor 1, which would hide a bias or a norm that is ignored
            weight.uniform_(-0.1, 0.1) if name.endswith("bias") else weight.uniform_(0.5, 1.5)
        else:  # values of size 1 stay so
            weight.normal_(std=1.0 if "embeddings" in name else size[1] ** -0.5)
        if ".query." in name or ".key." in name:  # else a first token looks at all alike, and knows little of its text
            weight *= 2
        made[name] = weight.to("cpu", torch.bfloat16)
    save_file(made, path / "model.safetensors")


def _write_tokenizer(path: Path, lines: Sequence[str], vocab: int, longest: int, around: Sequence[str] = ()) -> None:
    """tokenizer.json: byte-level BPE of at most 8,000 entries, as Qwen's and ModernBERT's are made. around: tokens that go
    around a text; none: it stands alone.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 8000), special_tokens=[END, *around], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(lines, trainer)
    if around:
        begin, end = around
        numbers = [(token, inner.token_to_id(token)) for token in around]
        inner.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=numbers)
    inner.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": END, "model_max_length": longest}
    said["model_input_names"] = ["input_ids", "attention_mask"]
    (path / "tokenizer_config.json").write_text(json.dumps(said))
