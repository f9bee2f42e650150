"""The operator's Prometheus metrics. Each `Metrics` has its own registry, so that tests do not share counts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from qwen35_operator.api.v1alpha1 import State
from qwen35_operator.kube.watch import WatchName

STATES: Final[tuple[str, ...]] = get_args(State)
LATENCY_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metrics:
    """Holds all metrics of the operator. The names and labels of the metrics are documented API."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    reconciles: Counter = field(init=False)
    seconds: Histogram = field(init=False)
    latency: Histogram = field(init=False)
    requests: Counter = field(init=False)
    restarts: Counter = field(init=False)
    queued: Gauge = field(init=False)
    leading: Gauge = field(init=False)

    def __post_init__(self) -> None:
        ProcessCollector(registry=self.registry)
        metrics = {
            "reconciles": Counter(
                "qwen35_reconciles_total", "Number of reconciles, by result.", ["result"], registry=self.registry
            ),
            "seconds": Histogram(
                "qwen35_reconcile_seconds",
                "Duration of one reconcile.",
                buckets=LATENCY_BUCKETS_SECONDS,
                registry=self.registry,
            ),
            "latency": Histogram(
                "qwen35_event_to_status_seconds",
                "Time from the first event of a training to the end of the reconcile that handled it.",
                buckets=LATENCY_BUCKETS_SECONDS,
                registry=self.registry,
            ),
            "requests": Counter(
                "qwen35_api_requests_total",
                "Number of requests to the API server.",
                ["verb", "resource", "code"],
                registry=self.registry,
            ),
            "restarts": Counter(
                "qwen35_watch_restarts_total",
                "Number of watches that were started again after an error.",
                ["kind"],
                registry=self.registry,
            ),
            "queued": Gauge(
                "qwen35_queue_length", "Number of trainings that wait for a reconcile.", registry=self.registry
            ),
            "leading": Gauge("qwen35_leading", "1 while this operator leads, otherwise 0.", registry=self.registry),
        }
        for name, metric in metrics.items():
            object.__setattr__(self, name, metric)

    def count(self, states: Callable[[], Mapping[str, int]]) -> None:
        """Report the number of trainings in each state. states: returns these numbers; called at each scrape."""
        self.registry.register(_Trainings(states))

    def time_watches(self, seconds: Callable[[], Mapping[WatchName, float]]) -> None:
        """Report the seconds since the API server last answered the watch of each kind in each watched namespace.

        seconds: returns these numbers; called at each scrape. The label `namespace` is empty for a watch of all namespaces.
        """
        self.registry.register(_Watches(seconds))

    def watch_namespaces(self, served: Callable[[], Mapping[str | None, bool]]) -> None:
        """Report whether the trainings of each watched namespace are served.

        served: returns this for each namespace, or for None if all are watched; called at each scrape.
        """
        self.registry.register(_Namespaces(served))

    def requested(self, verb: str, resource: str, code: int) -> None:
        """Count one answer of the API server in qwen35_api_requests_total."""
        self.requests.labels(verb, resource, str(code)).inc()

    def restarted(self, kind: str) -> None:
        """Count a restart of the watch of `kind`."""
        self.restarts.labels(kind).inc()


@dataclass(frozen=True)
class _Trainings(Collector):
    """Reports the number of trainings in every state at each scrape, including states without trainings."""

    states: Callable[[], Mapping[str, int]]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("qwen35_trainings", "Number of trainings, by state.", labels=["state"])
        for state, count in {**dict.fromkeys(STATES, 0), **self.states()}.items():
            family.add_metric([state], count)
        yield family


@dataclass(frozen=True)
class _Namespaces(Collector):
    """Reports whether every watched namespace is served at each scrape."""

    served: Callable[[], Mapping[str | None, bool]]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "1 while everything that the operator needs in a watched namespace can be watched, otherwise 0."
        family = GaugeMetricFamily("qwen35_namespace_served", text, labels=["namespace"])
        for namespace, served in self.served().items():
            family.add_metric([namespace or ""], float(served))
        yield family


@dataclass(frozen=True)
class _Watches(Collector):
    """Reports the age of the last answer to every watch at each scrape."""

    seconds: Callable[[], Mapping[WatchName, float]]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "Seconds since the API server last answered the watch of a kind. Watches are opened every few minutes."
        family = GaugeMetricFamily("qwen35_watch_silent_seconds", text, labels=["kind", "namespace"])
        for name, seconds in self.seconds().items():
            family.add_metric([name.resource, name.namespace or ""], seconds)
        yield family
