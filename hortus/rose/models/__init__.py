"""Model families, one file each: shapes and layers, and nothing about devices, files or batches.

The contract. A file `models/<name>.py` exposes one constant, `FAMILY: Family`, and is listed in `_FILES` by the
`model_type` its config.json carries. It is only imported when such a model is opened. What each part of a Family does:

    spec_from_config(config)  config.json -> a frozen Spec; StartError names what is not supported. Pure.
    shapes(spec)              every tensor the trunk reads: checkpoint name (prefix stripped, renamed) -> shape.
    build(spec, weights, kit) the trunk. `weights` has exactly the names of `shapes`, in the run's dtype on its device;
                              the trunk takes them out (`weights.pop`) as it fuses them, so that no weight lives twice.
    prefixes, renames, ignored   how a checkpoint's names become those of `shapes`: see rose/loader.

The trunk ends with the last hidden states (a final norm included), of all tokens or of those it is asked for. Pooling, Dense
and Normalize come after it, the same for all families: rose/heads. Heads that end in logits differ by names only, and so are
data of a family (rose/logits):

    classifier(spec, labels)  the matrices from the pooled token to the logits, as in *ForSequenceClassification.
    vocabulary(spec)          those of the masked language model's head, as in *ForMaskedLM.
    language(spec)            the one matrix of a causal language model's head, as in *ForCausalLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import AttentionFactory, Heads
from hortus.rose.kernels.few import FewFactory
from hortus.rose.kernels.linear import LinearFactory
from hortus.rose.network import Inputs
from hortus.types import Int32

_FILES = {
    "bert": "bert",
    "camembert": "bert",
    "deberta-v2": "deberta",
    "distilbert": "bert",
    "gemma": "gemma",
    "gemma3_text": "gemma",
    "gte": "rotary_bert",
    "jina_embeddings_v3": "bert",
    "llama": "llama",
    "mistral": "llama",
    "modernbert": "modernbert",
    "mpnet": "bert",
    "new": "rotary_bert",
    "nomic_bert": "rotary_bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "qwen2": "qwen3",
    "qwen3": "qwen3",
    "bidirectional_pplx_qwen3": "qwen3",
}

Weights = dict[str, Tensor]

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""An activation as config.json calls it -> a key of kernels.linear.ACTIVATIONS."""


class Attended(Protocol):
    """(what makes a layer's q, k and v; its input; the step's inputs) -> attention's output, [T, heads d]."""

    @property
    def most_tokens(self) -> int: ...
    def __call__(self, layer: Any, x: Any, inputs: Inputs) -> Tensor: ...


class AttendedFactory(Protocol):
    def __call__(self, layers: Sequence[Any], heads: Heads, eps: float) -> Attended | None:
        """layers: what makes each layer's q, k and v: what ops.turned made."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What a trunk is built from. Chosen by device; a trunk never asks which it was given."""

    ops: ModuleType
    """kernels.twin or kernels.fused."""
    linear: LinearFactory
    """kernels.linear.plain, or a device's own."""
    attention: AttentionFactory
    few: FewFactory | None = None
    """A way of its own through all post-norm layers for few tokens, where the device has one."""
    attended: AttendedFactory | None = None
    """Rotation and attention as one for few tokens, where the device has that."""
    added: LinearFactory | None = None
    """As linear, where the device has it, for products that ops.add_layer_norm or add_layer_norm_ adds and nobody else
    reads: it may leave them in parts, [P, T, out] float32."""


class Spec(Protocol):
    """What every family's spec has, whatever else it holds. A frozen dataclass."""

    @property
    def model_type(self) -> str: ...
    @property
    def hidden(self) -> int:
        """Values a token."""

    @property
    def vocab(self) -> int: ...
    @property
    def heads(self) -> Heads: ...


class Trunk(Protocol):
    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """As Network.plan: pass it on to the attention."""

    def forward(self, inputs: Inputs, rows: Tensor | None = None) -> Tensor:
        """[T, hidden] last hidden states; rows, [N <= T] int32: of these alone, [N, hidden]. Capturable: no synchronisation
        on a GPU. What follows the last attention need not be computed for the others.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One matrix of a head: LayerNorm(activation(x W^T + b))."""

    name: str
    """Checkpoint name of the matrix, without `.weight`."""
    inputs: int
    outputs: int
    activation: str | None = None
    """A key of kernels.linear.ACTIVATIONS."""
    bias: bool = True
    norm: str | None = None
    """Checkpoint name of the LayerNorm after it; None: there is none."""
    norm_bias: bool = True
    eps: float = 1e-12

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {self.name + ".weight": (self.outputs, self.inputs)}
        if self.bias:
            found[self.name + ".bias"] = (self.outputs,)
        if self.norm is not None:
            found[self.norm + ".weight"] = (self.outputs,)
            if self.norm_bias:
                found[self.norm + ".bias"] = (self.outputs,)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Classifier:
    """From a sequence's hidden states to its logits."""

    pooling: str
    """ops.pool's mode."""
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """From a token's hidden state to a logit for each entry of the vocabulary."""

    steps: tuple[Step, ...]
    decoder: str
    """Checkpoint name of the last matrix, [vocabulary, hidden]."""
    tied: bool
    """It is one of the trunk's: the word embeddings."""
    bias: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One file's FAMILY. S below is the family's own Spec class."""

    spec_from_config: Callable[[dict[str, Any]], Any]
    """config.json -> S."""
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    """S -> names and shapes."""
    build: Callable[[Any, Weights, Kit], Trunk]
    """(S, weights, kit) -> trunk."""
    classifier: Callable[[Any, int], Classifier] | None = None
    """(S, labels) -> its head; None: such models are not supported."""
    vocabulary: Callable[[Any], Vocabulary] | None = None
    """S -> its head; None: such models are not supported."""
    language: Callable[[Any], Vocabulary] | None = None
    """S -> the last matrix of *ForCausalLM, for rerankers that answer by a token; None: such models are not supported."""
    prefixes: tuple[str, ...] = ()
    """Checkpoint names may start with one of these (`model.`); stripped."""
    renames: tuple[tuple[str, str], ...] = ()
    """(old, new): old name endings that stand for new ones."""
    ignored: tuple[str, ...] = ()
    """Regular expressions (full match, prefix stripped) of left-over names that do no harm, such as `lm_head.*`."""
    refused_dtypes: tuple[tuple[str, str], ...] = ()
    """(dtype, why): number formats this family cannot run in, such as ("float16", "overflows")."""


def find(model_type: str) -> Family:
    """The family of a config.json's model_type; StartError lists those there are."""
    if model_type not in _FILES:
        raise StartError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(_FILES))}")
    family = importlib.import_module(f"{__name__}.{_FILES[model_type]}").FAMILY
    assert isinstance(family, Family), "each models/*.py exposes FAMILY"
    return family


def every() -> dict[str, Family]:
    """Each model_type there is, in order, with its family. Imports them all."""
    return {model_type: find(model_type) for model_type in sorted(_FILES)}
