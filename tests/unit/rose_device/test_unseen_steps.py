"""Late interaction's expanded queries on a device: the ids are looked at on the host, padding and all."""

import json

import numpy as np
import torch
from fake_device import FakeDevice
from test_trunk import Now

from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.rose.cpu import CpuEngine
from hortus.rose.engine import check_engine, open_engine
from hortus.rose.gpu import GpuEngine
from hortus.types import TokenBatch

MASK = 40
CONFIG = {
    "model_type": "bert",
    "architectures": ["HF_ColBERT"],
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def every_token(sequences):
    batch = TokenBatch.of(sequences)
    at = np.arange(batch.total_tokens, dtype=np.int32)
    return TokenBatch(batch.ids, batch.cu_seqlens, None, np.stack([at, at + 1], 1), batch.lengths)


def test_expanded_queries_are_the_cpu_engine_s(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"[MASK]": MASK}}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": 8, "query_maxlen": 12}))
    folder, config = open_folder(str(tmp_path)), RoseConfig(load_format="dummy")
    cpu = open_engine(folder, config)
    assert isinstance(cpu, CpuEngine)
    assert (cpu.info.kind, cpu.info.width) == ("tokens", 8)
    assert check_engine(folder, config) == cpu.info
    assert cpu.network.unseen is not None
    torch.manual_seed(0)
    gpu = GpuEngine(cpu.network, cpu.info, RoseConfig(), device=Now(), piece_tokens=64)
    assert isinstance(gpu._device, FakeDevice)
    rng = np.random.default_rng(0)
    for lengths in ([3], [3, 7, 1], [12] * 9):
        texts = [rng.integers(1, MASK, n).tolist() for n in lengths]
        queries = [t + [MASK] * (12 - len(t)) for t in texts]
        for sequences in (queries, texts, [*queries, *texts]):
            batch = every_token(sequences)
            rows = gpu.step(batch).result()
            np.testing.assert_allclose(rows, cpu.step(batch).result(), atol=1e-6)
            np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    # Unseen means unseen: a text's own rows are those that it has without the filled places.
    short = gpu.step(every_token([[1, 2, 3, *[MASK] * 9]])).result()
    np.testing.assert_allclose(short[:3], gpu.step(every_token([[1, 2, 3]])).result(), atol=1e-5)
    plain = gpu.step(TokenBatch.of([[1, 2, 3]])).result()
    assert plain.shape == (1, 8)
