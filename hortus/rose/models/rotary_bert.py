"""BERT's blocks with rotary positions and a gated MLP: NomicBERT and GTE.

LayerNorm after each residual sum, as in BERT; no learned positions (Nussbaum et al., arXiv 2402.01613; Zhang et al., arXiv
2407.19669; transformers' NomicBertModel and GteModel for the details). What differs is data: names, biases, defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.kernels.linear import ACTIVATIONS, Linear
from hortus.rose.models import ACTIVATION_NAMES, Classifier, Family, Kit, Step, Vocabulary, Weights
from hortus.rose.models.rotary import Rope, read_rope, rotary_tables
from hortus.rose.network import Inputs
from hortus.types import Int32

_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
"""Keys of the config.json that came with the first NomicBERT checkpoints -> transformers' own."""

_NOMIC_FIXED = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": None,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
"""Its switches, and the only place of each that is supported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Where one kind of checkpoint keeps its tensors; those of a block follow `layer` and its number."""

    embeddings_norm: str
    layer: str
    qkv: str
    out: str
    attention_norm: str
    up_gate: tuple[str, ...]
    """One matrix, up before gate, or the two."""
    down: str
    norm: str
    attention_bias: bool
    down_bias: bool
    head: tuple[str, str, str, str]
    """The masked language model's: matrix, norm, decoder, bias."""
    theta: float
    activation: str
    """Defaults of config.json."""


_NAMES = {
    "nomic_bert": Names(
        embeddings_norm="emb_ln",
        layer="encoder.layers.",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        attention_norm="norm1",
        up_gate=("mlp.fc11", "mlp.fc12"),
        down="mlp.fc2",
        norm="norm2",
        attention_bias=False,
        down_bias=False,
        head=(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.layer_norm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
        theta=1000.0,
        activation="silu",
    ),
    "gte": Names(
        embeddings_norm="embeddings.LayerNorm",
        layer="encoder.layer.",
        qkv="attention.qkv_proj",
        out="attention.o_proj",
        attention_norm="attn_ln",
        up_gate=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        norm="mlp_ln",
        attention_bias=True,
        down_bias=True,
        head=("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias"),
        theta=160_000.0,
        activation="gelu",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryBertSpec:
    """What config.json says, checked."""

    model_type: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: Heads
    rope: Rope
    positions: int
    """Longest sequence: rows of the rotary tables."""
    eps: float
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    segments: int
    """Rows of the token type table; 0: there is none."""
    tied: bool
    """The masked language model's last matrix is the word embeddings'."""

    @property
    def names(self) -> Names:
        return _NAMES[self.model_type]


def spec_from_config(config: dict[str, Any]) -> RotaryBertSpec:
    """config.json -> RotaryBertSpec; StartError names the key at fault. Defaults are transformers'."""
    kind = config["model_type"]
    names = _NAMES[kind]
    if kind == "nomic_bert":
        for key, only in _NOMIC_FIXED.items():
            if config.get(key, only) != only:
                raise StartError(f"config.json of {kind}: {key} {config[key]!r} is not supported; supported: {only!r}")
        config = {_NOMIC_KEYS.get(key, key): value for key, value in config.items()}
        if config.get("hidden_act") == "swiglu":
            config["hidden_act"] = "silu"

    def whole(key: str, default: int | None = None, *, least: int = 1) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise StartError(f"config.json of {kind}: {key} must be a whole number from {least}, not {value!r}")
        return value

    if (act := config.get("hidden_act", names.activation)) not in ACTIVATION_NAMES:
        raise StartError(
            f"config.json of {kind}: activation {act!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    head_dim = hidden // heads
    if hidden % heads or head_dim % 2 or config.get("head_dim") not in (None, head_dim):
        raise StartError(f"config.json of {kind}: hidden size {hidden} does not make {heads} heads of even size")
    return RotaryBertSpec(
        model_type=kind,
        hidden=hidden,
        layers=whole("num_hidden_layers", least=0),
        intermediate=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        heads=Heads(heads=heads, kv_heads=heads, head_dim=head_dim),
        rope=read_rope(config, names.theta, head_dim),
        positions=whole("max_position_embeddings", 2048 if kind == "nomic_bert" else 8192),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=ACTIVATION_NAMES[act],
        segments=whole("type_vocab_size", 2 if kind == "nomic_bert" else 1, least=0),
        tied=config.get("tie_word_embeddings", True) is not False,
    )


def shapes(spec: RotaryBertSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without prefix."""
    h, inner, names = spec.hidden, spec.intermediate, spec.names
    found: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (spec.vocab, h)}
    if spec.segments:
        found["embeddings.token_type_embeddings.weight"] = (spec.segments, h)

    def add(name: str, *shape: int, bias: bool = True) -> None:
        found[name + ".weight"] = shape
        if bias:
            found[name + ".bias"] = shape[:1]

    add(names.embeddings_norm, h)
    for n in range(spec.layers):
        at = f"{names.layer}{n}."
        add(at + names.qkv, 3 * h, h, bias=names.attention_bias)
        add(at + names.out, h, h, bias=names.attention_bias)
        add(at + names.attention_norm, h)
        for name in names.up_gate:
            add(at + name, 2 * inner // len(names.up_gate), h, bias=False)
        add(at + names.down, h, inner, bias=names.down_bias)
        add(at + names.norm, h)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block."""

    qkv: Callable[[Tensor, Any], Tensor]
    """(input, the step's angles) -> q, k and v; q and k turned."""
    out: Linear
    attention_norm: tuple[Tensor, Tensor]
    up_gate: Linear
    down: Linear
    norm: tuple[Tensor, Tensor]


class RotaryBert:
    """The trunk."""

    def __init__(self, spec: RotaryBertSpec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops = spec, kit.ops
        self._act = ACTIVATIONS[spec.activation]
        self._attention = kit.attention(spec.heads)
        self._word = weights.pop("embeddings.word_embeddings.weight")
        self._segment = weights.pop("embeddings.token_type_embeddings.weight") if spec.segments else None
        tables = rotary_tables(spec.rope, spec.heads.head_dim, spec.positions, self._word.device)
        self._rotary = kit.ops.Rotary(*tables)
        self._norm = _norm(weights, spec.names.embeddings_norm)
        self._layers = [_layer(spec, weights, kit, n, self._rotary) for n in range(spec.layers)]

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs) -> Tensor:
        """[T, hidden] after the last layer."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        x: Tensor = ops.embed_layer_norm(
            inputs.ids, inputs.positions, inputs.token_types, self._word, None, self._segment, *self._norm, eps
        )
        angles = self._rotary.at(inputs.positions)
        for layer in self._layers:
            qkv = layer.qkv(x, angles).contiguous()  # [T, 3 heads head_dim]
            q, k, v = torch.split(qkv.view(-1, 3 * h.heads, h.head_dim), h.heads, 1)
            a = self._attention.run(q, k, v).flatten(1)
            x = ops.add_layer_norm(layer.out(a), x, *layer.attention_norm, eps)
            up, gate = layer.up_gate(x).chunk(2, -1)
            x = ops.add_layer_norm(layer.down(self._act(gate) * up), x, *layer.norm, eps)
        return x


def _layer(spec: RotaryBertSpec, weights: Weights, kit: Kit, n: int, rotary: Any) -> Layer:
    names, h = spec.names, spec.heads
    at = f"{names.layer}{n}."

    def take(name: str) -> tuple[Tensor, Tensor | None]:
        return weights.pop(at + name + ".weight"), weights.pop(at + name + ".bias", None)

    return Layer(
        qkv=kit.ops.turned(*take(names.qkv), None, None, rotary, h.heads, h.kv_heads, spec.eps, kit.linear),
        out=kit.linear(*take(names.out)),
        attention_norm=_norm(weights, at + names.attention_norm),
        up_gate=kit.linear(torch.cat([weights.pop(at + name + ".weight") for name in names.up_gate])),
        down=kit.linear(*take(names.down)),
        norm=_norm(weights, at + names.norm),
    )


def _norm(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights.pop(name + ".weight"), weights.pop(name + ".bias")


def classifier(spec: RotaryBertSpec, labels: int) -> Classifier:
    """*ForSequenceClassification: the first token, through BERT's pooler."""
    h = spec.hidden
    first = Step(name="pooler.dense", inputs=h, outputs=h, activation="tanh")
    return Classifier(pooling="cls", steps=(first, Step(name="classifier", inputs=h, outputs=labels)))


def vocabulary(spec: RotaryBertSpec) -> Vocabulary:
    """*ForMaskedLM."""
    name, norm, decoder, bias = spec.names.head
    act = "gelu" if spec.model_type == "gte" else spec.activation  # GTE's: whatever hidden_act says
    return Vocabulary(
        steps=(Step(name=name, inputs=spec.hidden, outputs=spec.hidden, activation=act, norm=norm, eps=spec.eps),),
        decoder=("embeddings.word_embeddings" if spec.tied else decoder) + ".weight",
        tied=spec.tied,
        bias=bias if spec.tied else decoder + ".bias",  # untied, the reference adds the decoder's own
    )


FAMILY = Family(
    spec_from_config=spec_from_config,
    shapes=shapes,
    build=RotaryBert,
    classifier=classifier,
    vocabulary=vocabulary,
    prefixes=("nomic_bert.", "gte.", "new.", "bert.", "model."),
    ignored=(r"pooler\..*", r"cls\..*", r"lm_head\..*", r"classifier\..*", r"(.*\.)?rotary_emb\..*"),
)
