"""A real trunk through the engine: padding rows and slots change no row."""

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, random_batch

from hortus.bench import reference
from hortus.config import RoseConfig
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.cpu import CpuEngine
from hortus.rose.gpu import GpuEngine
from hortus.rose.kernels import twin
from hortus.rose.kernels.linear import plain
from hortus.rose.modelcfg import EmbeddingNetwork
from hortus.rose.models import Kit, find
from hortus.rose.models.qwen3 import FAMILY
from hortus.rose.network import Inputs
from hortus.types import ModelInfo

SHAPE = reference.SHAPES["tiny"]


class MeanOfTrunk:
    width = SHAPE.hidden
    longest_matters = True

    def __init__(self):
        spec = FAMILY.spec_from_config(reference.config_json(SHAPE, causal=False))
        torch.manual_seed(0)
        weights = {name: torch.randn(shape) * 0.2 for name, shape in FAMILY.shapes(spec).items()}
        self._trunk = FAMILY.build(spec, weights, Kit(twin, plain, TwinAttention))
        self.plan, self.hidden = self._trunk.plan, self._trunk.forward

    def look(self, ids_cpu, cu_seqlens_cpu):
        pass

    def forward(self, inputs):
        return self.pooled(self.hidden(inputs), inputs)

    def hidden_like(self, tokens):
        return torch.full((tokens, self.width), torch.nan)

    def pooled(self, x, inputs):
        if inputs.span_tokens is None:
            return twin.pool(x, inputs.cu_seqlens, "mean")
        return twin.pool(x.index_select(0, inputs.span_tokens), inputs.span_cu_seqlens, "mean")


class Now(FakeDevice):
    """Runs at once: the twin attention plans on the host, so a step cannot wait for its turn."""

    def enqueue(self, what, work):
        super().enqueue(what, work)
        self.advance()


def test_padding_changes_no_row():
    network = MeanOfTrunk()
    info = ModelInfo(name="t", width=SHAPE.hidden, max_tokens=512, vocab_size=SHAPE.vocab)
    engine = GpuEngine(network, info, RoseConfig(cuda_graphs=False), device=Now(), piece_tokens=256)
    rng = np.random.default_rng(0)
    for lengths in ([1], [64], [3, 70, 1], [30] * 9, [300, 2, 90]):
        batch = random_batch(rng, lengths)
        batch.ids[:] %= SHAPE.vocab
        rows = engine.step(batch).result()
        for i in range(len(batch)):
            one = batch.slice(i, i + 1)
            n, cu = one.total_tokens, torch.tensor(one.cu_seqlens)
            with torch.inference_mode():
                network.plan(one.cu_seqlens, cu, n)
                want = network.forward(Inputs(torch.from_numpy(one.ids), torch.arange(n, dtype=torch.int32), None, cu))
            np.testing.assert_allclose(rows[i : i + 1], want.numpy(), atol=1e-5)


def test_spans_are_the_cpu_engine_s():
    network = MeanOfTrunk()
    info = ModelInfo(name="t", width=SHAPE.hidden, max_tokens=512, vocab_size=SHAPE.vocab)
    gpu = GpuEngine(network, info, RoseConfig(), device=Now(), piece_tokens=256)
    cpu = CpuEngine(network, info)
    rng = np.random.default_rng(0)
    for lengths in ([1], [64], [3, 70, 1], [300, 2, 90]):
        batch = random_batch(rng, lengths, spans=True)
        batch.ids[:] %= SHAPE.vocab
        np.testing.assert_allclose(gpu.step(batch).result(), cpu.step(batch).result(), atol=1e-5)


class Pooled:
    """A head that is its pooling."""

    kind, labels, width, normalize, parameters = "embed", (), SHAPE.hidden, False, 0

    def __init__(self, pooling):
        self.pooling = pooling

    def __call__(self, x, cu_seqlens):
        return twin.pool(x, cu_seqlens, self.pooling)


class Further:
    """The plain operations, as a device has them whose rows are a multiple of 16."""

    @staticmethod
    def picked(cu_seqlens, tokens, mode):
        rows = twin.picked(cu_seqlens, tokens, mode)
        return None if rows is None or tokens < 64 else torch.nn.functional.pad(rows, (0, -len(rows) % 16))


@pytest.mark.parametrize("mode", ["cls", "last"])
@pytest.mark.parametrize("ops", [twin, Further])
def test_rows_picked_among_padding_are_the_cpu_engine_s(mode, ops):
    trunk = MeanOfTrunk()._trunk
    info = ModelInfo(name="t", width=SHAPE.hidden, max_tokens=512, vocab_size=SHAPE.vocab)
    padded = EmbeddingNetwork(trunk, Pooled(mode), 0, ops, torch.empty(0))
    gpu = GpuEngine(padded, info, RoseConfig(cuda_graphs=False), device=Now(), piece_tokens=256)
    cpu = CpuEngine(EmbeddingNetwork(trunk, Pooled(mode), 0, twin, torch.empty(0)), info)
    rng = np.random.default_rng(0)
    for lengths in ([1], [64], [3, 70, 1], [30] * 9, [1] * 20, [1] * 64, [300, 2, 90]):
        batch = random_batch(rng, lengths)
        batch.ids[:] %= SHAPE.vocab
        np.testing.assert_allclose(gpu.step(batch).result(), cpu.step(batch).result(), atol=1e-5)


ENCODERS = {
    "mpnet": {},
    "bert": {"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    "deberta-v2": {"relative_attention": True, "pos_att_type": "c2p|p2c", "share_att_key": True, "position_buckets": 8},
}


class MeanOfEncoder(MeanOfTrunk):
    width, capturable = 32, False

    def __init__(self, model_type):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        sizes |= {"vocab_size": 50, "max_position_embeddings": 120, "model_type": model_type}
        family = find(model_type)
        spec = family.spec_from_config(sizes | ENCODERS[model_type])
        torch.manual_seed(0)
        weights = {name: torch.randn(shape) * 0.2 for name, shape in family.shapes(spec).items()}
        self._trunk = family.build(spec, weights, Kit(twin, plain, TwinAttention))
        self.plan, self.hidden = self._trunk.plan, self._trunk.forward


@pytest.mark.parametrize("model_type", ENCODERS)
def test_a_bias_on_scores_is_planned_anew_for_each_step(model_type):
    """Equal shapes again and again, of other lengths: a graph would replay the first step's."""
    network = MeanOfEncoder(model_type)
    info = ModelInfo(name="t", width=32, max_tokens=110, vocab_size=50)
    gpu = GpuEngine(network, info, RoseConfig(), device=Now(), piece_tokens=512)
    cpu = CpuEngine(network, info)
    rng = np.random.default_rng(0)
    for lengths in ([60], [62], [1], [64], [30, 2], [20, 12], [7, 25], [110] * 3, [90, 100, 110, 1]):
        batch = random_batch(rng, lengths)
        batch.ids[:] %= 50
        np.testing.assert_allclose(gpu.step(batch).result(), cpu.step(batch).result(), atol=1e-5)
    assert len(gpu.graphs) == 0
