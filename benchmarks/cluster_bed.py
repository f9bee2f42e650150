"""A control plane with two operators and with trainings of which some have clusters, as benchmarks/operator_clusters.py uses it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.observer import Observer
from benchmarks.process_samples import Sample
from tests.controlplane.operator_process import OperatorProcess
from tests.testbed.control_plane import ControlPlane

PODS_PER_CLUSTER = 3


@dataclass
class Bed:
    """The control plane with both operators and what has been seen. ended, clusters: numbers of trainings."""

    plane: ControlPlane
    operators: tuple[OperatorProcess, OperatorProcess]
    seen: Observer
    ended: int
    clusters: int
    samples: list[Sample] = field(default_factory=list)

    def name(self, number: int) -> str:
        """Return the name of a training with a cluster."""
        return f"running{number}"

    @property
    def ready_clusters(self) -> int:
        """Number of trainings whose cluster is ready, by their statuses."""
        ready = self.seen.ready_pods
        return sum(ready.get(self.name(number)) == PODS_PER_CLUSTER for number in range(self.clusters))

    async def sample(self) -> Sample:
        """Take a sample, keep it, and write its main figures to standard error."""
        sample = await asyncio.to_thread(Sample.of, self.plane, self.operators)
        self.samples.append(sample)
        rss = {name: round(use.rss_mib) for name, use in sample.processes.items()}
        queues = {name: use.queue_length for name, use in sample.operators.items()}
        line = {
            "at": round(sample.at, 1),
            "states": Counter(self.seen.states.values()),
            "readyClusters": self.ready_clusters,
        }
        line |= {"rssMiB": rss, "queueLength": queues}
        print(json.dumps(line), file=sys.stderr, flush=True)
        return sample
