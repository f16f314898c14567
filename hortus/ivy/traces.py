"""OpenTelemetry traces of a gateway: one span a request, with spans for tokenising, waiting and the device inside it.

They are made when the request has been answered, from the timings that it carries anyway, so that tracing costs the hot path
little more than drawing a number. Schedulers elsewhere get that number with what they are asked, and hang a span of their own on
it (tulip/spans.py). Does not know routes.
"""

from __future__ import annotations

import time

from hortus import traces
from hortus.ivy.exchange import Answer, Request


class Traces:
    """Spans of requests, to one OTLP/HTTP address. begin() and record() belong to the request's own task."""

    def __init__(self, endpoint: str) -> None:
        """StartError when the `otel` extra is not installed."""
        self._tracer = traces.Tracer(endpoint, "hortus")
        self.close = self._tracer.close

    def begin(self, request: Request) -> None:
        """From here on what the request asks of others is part of its trace."""
        traces.current.set(self._tracer.draw(_carrier(request)))

    def record(self, request: Request, code: str, answer: Answer | None, seconds: float) -> None:
        """The spans of a request that took so long and has just been answered (None: its client had gone)."""
        end = time.time_ns()
        begin = end - int(seconds * 1e9)
        status = 499 if answer is None else answer.status
        told = {
            "http.request.method": request.method,
            "url.path": request.path,
            "http.response.status_code": status,
            "http.request.body.size": len(request.body),
            "hortus.request_id": request.name,
            "hortus.code": code,
        }
        name = f"{request.method} {request.path:.100}"
        span = self._tracer.drawn(traces.current.get(), _carrier(request), name, begin, told)
        if status >= 500:
            self._tracer.failed(span, code)
        if answer is not None and (took := answer.timings) is not None:
            parts = {"tokenize": took.tokenize_ms, "queue": took.queue_ms, "device": took.device_ms}
            self._tracer.parts(span, begin, end, {f"hortus.{name}": ms for name, ms in parts.items()})
        span.end(end)


def _carrier(request: Request) -> dict[str, str]:
    return {
        name: value.decode("latin-1")
        for name in ("traceparent", "tracestate")
        if (value := request.headers.get(name.encode()))
    }
