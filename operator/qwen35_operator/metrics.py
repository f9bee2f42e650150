"""What Prometheus sees of the operator. One registry per process, passed on, so that tests have their own."""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metrics:
    """Every metric; names and labels are documented API."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    reconciles: Counter = field(init=False)
    seconds: Histogram = field(init=False)
    latency: Histogram = field(init=False)
    requests: Counter = field(init=False)
    restarts: Counter = field(init=False)
    queued: Gauge = field(init=False)
    trainings: Gauge = field(init=False)
    leading: Gauge = field(init=False)

    def __post_init__(self) -> None:
        ProcessCollector(registry=self.registry)
        made = {
            "reconciles": Counter(
                "qwen35_reconciles_total", "Reconciles by result.", ["result"], registry=self.registry
            ),
            "seconds": Histogram(
                "qwen35_reconcile_seconds", "Time of one reconcile.", buckets=LATENCY, registry=self.registry
            ),
            "latency": Histogram(
                "qwen35_event_to_status_seconds",
                "From the first event of a training to the end of the reconcile that saw it.",
                buckets=LATENCY,
                registry=self.registry,
            ),
            "requests": Counter(
                "qwen35_api_requests_total",
                "Requests to the API server.",
                ["verb", "resource", "code"],
                registry=self.registry,
            ),
            "restarts": Counter(
                "qwen35_watch_restarts_total", "Watches that were started again.", ["kind"], registry=self.registry
            ),
            "queued": Gauge("qwen35_queue_length", "Trainings that wait for a reconcile.", registry=self.registry),
            "trainings": Gauge("qwen35_trainings", "Trainings that are known.", registry=self.registry),
            "leading": Gauge("qwen35_leading", "1 while this replica leads.", registry=self.registry),
        }
        for name, metric in made.items():
            object.__setattr__(self, name, metric)

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count an answer of the API server."""
        self.requests.labels(verb, resource, str(code)).inc()

    def restarted(self, kind: str) -> None:
        """Count a watch that began again."""
        self.restarts.labels(kind).inc()
