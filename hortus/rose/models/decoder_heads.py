"""What ends a language model in logits, the same in all of transformers' decoders. Data; does not know trunks."""

from __future__ import annotations

from typing import Protocol

from hortus.rose.models import Classifier, Step, Vocabulary


class Decoder(Protocol):
    """What a decoder's spec says of its heads."""

    @property
    def hidden(self) -> int: ...
    @property
    def tied(self) -> bool:
        """The language model's last matrix is the word embeddings'."""


def classifier(spec: Decoder, labels: int) -> Classifier:
    """*ForSequenceClassification: one matrix, on the last token."""
    return Classifier(pooling="last", steps=(Step(name="score", inputs=spec.hidden, outputs=labels, bias=False),))


def language(spec: Decoder) -> Vocabulary:
    """*ForCausalLM."""
    name = "embed_tokens.weight" if spec.tied else "lm_head.weight"
    return Vocabulary(steps=(), decoder=name, tied=spec.tied, bias=None)
