"""Trace context on its way through Hortus, and the spans that OpenTelemetry is told of. Needs the `otel` extra, once there is an
endpoint; until then nothing of it is imported.

Spans are made when all is over, from times that are known anyway. A span that others are to hang theirs on needs its number
before that, so numbers are drawn first and given to the library later. Does not know HTTP, gRPC or what a span is about.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from hortus import __version__
from hortus.errors import StartError

CONTEXT_BYTES = 25
"""Of a context: 16 of the trace's number, 8 of the span's, 1 of flags, as W3C's traceparent has them."""
SAMPLED = 1

CLOSE_S = 3.0
"""For what waits to be sent at the end: a collector that is away is waited for no longer. The library waits half a minute."""
SELDOM_S = 60.0
"""Between two lines of the log about a collector that is away. The library writes one a second."""

current: ContextVar[bytes] = ContextVar("trace", default=b"")
"""The context of the request that this task works on; empty when it is not traced."""


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() - self._said < SELDOM_S:
            return False
        self._said = time.monotonic()
        return True


_seldom = _Seldom()


class Tracer:
    """Sends to one OTLP/HTTP address, from a thread of its own."""

    def __init__(self, endpoint: str, service: str) -> None:
        """StartError when the `otel` extra is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as e:
            raise StartError(f"--otlp-endpoint needs the package {e.name}: pip install 'hortus[otel]'") from None

        class Numbers(RandomIdGenerator):
            """Those that were drawn before, else new ones."""

            drawn: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return super().generate_trace_id() if self.drawn is None else self.drawn[0]

            def generate_span_id(self) -> int:
                return super().generate_span_id() if self.drawn is None else self.drawn[1]

        self._trace, self._numbers = trace, Numbers()
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._numbers)
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_seldom)
        self._exporter: Any = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("hortus", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def draw(self, carrier: Mapping[str, str]) -> bytes:
        """The context of a span that is to be: in the caller's trace if its traceparent says so, else in one of its own."""
        caller = self._trace.get_current_span(self._propagator.extract(carrier)).get_span_context()
        number = caller.trace_id if caller.is_valid else self._numbers.generate_trace_id()
        flags = int(caller.trace_flags) if caller.is_valid else SAMPLED
        return number.to_bytes(16) + self._numbers.generate_span_id().to_bytes(8) + bytes([flags])

    def drawn(self, context: bytes, carrier: Mapping[str, str], name: str, begin_ns: int, told: dict[str, Any]) -> Any:
        """The span whose context was drawn for this carrier; not ended yet. Times are time.time_ns()."""
        self._numbers.drawn = int.from_bytes(context[:16]), int.from_bytes(context[16:24])
        try:
            return self._start(name, self._propagator.extract(carrier), begin_ns, told)
        finally:
            self._numbers.drawn = None

    def under(self, context: bytes, name: str, begin_ns: int, told: dict[str, Any]) -> Any:
        """A span under another process's, by its context."""
        parent = self._trace.SpanContext(
            int.from_bytes(context[:16]), int.from_bytes(context[16:24]), True, self._trace.TraceFlags(context[24])
        )
        inside = self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent))
        return self._start(name, inside, begin_ns, told)

    def _start(self, name: str, inside: Any, begin_ns: int, told: dict[str, Any]) -> Any:
        kind = self._trace.SpanKind.SERVER
        return self._tracer.start_span(name, context=inside, kind=kind, start_time=begin_ns, attributes=told)

    def parts(self, span: Any, begin_ns: int, end_ns: int, parts_ms: Mapping[str, float]) -> None:
        """Spans inside one, one after the other, none past its end."""
        inside, at = self._trace.set_span_in_context(span), begin_ns
        for name, ms in parts_ms.items():
            part = self._tracer.start_span(name, context=inside, start_time=at)
            at = min(at + int(ms * 1e6), end_ns)
            part.end(at)

    def failed(self, span: Any, code: str) -> None:
        span.set_status(self._trace.StatusCode.ERROR, code)

    def close(self) -> None:
        """Send what waits, for at most CLOSE_S; what is left is lost."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        if sending.is_alive():
            self._exporter.shutdown()  # ends its waiting between two tries
