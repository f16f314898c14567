"""A model folder made on the spot, for what no installed model has."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hortus.folder import ModelFolder, Module

END = "<|endoftext|>"


def pplx_folder(path: Path, *, contextual: bool = True, name: str = "pplx") -> ModelFolder:
    """A byte for a token, nothing added around a text, one special token: pplx-embed's habits in small."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    path.mkdir(exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": END, "eos_token": END}))
    suffix = "Contextual" if contextual else ""
    return ModelFolder(
        path=path,
        name=name,
        revision=None,
        transformer=path,
        config={"vocab_size": 300, "auto_map": {"AutoModel": f"modeling.PPLXQwen3{suffix}Model"}},
        modules=(Module("Transformer", path, {}), Module("FlexibleQuantizer", path, {})),
        max_tokens=64,
    )
