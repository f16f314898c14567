"""OpenTelemetry traces: one span a request, with spans for tokenising, waiting and the device inside it.

They are made when the request has been answered, from the timings that it carries anyway, so that tracing costs the hot path
nothing while it runs; what Tulip and ROSE took is in those timings also when they are on another machine. Needs the `otel`
extra. Does not know routes.
"""

from __future__ import annotations

import time

from hortus import __version__
from hortus.errors import StartError
from hortus.ivy.exchange import Answer, Request


class Traces:
    """A tracer that sends to one OTLP/HTTP address, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        """StartError when the `otel` extra is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as e:
            raise StartError(f"--otlp-endpoint needs the package {e.name}: pip install 'hortus[otel]'") from None
        resource = Resource.create({"service.name": "hortus", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("hortus", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def record(self, request: Request, code: str, answer: Answer | None, seconds: float) -> None:
        """The spans of a request that took so long and has just been answered (None: its client had gone)."""
        end = time.time_ns()
        begin = end - int(seconds * 1e9)
        carrier = {
            name: value.decode("latin-1")
            for name in ("traceparent", "tracestate")
            if (value := request.headers.get(name.encode()))
        }
        status = 499 if answer is None else answer.status
        span = self._tracer.start_span(
            f"{request.method} {request.path:.100}",
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            start_time=begin,
            attributes={
                "http.request.method": request.method,
                "url.path": request.path,
                "http.response.status_code": status,
                "http.request.body.size": len(request.body),
                "hortus.request_id": request.name,
                "hortus.code": code,
            },
        )
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, code)
        if answer is not None and answer.timings is not None:
            inside, at = self._trace.set_span_in_context(span), begin
            told = answer.timings
            for name, ms in (("tokenize", told.tokenize_ms), ("queue", told.queue_ms), ("device", told.device_ms)):
                part = self._tracer.start_span(f"hortus.{name}", context=inside, start_time=at)
                at = min(at + int(ms * 1e6), end)
                part.end(at)
        span.end(end)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()
