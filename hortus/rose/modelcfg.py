"""From a folder's config.json to a network: finds the family, reads the weights, joins trunk and head.

Does not know devices (it is given a Kit), batches, or what is inside a family.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.folder import ModelFolder
from hortus.rose import loader, logits
from hortus.rose.attention.unseen import Unseen
from hortus.rose.heads import Head, plan_head, plan_tokens
from hortus.rose.models import Family, Kit, Spec, Trunk, Weights, find
from hortus.rose.network import Inputs
from hortus.types import Int32


def read_spec(config: dict[str, Any]) -> tuple[Family, Spec]:
    """config.json -> the family's own frozen spec. StartError names what is not supported. Pure but for one import."""
    if not isinstance(model_type := config.get("model_type"), str):
        raise StartError("config.json has no model_type, so the architecture is not known")
    family = find(model_type)
    if config.get("quantization_config"):
        raise StartError("config.json: quantization_config: quantised weights are not supported")
    try:
        return family, family.spec_from_config(config)
    except (TypeError, ValueError, AttributeError, KeyError) as e:  # a value of a kind that nobody writes there
        raise StartError(
            f"config.json of {model_type} has a value that cannot be read: {type(e).__name__}: {e}"
        ) from None


class RowHead(Protocol):
    """What makes rows of hidden states: heads.Head, logits.LogitHead, AnswerHead, SparseHead. Fields: see ModelInfo."""

    kind: str
    labels: tuple[str, ...]
    width: int
    normalize: bool
    pooling: str
    """cls or last: it reads nothing but each sequence's first token, or its last."""
    parameters: int
    """Those that it read from files of its own."""

    def __call__(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> rows [N, width] float32."""


class EmbeddingNetwork:
    """Trunk and head as one function: a Network."""

    def __init__(self, trunk: Trunk, head: RowHead, parameters: int, ops: ModuleType, like: Tensor) -> None:
        """like: [0, hidden], of the trunk's device and format."""
        self._trunk, self._like = trunk, like
        self.head = head
        self._ops = ops
        self._picks = head.pooling in ("cls", "last")
        self.width = head.width
        self.parameters = parameters
        self.longest_matters = True
        """False when no attention backend reads max_seqlen inside a graph. Set by engine.py, read by gpu.py."""
        self.capturable = True
        """False when attention plans on the host before each step, which a graph's replay leaves out. As above."""
        self.unseen: Unseen | None = None
        """For late interaction whose queries are filled up with tokens that the others do not see. Set by engine.py."""

    def look(self, ids_cpu: Int32, cu_seqlens_cpu: Int32) -> None:
        if self.unseen is not None:
            self.unseen.find(ids_cpu, cu_seqlens_cpu)

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._trunk.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs) -> Tensor:
        """[rows, width] float32."""
        if inputs.span_tokens is not None:
            return self.pooled(self.hidden(inputs), inputs)
        cu, rows = inputs.cu_seqlens, None
        if self._picks:
            rows = self._ops.picked(cu, inputs.ids.shape[0], self.head.pooling)
        if rows is not None:  # the one that is read stands for its sequence, as a span's tokens do
            cu = torch.arange(rows.shape[0] + 1, dtype=cu.dtype, device=cu.device)
        return self.head(self._trunk.forward(inputs, rows), cu)

    def hidden(self, inputs: Inputs) -> Tensor:
        return self._trunk.forward(inputs)

    def hidden_like(self, tokens: int) -> Tensor:
        return self._like.new_empty(tokens, self._like.shape[1])

    def pooled(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        assert inputs.span_tokens is not None, "called only where there are spans"
        assert inputs.span_cu_seqlens is not None, "called only where there are spans"
        # A span's tokens stand for a sequence's: every way of pooling works on them as it is.
        return self.head(hidden.index_select(0, inputs.span_tokens), inputs.span_cu_seqlens)


def build_network(
    folder: ModelFolder,
    family: Family,
    spec: Spec,
    kit: Kit,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    kind: str = "auto",
) -> EmbeddingNetwork:
    """The folder's model on a device. load_format, kind: RoseConfig's. Raises StartError."""
    wanted, make_head = _head(folder, family, spec, kit, folder.kind if kind == "auto" else kind, device, load_format)
    shapes = family.shapes(spec) | wanted
    if load_format == "dummy":
        weights = loader.dummy_weights(shapes, device=device, dtype=dtype)
    else:
        weights = loader.read_weights(
            folder.transformer,
            shapes,
            device=device,
            dtype=dtype,
            prefixes=family.prefixes,
            renames=family.renames,
            ignored=family.ignored,
        )
    parameters = sum(w.numel() for w in weights.values())
    head = make_head(weights)
    trunk = family.build(spec, weights, kit)
    assert not weights, f"the trunk left weights behind: {sorted(weights)[:4]}"
    like = torch.empty(0, spec.hidden, device=device, dtype=dtype)
    return EmbeddingNetwork(trunk, head, parameters + head.parameters, kit.ops, like)


def _head(
    folder: ModelFolder, family: Family, spec: Spec, kit: Kit, kind: str, device: torch.device, load_format: str
) -> tuple[dict[str, tuple[int, ...]], Callable[[Weights], RowHead]]:
    """(tensors that the head wants of the trunk's files, what makes it and takes them out)."""
    if kind == "embed":
        made = Head(plan_head(folder, spec.hidden), kit.ops, device, load_format)
        return {}, lambda _: made
    if kind == "tokens":
        tokens = plan_tokens(folder, spec.hidden)
        inside: dict[str, tuple[int, ...]] = {}
        if folder.late is not None and folder.late.dim is not None:
            inside = {"linear.weight": (folder.late.dim, spec.hidden)}
        return inside, lambda weights: Head(tokens, kit.ops, device, load_format, weights.pop("linear.weight", None))
    if (kind == "rerank" and _writes(folder)) or (kind == "classify" and logits.answers_by_token(folder)):
        if family.language is None:
            raise StartError(
                f"{folder.path}: a reranker of model_type {spec.model_type} that answers by a token is not supported"
            )
        language, answers = family.language(spec), logits.answers_of(folder)
        return {language.decoder: (spec.vocab, spec.hidden)}, lambda weights: logits.AnswerHead(
            language, answers, weights, kit
        )
    if kind == "rerank" and len(logits.labels_of(folder.config)) != 1:
        raise StartError(f"{folder.path}: --kind rerank needs a classifier with one label, or a language model")
    if kind in ("classify", "rerank") and family.classifier is not None:
        labels = logits.labels_of(folder.config)
        classifier = family.classifier(spec, len(labels))
        shapes = {name: shape for step in classifier.steps for name, shape in step.shapes.items()}
        return shapes, lambda weights: logits.LogitHead(classifier, labels, weights, kit)
    if kind == "sparse" and family.vocabulary is not None:
        vocabulary = family.vocabulary(spec)
        pooling, twice = logits.sparse_options(folder)
        shapes = {name: shape for step in vocabulary.steps for name, shape in step.shapes.items()}
        shapes[vocabulary.decoder] = (spec.vocab, spec.hidden)
        if vocabulary.bias is not None:
            shapes[vocabulary.bias] = (spec.vocab,)
        return shapes, lambda weights: logits.SparseHead(vocabulary, weights, kit, pooling=pooling, twice=twice)
    raise StartError(f"{folder.path}: a {kind} model of model_type {spec.model_type} is not supported (--kind)")


def _writes(folder: ModelFolder) -> bool:
    """Whether the folder holds a language model: one that writes on, token by token."""
    return str((folder.config.get("architectures") or [""])[0]).endswith("ForCausalLM")
