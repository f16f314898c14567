"""Every metric of Hortus, declared in one place with its name, meaning and buckets.

One `Metrics` per process (tests make their own). Buckets are fixed and labels come from small closed sets, so the
number of series is bounded; label values are created at start, so that every series is present with zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from hortus.errors import TABLE, StartError

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DROP_REASONS = ("cancelled", "deadline_exceeded", "overloaded", "draining", "not_ready", "engine_error")
_COUNT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """prometheus_client's, without labels and without its lock: seven of them see each short request, and theirs take twice as
    long to be told. Each is observed by one thread at a time; a scrape may read one value that its count lacks."""

    def __init__(self, name: str, help: str, *, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        """buckets: upper bounds, ascending."""
        self._name, self._help, self._bounds = name, help, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        totals = accumulate(self._counts)
        bounds = [*(str(float(b)) for b in self._bounds), "+Inf"]
        yield HistogramMetricFamily(self._name, self._help, list(zip(bounds, totals, strict=True)), self._sum)


class Tally:
    """prometheus_client's Counter of one label with few values, without its lock: `counts[value] += 1`, on one thread."""

    def __init__(self, name: str, help: str, label: str, values: Iterable[str], *, registry: CollectorRegistry) -> None:
        self._name, self._help, self._label = name, help, label
        self.counts = dict.fromkeys(values, 0)
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._help, labels=[self._label])
        for value, count in self.counts.items():
            family.add_metric([value], count)
        yield family


class Metrics:
    """The metrics of one process, on a registry of its own."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        # Ivy
        self.requests = Tally(
            "hortus_requests", "Requests answered, by outcome code.", "code", ("ok", *TABLE), registry=r
        )
        self.request_seconds = Histogram(
            "hortus_request_seconds", "Body read to answer encoded.", buckets=_SECONDS, registry=r
        )
        self.tokenize_seconds = Histogram(
            "hortus_tokenize_seconds", "Tokenising one request.", buckets=_SECONDS, registry=r
        )
        self.request_tokens = Histogram("hortus_request_tokens", "Tokens in one request.", buckets=_TOKENS, registry=r)
        self.requests_in_flight = Gauge("hortus_requests_in_flight", "Requests being worked on.", registry=r)
        self.replicas_up = Gauge("hortus_replicas_up", "Replicas that take work from this gateway.", registry=r)
        self.replica_losses = Counter("hortus_replica_losses", "Links to replicas that broke.", registry=r)
        self.replica_retries = Counter("hortus_replica_retries", "Chunks sent a second time, elsewhere.", registry=r)
        # Tulip
        self.queue_seconds = Histogram(
            "hortus_queue_seconds", "Enqueue to the first step of a chunk.", buckets=_SECONDS, registry=r
        )
        self.step_seconds = Histogram(
            "hortus_step_seconds", "Step handed over to rows on the host.", buckets=_SECONDS, registry=r
        )
        self.batch_tokens = Histogram("hortus_batch_tokens", "Tokens in one step.", buckets=_TOKENS, registry=r)
        self.batch_sequences = Histogram("hortus_batch_sequences", "Sequences in one step.", buckets=_COUNT, registry=r)
        self.queue_tokens = Gauge("hortus_queue_tokens", "Tokens waiting.", registry=r)
        self.queue_bulk_tokens = Gauge("hortus_queue_bulk_tokens", "Of these, tokens of bulk requests.", registry=r)
        self.queue_sequences = Gauge("hortus_queue_sequences", "Sequences waiting.", registry=r)
        self.batch_limit_tokens = Gauge("hortus_batch_limit_tokens", "Most tokens in one step.", registry=r)
        self.batches_in_flight = Gauge("hortus_batches_in_flight", "Steps handed over, not answered.", registry=r)
        self.dropped = Counter("hortus_dropped_sequences", "Sequences never run, by reason.", ["reason"], registry=r)
        # ROSE
        self.tokens = Counter("hortus_tokens", "Tokens run through the model.", registry=r)
        self.step_failures = Counter("hortus_step_failures", "Steps that failed.", registry=r)
        self.graph_steps = Counter(
            "hortus_graph_steps", "Steps by how they ran: eager, capture or replay.", ["how"], registry=r
        )
        self.graphs = Gauge("hortus_graphs", "CUDA graphs held.", registry=r)
        self.graph_evictions = Counter("hortus_graph_evictions", "CUDA graphs dropped for the cap.", registry=r)
        self.graph_capture_seconds = Histogram(
            "hortus_graph_capture_seconds", "Capturing one graph.", buckets=_SECONDS, registry=r
        )
        self.graph_memory_bytes = Gauge("hortus_graph_memory_bytes", "Device memory of the graphs' pool.", registry=r)
        self.device_memory_bytes = Gauge(
            "hortus_device_memory_bytes",
            "Device memory held: weights, workspaces, graphs. CPU: the process's.",
            registry=r,
        )
        self.device_memory_total_bytes = Gauge(
            "hortus_device_memory_total_bytes", "Memory that the device has.", registry=r
        )

        for reason in DROP_REASONS:
            self.dropped.labels(reason)
        for how in ("eager", "capture", "replay"):
            self.graph_steps.labels(how)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def serve(self, port: int) -> None:
        """/metrics on a port of its own, all addresses, in a daemon thread. StartError when it cannot be had."""
        try:
            start_http_server(port, registry=self.registry)
        except (OSError, OverflowError) as e:
            raise StartError(f"--metrics-port {port}: {e}") from None
