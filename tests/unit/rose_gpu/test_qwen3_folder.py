"""Qwen3 from folders as they are published: with and without `model.`, an lm_head or none, sentence-transformers modules."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from test_qwen3 import KIT, batch_of, config, reference, rows

from hortus.errors import StartError
from hortus.folder import open_folder
from hortus.rose.modelcfg import build_network, read_spec
from hortus.rose.network import Inputs


def write(path, model, said, *, pooling, prefix="", extra=None):
    """A model folder on disk."""
    said = {**model.config.to_dict(), **said}
    (path / "config.json").write_text(json.dumps(said))
    tensors = {prefix + k: v.clone() for k, v in model.state_dict().items()}
    save_file(tensors | (extra or {}), path / "model.safetensors")
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, where) in enumerate(kinds)
            ]
        )
    )
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": model.config.hidden_size, pooling: True})
    )
    return open_folder(str(path))


@pytest.mark.parametrize(
    ("said", "pooling", "prefix", "head"),
    [
        ({"model_type": "bidirectional_pplx_qwen3", "use_bidirectional_attention": True}, "mean", "", False),
        ({}, "lasttoken", "model.", True),
        ({}, "lasttoken", "", False),
    ],
    ids=["pplx-embed", "qwen3-embedding with lm_head", "qwen3-embedding without prefix"],
)
def test_folder(tmp_path, said, pooling, prefix, head):
    causal = not said
    model = reference(config(), causal=causal)
    extra = {"lm_head.weight": model.embed_tokens.weight.detach().clone()} if head else None
    flag = "pooling_mode_lasttoken" if pooling == "lasttoken" else "pooling_mode_mean_tokens"
    folder = write(tmp_path, model, said, pooling=flag, prefix=prefix, extra=extra)
    family, spec = read_spec(folder.config)
    network = build_network(folder, family, spec, KIT, device=torch.device("cpu"), dtype=torch.float32)
    batch = batch_of([3, 20, 1, 20])
    cu = torch.tensor(batch.cu_seqlens)
    at = torch.cat([torch.arange(n, dtype=torch.int32) for n in batch.lengths.tolist()])
    with torch.inference_mode():
        network.plan(batch.cu_seqlens, cu, batch.max_seqlen)
        found = network.forward(Inputs(torch.from_numpy(batch.ids), at, None, cu))
    each = [rows(model, batch.slice(i, i + 1).ids.tolist(), causal=causal) for i in range(len(batch))]
    truth = torch.stack([r[-1] if pooling == "lasttoken" else r.mean(0) for r in each])
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


def test_a_weight_of_another_architecture_is_named(tmp_path):
    model = reference(config(), causal=True)
    folder = write(tmp_path, model, {}, pooling="pooling_mode_lasttoken", extra={"score.weight": torch.ones(1, 40)})
    family, spec = read_spec(folder.config)
    with pytest.raises(StartError, match=r"score\.weight"):
        build_network(folder, family, spec, KIT, device=torch.device("cpu"), dtype=torch.float32)
