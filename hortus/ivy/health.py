"""What operators ask: /health (the process lives), /ready (the engine answers), /metrics, /info.

Knows when the engine last answered. Does not know requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import platform
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hortus import __version__
from hortus.config import IvyConfig
from hortus.errors import HortusError, NotReady
from hortus.ivy import outputs
from hortus.ivy.embed import Embedder
from hortus.ivy.exchange import Answer, Request
from hortus.ivy.rerank import labels
from hortus.metrics import Metrics
from hortus.types import TokenBatch

Probe = Callable[[float], Awaitable[bool]]
"""probe(timeout_s): whether the engine answers in that time. May also raise a HortusError that says why not."""

FRESH_S = 1.0
"""An answer of the engine this recent, to a probe or to a real request, proves that it works."""
PROBE_S = 5.0
"""Longest wait for a probe."""


def probe_of(embedder: Embedder) -> Probe:
    """One token through the encoder, to finite numbers: the probe used when the caller brings none."""

    async def probe(timeout_s: float) -> bool:
        result = await embedder.encoder.encode(TokenBatch.of([[0]]), deadline=time.monotonic() + timeout_s)
        outputs.check_finite(result.rows)
        return True

    return probe


class Readiness:
    """Whether the engine answers, asked at most once at a time and once in FRESH_S."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._last_answer = float("-inf")
        self._last_failure = (float("-inf"), "")
        self._asking = asyncio.Lock()

    def answered(self) -> None:
        """A real request has just been answered."""
        self._last_answer = time.monotonic()

    async def check(self) -> None:
        """Raise NotReady with the reason unless the engine answered lately."""
        async with self._asking:
            begin = time.monotonic()
            if begin - self._last_answer < FRESH_S:
                return
            if begin - self._last_failure[0] < FRESH_S:
                raise NotReady(self._last_failure[1])
            reason = f"the engine did not answer a probe within {PROBE_S:g} s"
            try:
                async with asyncio.timeout(PROBE_S + 0.5):  # in case the probe does not keep its time
                    alive = await self._probe(PROBE_S)
            except TimeoutError:
                alive = False
            except HortusError as e:
                alive, reason = False, f"the engine failed a probe: {e}"
            if alive:
                self._last_answer = time.monotonic()
                return
            self._last_failure = (time.monotonic(), reason)
            raise NotReady(reason)


@functools.cache
def versions() -> dict[str, str]:
    """Of what this process runs on, where it is installed."""
    found = {"hortus": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "flashinfer-python", "flash-attn-4", "tokenizers", "numpy", "grpcio"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Health:
    """The handlers. `model` gives the opened model or raises NotReady or Draining; `state` is the app's, in one word."""

    def __init__(
        self,
        model: Callable[[], Embedder],
        state: Callable[[], str],
        readiness: Callable[[], Readiness | None],
        config: IvyConfig,
        metrics: Metrics,
    ) -> None:
        self._model, self._state, self._readiness = model, state, readiness
        self._config, self._metrics = config, metrics

    async def health(self, request: Request) -> Answer:
        return Answer(msgspec.json.encode({"status": "ok", "state": self._state()}))

    async def ready(self, request: Request) -> Answer:
        self._model()  # raises while starting or draining
        readiness = self._readiness()
        if readiness is not None:
            await readiness.check()
        return Answer(b'{"status":"ready"}')

    async def metrics(self, request: Request) -> Answer:
        return Answer(self._metrics.render(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def info(self, request: Request) -> Answer:
        embedder = self._model()
        info = embedder.info
        names = labels(embedder) if info.kind == "classify" else []
        labelled = {
            "id2label": {str(i): n for i, n in enumerate(names)},
            "label2id": {n: i for i, n in enumerate(names)},
        }
        kind = "reranker" if len(names) == 1 else "classifier" if names else "embedding"
        pooling = "splade" if info.kind == "sparse" else info.pooling
        told: dict[str, Any] = {
            "version": __version__,
            # As TEI has it.
            "model_id": info.name,
            "model_sha": info.revision,
            "model_dtype": info.dtype,
            "served_model_name": info.name,
            "model_type": {kind: labelled if names else {"pooling": pooling}},
            "max_input_length": info.max_tokens,
            "max_batch_tokens": info.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": self._config.max_inputs,
            "auto_truncate": self._config.auto_truncate,
            "tokenization_workers": embedder.tokenizer.threads,
            "sha": None,
            "docker_label": None,
            # Ours.
            "versions": versions(),
            "model": msgspec.to_builtins(info),
            "contextual": embedder.contextual,
            "activation": embedder.activation,
            "prompts": embedder.prompts.texts,
            "default_prompt_name": embedder.prompts.default,
            "pair": None if embedder.prompts.pair is None else msgspec.to_builtins(embedder.prompts.pair),
            "limits": {
                "max_tokens": embedder.info.max_tokens,
                "max_inputs": self._config.max_inputs,
                "max_body_bytes": self._config.max_body_bytes,
                "max_input_chars": self._config.max_input_chars,
                "max_answer_values": self._config.max_answer_values,
                "timeout_s": self._config.timeout_s,
                "auto_truncate": self._config.auto_truncate,
            },
        }
        return Answer(msgspec.json.encode(told))
