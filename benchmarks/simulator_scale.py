"""Measures how the cost of the simulator and of the coordinator grows with the workload. Prints one JSON object.

simulator    a rollout pool of 64, 256 and 1,024 replicas with 128 slots each, batches of 512, 2,048 and 8,192 sequences, a window
             that fills all slots at first; 50 batches. Seconds, those of the processor, coordinator events per one of these, and the
             peak memory of the process so far.
coordinator  alone, with 1,000, 10,000 and 100,000 groups held: one of the first quarter of the running sequences finishes next, batches train
             immediately, every replica loads every version. Microseconds of an event with all actions that it causes: the event
             that makes room for a batch starts thousands of sequences.

    python -m benchmarks.simulator_scale [--replicas 64 256 1024] [--held 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import time
from collections import defaultdict, deque

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import Event, SequenceId
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.workload import ReplicaGroup, ReplicaSpeed, TrainSpeed, Workload

GROUP = 16
BATCHES = 50


def workload(replicas: int) -> Workload:
    """P groups of 16 are 8 sequences a replica; (1 + s)·P·16 are 17 batches, 136 sequences a replica: more than its slots. The
    trainer is faster than the pool.
    """
    return Workload(
        pools=(ReplicaGroup(replicas, ReplicaSpeed(slots=128)),),
        trainer=TrainSpeed(units=4 * replicas),
        prompts_per_batch=replicas * 8 // GROUP,
        group_size=GROUP,
        staleness_threshold=16,
        max_version_lag=20,
        batches=BATCHES,
        warm_up=20,
        cool_down=0,
    )


def measure_simulator(replicas: int) -> dict[str, object]:
    began, processor = time.perf_counter(), time.process_time()
    result = simulate(workload(replicas))
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    return {
        "replicas": replicas,
        "slots": replicas * 128,
        "sequencesPerBatch": replicas * 8,
        "seconds": round(seconds, 2),
        "processorSeconds": round(processor, 2),
        "events": result.events,
        "eventsPerSecond": round(result.events / processor),
        "microsecondsPerEvent": round(1e6 * processor / result.events, 1),
        "peakMiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


class Driven:
    """A coordinator whose replicas generate at random and whose trainer takes no time."""

    def __init__(self, held: int) -> None:
        # Of ⌊(1 + 3)·P⌋ groups all but those of the batch that has just trained are held.
        self.coordinator = Coordinator(CoordinatorSettings(Window(held // 4, 1, 3.0, 4), 4, batches=1_000_000))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: defaultdict[str, int] = defaultdict(int)
        self.slowest = 0.0
        self.held = 0
        self._random = random.Random(0)
        self._running: list[SequenceId] = []  # in the order in which they started, those that have finished first
        self._done = 0
        self._left: dict[int, int] = {}
        self._soon: deque[Event] = deque(on.ReplicaJoined(number, 128, 0) for number in range(-(-held * 4 // 128)))
        self._replicas = len(self._soon)

    def play(self, events: int) -> None:
        """Play `events` sequences that finish, and what follows from them. What fills the window first is not counted."""
        self._settle()
        self.seconds.clear()
        self.events.clear()
        self.slowest = 0.0
        for _ in range(events):
            name = self._next_to_finish()
            self._tell(on.SequenceFinished(name, 1000))
            self._left[name[0]] -= 1
            if not self._left[name[0]]:
                del self._left[name[0]]
                self._tell(on.GroupScored(name[0]))
            self._settle()
            self.held = max(self.held, self.coordinator.buffer.held)

    def _next_to_finish(self) -> SequenceId:
        running, first = self._running, self._done
        at = first + self._random.randrange((len(running) - first + 3) // 4)
        running[at], running[first] = running[first], running[at]
        self._done += 1
        return running[first]

    def _settle(self) -> None:
        while self._soon:
            self._tell(self._soon.popleft())

    def _tell(self, event: Event) -> None:
        began = time.perf_counter()
        actions = self.coordinator.handle(event)
        took = time.perf_counter() - began
        self.seconds[type(event).__name__] += took
        self.events[type(event).__name__] += 1
        self.slowest = max(self.slowest, took)
        for action in actions:
            match action:
                case notices.GroupDispatched():
                    self._left[action.group] = 4
                case do.StartSequences():
                    self._running += [name for name, _ in action.sequences]
                case do.TrainGroups():
                    self._soon.append(on.BatchTrained(action.batch))
                case do.CopyWeights():
                    self._soon.append(on.WeightsCopied(action.version))
                case do.PublishWeights():
                    self._soon += [on.VersionLoaded(number, action.version) for number in range(self._replicas)]


def measure_coordinator(held: int) -> dict[str, object]:
    driven = Driven(held)
    # Some batches' worth: an event that makes room for a batch costs more than the others.
    driven.play(max(50_000, 8 * held))
    events = sum(driven.events.values())
    return {
        "held": driven.held,
        "events": events,
        "microsecondsPerEvent": round(1e6 * sum(driven.seconds.values()) / events, 2),
        "byEvent": {
            name: {"events": driven.events[name], "microseconds": round(1e6 * seconds / driven.events[name], 2)}
            for name, seconds in sorted(driven.seconds.items())
        },
        "slowestMilliseconds": round(1e3 * driven.slowest, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--held", type=int, nargs="+", default=[1000, 10_000, 100_000])
    options = parser.parse_args()
    # First, so that the peak memory is the simulator's.
    simulator = [measure_simulator(replicas) for replicas in sorted(options.replicas)]
    coordinator = [measure_coordinator(held) for held in sorted(options.held)]
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    json.dump({"machine": machine, "simulator": simulator, "coordinator": coordinator}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
