"""Heads that end in logits: a classifier's, one row of labels a sequence, SPLADE's, a weight a vocabulary entry, and that of
a language model which answers by a token.

Which matrices there are is a family's data (models.Classifier, models.Vocabulary); how they are run is here. Logits are
answered as they are: turning them into probabilities is the gateway's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.errors import StartError
from hortus.folder import ModelFolder, token_id
from hortus.rose.kernels.linear import ACTIVATIONS
from hortus.rose.models import Classifier, Kit, Step, Vocabulary, Weights

VOCABULARY_AT_ONCE = 4096
"""Entries whose logits are computed together: 2048 tokens of float32 then take 34 MB, not the 250 of BERT's whole vocabulary."""


def labels_of(config: dict[str, Any]) -> tuple[str, ...]:
    """A classifier's label names in order: config.json's id2label, else num_labels of them (transformers' default: 2)."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        try:
            by_id = {int(k): str(v) for k, v in named.items()}
        except ValueError:
            by_id = {}
        if sorted(by_id) != list(range(len(named))):
            raise StartError(f"config.json: id2label must number the labels from 0, not {', '.join(map(str, named))}")
        return tuple(by_id[i] for i in range(len(named)))
    count = config.get("num_labels", 2)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise StartError(f"config.json: num_labels must be a positive whole number, not {count!r}")
    return tuple(f"LABEL_{i}" for i in range(count))


class LogitHead:
    """A classifier: pooled hidden states through a few matrices, in float32 (rows are few)."""

    kind = "classify"
    normalize = False
    parameters = 0

    def __init__(self, plan: Classifier, labels: tuple[str, ...], weights: Weights, kit: Kit) -> None:
        self.labels = labels
        self.width = len(labels)
        self.pooling = plan.pooling
        self._pool = kit.ops.pool
        self._steps = [_Run(step, weights, torch.float32) for step in plan.steps]

    def __call__(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> logits [N, labels] float32."""
        rows: Tensor = self._pool(x, cu_seqlens, self.pooling)
        for step in self._steps:
            rows = step(rows)
        return rows


ANSWERS: dict[str, tuple[str, str | None]] = {"qwen3": ("yes", "no"), "gemma": ("Yes", None)}
"""The tokens that a family's rerankers answer by, as their model cards have it; None: a yes is measured alone."""


def answers_by_token(folder: ModelFolder) -> bool:
    """Whether its files say that it is a language model whose answer is one of two tokens."""
    return "classifier_from_token" in folder.config or any(m.kind == "LogitScore" for m in folder.modules)


def answers_of(folder: ModelFolder) -> tuple[str, int, int | None]:
    """(what a high score says, id of the token for it, of the one against it). StartError when the folder does not say.

    From a LogitScore module of sentence-transformers, else config.json's classifier_from_token (vLLM's), else ANSWERS.
    """
    for module in folder.modules:
        if module.kind == "LogitScore":
            yes, no = module.config.get("true_token_id"), module.config.get("false_token_id")
            if not isinstance(yes, int) or not isinstance(no, int | None):
                raise StartError(f"{module.path / 'config.json'}: true_token_id and false_token_id must be token ids")
            return "relevant", yes, no
    config = folder.config
    against: str | None
    if (named := config.get("classifier_from_token")) is not None:
        if not isinstance(named, list) or len(named) != 2 or not all(isinstance(t, str) for t in named):
            raise StartError(f"config.json: classifier_from_token must name two tokens, not {named!r}")
        against, token = named
    elif (known := ANSWERS.get(str(config.get("model_type")))) is not None:
        token, against = known
    else:
        raise StartError(
            f"{folder.path}: which tokens a reranker of model_type {config.get('model_type')} answers by is not known; "
            'name them in config.json, such as "classifier_from_token": ["no", "yes"]'
        )
    ids = [None if t is None else token_id(folder.transformer, t) for t in (token, against)]
    if ids[0] is None or (against is not None and ids[1] is None):
        raise StartError(f"{folder.transformer / 'tokenizer.json'}: has no single token {token!r} or {against!r}")
    return token, ids[0], ids[1]


class AnswerHead:
    """A reranker's score from a language model: the logit of one token after a sequence, less that of another.

    Two rows of the vocabulary's matrix are all that is read: their difference, in float32. Its sigmoid is the softmax over
    the two tokens.
    """

    kind = "classify"
    normalize = False
    parameters = 0
    width = 1
    pooling = "last"

    def __init__(self, plan: Vocabulary, answers: tuple[str, int, int | None], weights: Weights, kit: Kit) -> None:
        label, yes, no = answers
        rows = weights[plan.decoder] if plan.tied else weights.pop(plan.decoder)
        for at in (yes, no):
            if at is not None and not 0 <= at < rows.shape[0]:
                raise StartError(f"token {at}, which this reranker answers by, is not one of its {rows.shape[0]}")
        self.labels: tuple[str, ...] = (label,)
        self._weight = rows[yes].float() - (0.0 if no is None else rows[no].float())  # [hidden]
        self._pool = kit.ops.pool

    def __call__(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> scores [N, 1] float32."""
        rows: Tensor = self._pool(x, cu_seqlens, self.pooling)
        return F.linear(rows, self._weight.unsqueeze(0))


class SparseHead:
    """SPLADE: the greatest (or the sum) over a sequence's tokens of log(1 + relu(logit)), for each entry of the vocabulary.

    Formal et al., arXiv 2109.10086 (max), 2107.05720 (sum); the second log1p: arXiv 2504.14839.
    """

    kind = "sparse"
    normalize = False
    parameters = 0
    labels: tuple[str, ...] = ()

    def __init__(
        self, plan: Vocabulary, weights: Weights, kit: Kit, *, pooling: str = "max", twice: bool = False
    ) -> None:
        self._decoder = weights[plan.decoder] if plan.tied else weights.pop(plan.decoder)
        self._bias = None if plan.bias is None else weights.pop(plan.bias)
        self.width = self._decoder.shape[0]
        self.pooling = pooling
        self._twice = twice
        self._pool = kit.ops.pool
        self._steps = [_Run(step, weights, self._decoder.dtype) for step in plan.steps]

    def __call__(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> weights [N, vocabulary] float32, not negative."""
        for step in self._steps:
            x = step(x)
        parts = torch.split(self._decoder, VOCABULARY_AT_ONCE)
        biases = [None] * len(parts) if self._bias is None else torch.split(self._bias, VOCABULARY_AT_ONCE)
        logits = (F.linear(x, weight, bias) for weight, bias in zip(parts, biases, strict=True))
        return torch.cat([self._pooled(some, cu_seqlens) for some in logits], 1)

    def _pooled(self, logits: Tensor, cu_seqlens: Tensor) -> Tensor:
        if self.pooling == "max":  # what comes after it keeps the order, and so may come after it
            rows: Tensor = self._pool(logits, cu_seqlens, "max")
            return self._activated(rows)
        rows = self._pool(self._activated(logits.float()), cu_seqlens, "mean")
        return rows * cu_seqlens.diff().unsqueeze(1)

    def _activated(self, x: Tensor) -> Tensor:
        x = x.relu().log1p()
        return x.log1p() if self._twice else x


def sparse_options(folder: ModelFolder) -> tuple[str, bool]:
    """(max or sum, whether log1p is taken twice), as the folder's SpladePooling says; its default without one."""
    for module in folder.modules:
        if module.kind == "SpladePooling":
            strategy = module.config.get("pooling_strategy", "max")
            activation = module.config.get("activation_function", "relu")
            for key, value, known in (
                ("pooling_strategy", strategy, ("max", "sum")),
                ("activation_function", activation, ("relu", "log1p_relu")),
            ):
                if value not in known:
                    raise StartError(
                        f"{module.path / 'config.json'}: {key} {value!r} is not supported; supported: {', '.join(known)}"
                    )
            return strategy, activation == "log1p_relu"
    return "max", False


class _Run:
    """A Step with its weights."""

    def __init__(self, step: Step, weights: Weights, dtype: torch.dtype) -> None:
        self._weight = weights.pop(step.name + ".weight").to(dtype)
        self._bias = weights.pop(step.name + ".bias").to(dtype) if step.bias else None
        self._act = ACTIVATIONS[step.activation] if step.activation else None
        self._norm = None
        if step.norm is not None:
            bias = weights.pop(step.norm + ".bias").to(dtype) if step.norm_bias else None
            self._norm = weights.pop(step.norm + ".weight").to(dtype), bias
        self._eps = step.eps

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight, self._bias)
        if self._act:
            y = self._act(y)
        return y if self._norm is None else F.layer_norm(y, y.shape[-1:], *self._norm, self._eps)
