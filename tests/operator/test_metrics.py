"""Names and labels are API: dashboards and alerts are written against them."""

from typing import get_args

from prometheus_client import generate_latest

from qwen35_operator.api.v1alpha1 import State
from qwen35_operator.kube.watch import WatchName
from qwen35_operator.metrics import Metrics

NAMES = {
    "qwen35_reconciles_total",
    "qwen35_reconcile_seconds",
    "qwen35_event_to_status_seconds",
    "qwen35_api_requests_total",
    "qwen35_watch_restarts_total",
    "qwen35_queue_length",
    "qwen35_trainings",
    "qwen35_leading",
    "qwen35_watch_silent_seconds",
    "qwen35_namespace_served",
}


def test_every_metric_is_there_under_its_name() -> None:
    metrics = Metrics()
    metrics.reconciles.labels("done").inc()
    metrics.requested("GET", "pods", 200)
    metrics.restarted("Pod")
    metrics.count(dict)
    metrics.time_watches(dict)
    metrics.watch_namespaces(dict)
    shown = {line.split(" ")[2] for line in generate_latest(metrics.registry).decode().splitlines() if "# HELP" in line}
    ours = {name for name in shown if name.startswith("qwen35_")}
    assert {
        name for name in ours if not name.endswith("_created")
    } == NAMES  # apart from the times at which each began to count
    assert "process_resident_memory_bytes" in shown


def test_answers_are_counted_by_verb_resource_and_code() -> None:
    metrics = Metrics()
    for code in (200, 200, 409):
        metrics.requested("PATCH", "rayclusters", code)
    labels = {"verb": "PATCH", "resource": "rayclusters", "code": "200"}
    assert metrics.registry.get_sample_value("qwen35_api_requests_total", labels) == 2
    assert metrics.registry.get_sample_value("qwen35_api_requests_total", {**labels, "code": "409"}) == 1


def test_watches_that_began_again_are_counted_by_kind() -> None:
    metrics = Metrics()
    metrics.restarted("Pod")
    assert metrics.registry.get_sample_value("qwen35_watch_restarts_total", {"kind": "Pod"}) == 1


def test_a_watch_has_the_label_of_its_namespace_if_it_does_not_watch_all() -> None:
    metrics = Metrics()
    metrics.time_watches(lambda: {WatchName("pods", "team"): 3.0, WatchName("pods", None): 5.0})
    metrics.watch_namespaces(lambda: {"team": False, "other": True})

    def shown(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert shown("qwen35_watch_silent_seconds", kind="pods", namespace="team") == 3
    assert shown("qwen35_watch_silent_seconds", kind="pods", namespace="") == 5
    assert shown("qwen35_namespace_served", namespace="team") == 0
    assert shown("qwen35_namespace_served", namespace="other") == 1


def test_every_operator_counts_for_itself() -> None:
    first, other = Metrics(), Metrics()
    first.restarted("Pod")
    assert other.registry.get_sample_value("qwen35_watch_restarts_total", {"kind": "Pod"}) is None


def test_trainings_are_counted_by_state_and_states_without_any_are_0() -> None:
    metrics, states = Metrics(), {"Running": 3}
    metrics.count(lambda: states)

    def shown() -> dict[str, float]:
        (family,) = [item for item in metrics.registry.collect() if item.name == "qwen35_trainings"]
        return {sample.labels["state"]: sample.value for sample in family.samples}

    assert shown() == {**dict.fromkeys(get_args(State), 0), "Running": 3}
    states = {"Pending": 1, "Failed": 2}
    assert shown() == {**dict.fromkeys(get_args(State), 0), "Pending": 1, "Failed": 2}
