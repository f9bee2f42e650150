"""Measures what attacks of a tenant cost 100 trainings of others, on a real API server. Prints one JSON object.

    create ─► run ─► three rounds of: reports alone, and reports while another namespace attacks

reports   trainers report new checkpoints; latency until another client's watch shows each in the status
attacks   all attacks of tests/controlplane/attacks.py, begun evenly over the same time, by a process of its own: threads of this
          process would hold up the one that measures. It has the lowest priority, because in a cluster a tenant's own
          work takes no processor from the control plane. Whether each has the expected outcome is the matter of
          tests/controlplane/test_attacks.py

writes    an administrator writes annotations of a training, WRITES_PER_SECOND; latency until the same watch shows each. No
          operator takes part, so this is what the attacks cost the API server itself

The figure is the 99th percentile of the latency, the median of the rounds, with attacks over without. Rounds begin by turns
with one and with the other. As in operator_scale.py, the operator is a separate process with the rights of its role, KubeRay
is stopped, and everything shares this machine.

`--without-operator` shows what the attacks cost the API server alone: the operator is ended once the trainings run, and this process
copies each report into the status. Attacks that need what the operator does are not carried out to their end, and nobody watches the
attacker's objects, so an operator can hardly reach these latencies. Compare them in milliseconds: without attacks they are shorter too.

    python -m benchmarks.operator_attacks [--size 100] [--rounds 3] [--seconds 60] [--without-operator]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.observer import MERGE_PATCH, Json, observing, paced, spread, until
from benchmarks.operator_scale import NAMESPACE, QUIET_SECONDS, Bed, create, events, run, save, training
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_JOB, TRAINING
from tests.controlplane import operator_process
from tests.controlplane.attacks import ATTACKS, Attack
from tests.controlplane.live_training import LiveTraining
from tests.testbed import binaries
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane, control_plane

ATTACKER = "attacker"
"""Namespace of the attacks."""
MAX_RATIO = 1.2
WRITTEN, WRITES_PER_SECOND = "written", 4.0
"""Name of the training that an administrator writes."""
VICTIM = "victim"
"""Name of the training that some attacks share."""
VICTIM_OBJECTS = {VICTIM, f"{VICTIM}-1", *(f"{VICTIM}-{part}" for part in ("config", "progress", "history", "control"))}
"""Names of its objects."""
WORKERS = 8
"""Attacks that may run at the same time: some wait for what the operator creates."""
LOWEST_PRIORITY = 19
"""The nice value of the attacker's process."""
END_SECONDS = 10.0
"""Maximum time in which the attacker's process ends."""

type Act = Literal["begin", "attack", "clean_up", "give_up_waiting"]
"""A method of the attacker."""


class TrainingWithoutKubeRay(LiveTraining):
    """A training whose trainer reports although there is no RayCluster, because KubeRay is stopped."""

    def report(self, state: str = "Running", *, attempt: int = 1, **fields: Any) -> None:  # noqa: ANN401  # JSON
        super().report(state, attempt=attempt, cluster="", **fields)

    def _may_report(self, attempt: int) -> bool:
        return True


class TrainingWithoutOperator(TrainingWithoutKubeRay):
    """A training for which nobody does anything."""

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Raises AssertionError unless it holds already."""
        assert holds(), f"without an operator: {what}"


def attacks() -> list[Attack]:
    """All attacks but those that need the chart's policy or KubeRay, neither of which is here."""
    return [attack for attack in ATTACKS if not attack.policy and not attack.pods]


@dataclass
class Attacker:
    """Carries out all attacks, in a namespace of its own."""

    plane: ControlPlane
    results: Counter[str] = field(default_factory=Counter)
    kind: type[TrainingWithoutKubeRay] = TrainingWithoutKubeRay

    def begin(self) -> None:
        """Create the training that some attacks share."""
        self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": ATTACKER}})
        victim = self.training(VICTIM).apply()
        victim.report()
        victim.until_state("Running")

    def give_up_waiting(self) -> None:
        """Wait for nothing any more, because the operator has been ended."""
        self.kind = TrainingWithoutOperator

    def training(self, name: str) -> LiveTraining:
        return self.kind(self.plane, ATTACKER, name)

    def attack(self, seconds: float) -> None:
        """Begin all attacks within `seconds`, and wait for their ends."""
        began, pause = time.monotonic(), seconds / len(attacks())
        begun = []
        with ThreadPoolExecutor(WORKERS) as workers:
            for number, attack in enumerate(attacks()):
                time.sleep(max(0.0, began + number * pause - time.monotonic()))
                begun.append(workers.submit(self._carry_out, attack))
        self.results.update(attack.result() for attack in begun)

    def _carry_out(self, attack: Attack) -> str:
        """Attack. Returns what happened, in a word."""
        try:
            attack.act(self.training(VICTIM if attack.running else attack.training))
        except Refused:
            return "refused"
        except (OSError, AssertionError) as problem:
            print(f"{attack.name}: {problem!r}"[:400], file=sys.stderr, flush=True)
            return "failed"
        return "carried out"

    def clean_up(self) -> None:
        """Delete everything but the shared training, so that each round begins alike."""
        for kind in (TRAINING, RAY_JOB, CONFIG_MAP, POD):
            names = {item["metadata"]["name"] for item in self.plane.api.get(kind.path(ATTACKER))["items"]}
            for name in names - VICTIM_OBJECTS:
                self._delete(kind.path(ATTACKER, name))

    def _delete(self, path: str) -> None:
        try:
            self.plane.api.request("DELETE", path)
        except Refused as refused:
            if refused.status != 404:
                raise


@dataclass(frozen=True)
class AttackerProcess:
    """The other end of a process that carries out the acts of an `Attacker`, one after another."""

    acts: Connection

    def carry_out(self, act: Act, seconds: float = 0.0) -> Counter[str]:
        """Let the process act, and return the results of all attacks so far.

        seconds: for `attack`. Raises the error of the act, and EOFError if the process has ended.
        """
        self.acts.send((act, seconds))
        answer = self.acts.recv()
        if isinstance(answer, Exception):
            raise answer
        results: Counter[str] = answer
        return results


@contextmanager
def attacking(plane: ControlPlane) -> Iterator[AttackerProcess]:
    """Context manager: start the attacker's process, and end it afterwards."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_act, args=(plane, theirs, ours), daemon=True)
    process.start()
    theirs.close()
    try:
        yield AttackerProcess(ours)
    finally:
        ours.close()
        process.join(END_SECONDS)
        process.kill()


def _act(plane: ControlPlane, acts: Connection, other_end: Connection) -> None:
    """Carry out acts until the other end of the connection is closed. The fork has a copy of it."""
    other_end.close()
    plane.api.kept.__dict__.clear()  # the connection that the other process continues to use
    os.nice(LOWEST_PRIORITY)
    attacker = Attacker(plane)
    while True:
        try:
            act, seconds = acts.recv()
        except EOFError:
            return
        try:
            attacker.attack(seconds) if act == "attack" else getattr(attacker, act)()
        except Exception as error:  # noqa: BLE001  # raised at the other end
            acts.send(error)
        else:
            acts.send(attacker.results)


def main() -> None:
    options = _arguments()
    load = os.getloadavg()
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}  # all processes find the same packages as this one
    with (
        tempfile.TemporaryDirectory(prefix="operator-attacks-", ignore_cleanup_errors=True) as folder,
        control_plane(binaries.find(), Path(folder), environment) as plane,
        attacking(plane) as attacker,
    ):
        result = asyncio.run(_measure(plane, attacker, options))
    cores = len(os.sched_getaffinity(0))
    header = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": cores, "loadBefore": load}
    print(json.dumps(header | result, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What attacks cost other trainings; prints one JSON object.")
    parser.add_argument("--size", type=int, default=100, help="number of other trainings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each part of a round")
    parser.add_argument("--reports-per-second", type=float, default=20.0, help="of all trainings together")
    parser.add_argument("--without-operator", action="store_true", help="write the statuses without an operator")
    return parser.parse_args()


async def _measure(plane: ControlPlane, attacker: AttackerProcess, options: argparse.Namespace) -> Json:
    plane.stop_kuberay()
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    operator = operator_process.process(plane, operator_process.user(plane, operator_process.rules()))
    count = round(options.reports_per_second * options.seconds)
    parts: dict[str, list[Json]] = {"alone": [], "attacked": []}
    async with observing(plane.api, TRAINING.path(NAMESPACE), RAY_JOB.path(NAMESPACE)) as seen:
        bed = Bed(plane, operator, seen, options.size)
        await create(bed)
        await run(bed)
        results = await asyncio.to_thread(attacker.carry_out, "begin")
        await seen.request("POST", seen.trainings, suspended(WRITTEN))
        if options.without_operator:
            await events(bed, bed.size)  # every training has a checkpoint
            await asyncio.to_thread(operator.stop)
            await asyncio.to_thread(attacker.carry_out, "give_up_waiting")
        first = 1 + bed.size
        for number in range(options.rounds):
            for name in ("alone", "attacked") if number % 2 == 0 else ("attacked", "alone"):
                await asyncio.sleep(QUIET_SECONDS)
                measured = await _part(bed, attacker, options, count, first, attacked=name == "attacked")
                results = measured.pop("results", results)
                print(f"round {number + 1}, {name}: {json.dumps(measured)}", file=sys.stderr, flush=True)
                parts[name].append(measured)
                first += count
        ready = None if options.without_operator else await asyncio.to_thread(operator.readiness)
    medians = {name: statistics.median(part["p99"] for part in measured) for name, measured in parts.items()}
    written = {name: statistics.median(part["writes"]["p99"] for part in measured) for name, measured in parts.items()}
    ratio = medians["attacked"] / medians["alone"]
    aim = {"atMost": MAX_RATIO, "reached": ratio <= MAX_RATIO}
    return {
        "trainings": options.size,
        "attacks": len(attacks()),
        "results": dict(results),
        "operator": not options.without_operator,
        "readyz": ready,
        "bugsInTheLog": operator.log.count("this is a bug"),
        "medianP99Seconds": medians,
        "medianP99SecondsOfWrites": written | {"ratio": round(written["attacked"] / written["alone"], 3)},
        "ratio": {"value": round(ratio, 3)} | ({} if options.without_operator else aim),
        "rounds": parts,
    }


def suspended(name: str) -> Json:
    """Return a training for which the operator does nothing."""
    body = training(name)
    return body | {"spec": body["spec"] | {"suspend": True}}


async def _part(
    bed: Bed, attacker: AttackerProcess, options: argparse.Namespace, count: int, first: int, *, attacked: bool
) -> Json:
    """Return the latencies of the reports in one part of a round, what the operator used, and the results of attacks."""
    act = partial(asyncio.to_thread, attacker.carry_out, "attack", options.seconds)
    under_way = asyncio.create_task(act()) if attacked else None
    latencies: list[float] = []

    async def write(number: int) -> None:
        latencies.append(await bed.seen.write_latency(WRITTEN, f"{first}-{number}"))

    writes = asyncio.create_task(paced(round(options.seconds * WRITES_PER_SECOND), WRITES_PER_SECOND, write))
    reports = _reports_without_operator if options.without_operator else events
    measured = await reports(bed, count, options.reports_per_second, first)
    await writes
    measured["writes"] = spread(latencies)
    if under_way is not None:
        measured["results"] = await under_way
        await asyncio.to_thread(attacker.carry_out, "clean_up")
    return measured


async def _reports_without_operator(bed: Bed, count: int, per_second: float, first: int) -> Json:
    """Return the latencies of reports, each of which this process copies into the status as soon as it is written."""
    seen, latencies = bed.seen, []

    async def report(number: int) -> None:
        name, update = f"t{number % bed.size}", first + number
        await save(seen, name, update)
        written = time.monotonic()
        saved = {"lastCheckpoint": {"update": update, "uri": f"/run/checkpoints/{update}"}}
        await seen.request("PATCH", f"{seen.trainings}/{name}/status", {"status": saved}, MERGE_PATCH)
        await until(lambda: seen.saved[name][-1][1] >= update, f"checkpoint {update} of {name}")
        at = next(at for at, shown in seen.saved[name] if shown >= update)
        latencies.append(max(0.0, at - written))

    await paced(count, per_second, report)
    return spread(latencies)


if __name__ == "__main__":
    main()
