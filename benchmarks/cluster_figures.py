"""Computes the figures of benchmarks/operator_clusters.py from what was noted while the trainers reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster_bed import Bed
from benchmarks.observer import Json
from benchmarks.process_samples import Sample, cores, memory_of_runs, processor_seconds, requests_sent
from benchmarks.report_delays import (
    Delay,
    at_share,
    checkpoint_delays,
    growth,
    number_delays,
    spread_of,
    windows,
    without,
)
from benchmarks.reporting_trainers import Answered
from qwen35_operator.reconcile.new_status import progress_interval
from tests.testbed import kuberay, kwok

CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", kuberay.NAME, kwok.NAME)
WINDOW_SECONDS = 300.0
FAILOVER_BEFORE_SECONDS, FAILOVER_AFTER_SECONDS = 15.0, 30.0
MAX_DELAY_SECONDS = 2.0
MAX_SHARE_NOT_ANSWERED = 0.01
"""Limit for the share of reports that failed, or that drivers left out because the API server had not answered the one before."""
MAX_RSS_MIB = 500e6 / 2**20
MAX_GROWTH = 1.1
"""Limit for the memory of an operator in the last third of the time over that in the first third, from its start to its end."""
MIN_SAMPLES = 6
"""Minimum number of samples from which the growth of an operator's memory is computed."""


@dataclass(frozen=True)
class Failover:
    """killed, led: monotonic times at which the leader was killed, and at which the other operator led."""

    killed: float
    led: float


@dataclass(frozen=True)
class Measured:
    """Everything that was noted while the trainers reported."""

    bed: Bed
    answered: tuple[Answered, ...]
    samples: list[Sample]
    failover: Failover
    expected: int
    """Number of reports that drivers send if the API server answers each before the next is due."""

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    def checkpoints(self) -> list[Delay]:
        return [
            delay
            for name, reports in self._reports(checkpoints=True).items()
            for delay in checkpoint_delays(reports, self.bed.seen.saved.get(name, []))
        ]

    def numbers(self) -> list[Delay]:
        interval = progress_interval(self.bed.clusters)
        return [
            delay
            for name, reports in self._reports().items()
            for delay in number_delays(reports, self.bed.seen.copies.get(name, []), interval)
        ]

    def _reports(self, *, checkpoints: bool = False) -> dict[str, dict[int, float]]:
        """Return when the reports of each training were answered, by their updates. checkpoints: only those with a new one."""
        times: dict[str, dict[int, float]] = {}
        for report in self.answered:
            if report.checkpoint or not checkpoints:
                times.setdefault(report.training, {})[report.update] = report.at
        return times


def figures(measured: Measured) -> Json:
    delays = {"checkpoint": measured.checkpoints(), "numbers": measured.numbers()}
    memory, bed = _memory(measured), measured.bed
    aims = {f"{name}P99Seconds": (spread_of(values).get("p99"), MAX_DELAY_SECONDS) for name, values in delays.items()}
    aims |= {
        f"{name}P99SecondsWithoutFailover": (_spread_without(measured, values).get("p99"), MAX_DELAY_SECONDS)
        for name, values in delays.items()
    }
    checkpoints = sum(report.checkpoint for report in measured.answered)
    aims |= {
        "checkpointsNotShown": (checkpoints - len(delays["checkpoint"]), 0),
        "numbersNotShown": (len(measured.answered) - len(delays["numbers"]), 0),
        "shareOfReportsNotAnswered": (round(1 - len(measured.answered) / measured.expected, 4), MAX_SHARE_NOT_ANSWERED),
    }
    growths = [value for of_runs in memory["growth"].values() for value in of_runs]
    aims |= {"peakRssMiB": (memory["peakMiB"], MAX_RSS_MIB), "rssGrowth": (max(growths, default=None), MAX_GROWTH)}
    states = Counter(bed.seen.states[bed.name(number)] for number in range(bed.clusters))
    return {
        "trainings": bed.ended + bed.clusters,
        "clusters": bed.clusters,
        "seconds": round(measured.seconds, 1),
        "aims": {
            name: {"value": value, "atMost": round(aim, 2), "reached": value is not None and value <= aim}
            for name, (value, aim) in aims.items()
        },
        "reports": {name: _report_figures(measured, values) for name, values in delays.items()}
        | {"answered": len(measured.answered), "expected": measured.expected},
        "failover": _failover_figures(measured, delays),
        "memory": memory,
        "processors": _processors(measured),
        "operators": _operators(measured),
        "states": dict(states),
        "restarts": sum(name.startswith("running") for name in bed.seen.added) - bed.clusters,
    }


def _report_figures(measured: Measured, delays: Sequence[Delay]) -> Json:
    return spread_of(delays) | {
        "withoutFailover": _spread_without(measured, delays),
        "windows": windows(delays, measured.samples[0].at, measured.seconds, WINDOW_SECONDS),
    }


def _spread_without(measured: Measured, delays: Sequence[Delay]) -> Json:
    return spread_of(without(delays, *_around(measured.failover)))


def _around(failover: Failover) -> tuple[float, float]:
    """Return the first and the last moment at which a report may be delayed by the fail-over."""
    return failover.killed - FAILOVER_BEFORE_SECONDS, failover.led + FAILOVER_AFTER_SECONDS


def _failover_figures(measured: Measured, delays: Mapping[str, Sequence[Delay]]) -> Json:
    first, last = _around(measured.failover)
    maxima = {
        name: max((delay.seconds for delay in values if first <= delay.answered <= last), default=None)
        for name, values in delays.items()
    }
    return {
        "secondsUntilTheOtherLeads": round(measured.failover.led - measured.failover.killed, 2),
        "maxDelaySeconds": {name: None if delay is None else round(delay, 2) for name, delay in maxima.items()},
    }


def _memory(measured: Measured) -> Json:
    """Return the memory of the operators, and that of each process after 10, 50 and 100 % of the time."""
    names = [operator.name for operator in measured.bed.operators]
    series: dict[str, list[float]] = {}
    for sample in measured.samples:
        for name, use in sample.processes.items():
            series.setdefault(name, []).append(use.rss_mib)
    peaks = [
        use.peak_rss_mib for sample in measured.bed.samples for name, use in sample.processes.items() if name in names
    ]
    return {
        "peakMiB": round(max(peaks), 1),
        "growth": {
            name: [
                round(growth(values), 3)
                for values in memory_of_runs(measured.samples, name)
                if len(values) >= MIN_SAMPLES
            ]
            for name in names
        },
        "rssMiB": {
            name: {f"{share:.0%}": round(at_share(values, share)) for share in (0.1, 0.5, 1.0)}
            for name, values in sorted(series.items())
        },
    }


def _processors(measured: Measured) -> Json:
    """Return the mean number of processors that each process used; `others` is everything else on the machine."""
    names = {name for sample in measured.samples for name in sample.processes}
    used = {name: processor_seconds(measured.samples, name) / measured.seconds for name in sorted(names)}
    busy = (measured.samples[-1].busy - measured.samples[0].busy) / measured.seconds
    control = sum(used.get(name, 0.0) for name in CONTROL_PLANE)
    return {
        "cores": {name: round(value, 3) for name, value in used.items()}
        | {"others": round(busy - sum(used.values()), 3)},
        "busyCores": round(busy, 3),
        "controlPlaneCores": round(control, 3),
        "controlPlaneShare": round(control / cores(), 3),
    }


def _operators(measured: Measured) -> Json:
    uses = {}
    for operator in measured.bed.operators:
        queues = [
            sample.operators[operator.name].queue_length
            for sample in measured.samples
            if operator.name in sample.operators
        ]
        uses[operator.name] = {
            "requestsPerSecond": round(requests_sent(measured.samples, operator.name) / measured.seconds, 2),
            "maxQueueLength": max(queues),
            "bugsInTheLog": operator.log.count("this is a bug"),
        }
    return uses
