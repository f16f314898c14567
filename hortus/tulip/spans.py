"""OpenTelemetry spans of a scheduler that serves gateways: one for each ask, under the request's own span in its gateway, with
its wait and its time on the device inside it. Does not know requests, only asks."""

from __future__ import annotations

import time

from hortus import traces
from hortus.errors import RequestError
from hortus.types import Result, TokenBatch


class Spans:
    """To one OTLP/HTTP address."""

    def __init__(self, endpoint: str) -> None:
        """StartError when the `otel` extra is not installed."""
        self._tracer = traces.Tracer(endpoint, "hortus-tulip")
        self.close = self._tracer.close

    def record(self, context: bytes, batch: TokenBatch, begin_ns: int, outcome: Result | BaseException) -> None:
        """An ask that came at begin_ns (time.time_ns()) and has just been answered. context: of the request (traces.py)."""
        end = time.time_ns()
        told: dict[str, int | float | str] = {"hortus.sequences": len(batch), "hortus.tokens": batch.total_tokens}
        code, parts = "", {}
        if isinstance(outcome, Result):
            parts = {"queue": outcome.timings.queue_ms, "device": outcome.timings.device_ms}
            told |= {f"hortus.{name}_ms": ms for name, ms in parts.items()}
        else:
            code = outcome.code if isinstance(outcome, RequestError) else "engine_error"
            told["hortus.code"] = code
        span = self._tracer.under(context, "hortus.encode", begin_ns, told)
        if code:
            self._tracer.failed(span, code)
        self._tracer.parts(span, begin_ns, end, {f"hortus.tulip.{name}": ms for name, ms in parts.items()})
        span.end(end)
