"""The operator dies after its writes; in the end all is as if it had not.

A write is carried out, and the operator never hears of it: dying after the answer leaves the same cluster and the same empty
memory behind. In memory the operator dies after each single write of every story. On the real control plane the operators of one
long story die after each of their writes, so that every kind of write is the last one of a life, and a process is killed; each
single write in `make soak`.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.controlplane import operator_process
from tests.controlplane.in_process import proxied
from tests.controlplane.live_training import CHILDREN
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.proxy import Line
from tests.controlplane.scenarios import LIFE, SCENARIOS
from tests.controlplane.sweep import Scenario, Sweep, on_the_real_plane
from tests.testbed.control_plane import ControlPlane


def test_operators_that_die_after_every_write_change_nothing_in_the_end(sweep: Sweep):
    pictures, _ = sweep.endings[LIFE.name]
    (results,) = sweep.disturbed(LIFE, {"dead after every write": partial(Line.arm, kill_always=True)})
    assert results.suffered == results.writes
    # How many status writes there are depends on how KubeRay's and the pods' events come together; each act has at least one.
    assert results.writes >= children_of(pictures[0]) + len(pictures)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_crash_after_any_write_changes_nothing_in_the_end(memory_sweep: Sweep, scenario: Scenario):
    memory_sweep.calm([scenario])
    crash_after_any_write(memory_sweep, scenario)


@pytest.mark.soak
def test_a_crash_after_any_write_of_the_long_story_changes_nothing_in_the_end(memory_sweep: Sweep):
    memory_sweep.calm([LIFE])
    crash_after_any_write(memory_sweep, LIFE)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_crash_after_any_write_changes_nothing_on_the_real_control_plane(sweep: Sweep, scenario: Scenario):
    crash_after_any_write(sweep, scenario)


def crash_after_any_write(sweep: Sweep, scenario: Scenario) -> None:
    _, writes = sweep.endings[scenario.name]
    numbers = range(1, writes + 1)
    results = sweep.disturbed(scenario, {f"dead after write {n}": partial(Line.arm, kill_at=n) for n in numbers})
    # A run may make fewer writes than the undisturbed one did; then there was no n-th write to die after.
    assert [result.suffered for result in results] == [
        int(item.writes >= n) for n, item in zip(numbers, results, strict=True)
    ]


def test_a_killed_process_changes_nothing_in_the_end(control_plane: ControlPlane, sweep: Sweep):
    """SIGKILL, and a new process: what the sweep does within this one, for two writes of the first act."""
    (picture, *_), _ = sweep.endings[LIFE.name]
    # Every run makes each child, and writes the status at least once; how often is its own matter.
    certain = children_of(picture) + 1
    numbers = (certain // 2, certain)
    with proxied(control_plane) as proxy:
        kubeconfig = control_plane.kubeconfig_via(proxy.url)

        @contextmanager
        def serving(namespace: str) -> Iterator[Line]:
            served = f"--namespace={namespace}"
            operator = operator_process.process(control_plane, kubeconfig, served, name=namespace, lease=namespace)
            line = proxy.line(namespace)
            line.rests = lambda name, version: operator.rests()
            line.looks = lambda: (0, operator.looks())  # one life: its only death comes before the touch
            with replaced_when_dead(operator, line):
                operator.start()
                yield line

        processes = Sweep(on_the_real_plane(control_plane, serving), sweep.endings)
        created = replace(LIFE, acts=LIFE.acts[:1])
        results = processes.disturbed(
            created, {f"killed after write {n}": partial(Line.arm, kill_at=n) for n in numbers}
        )
    assert [result.suffered for result in results] == [1] * len(numbers)


def children_of(picture: Mapping[str, Any]) -> int:
    """The number of children in a picture, each of which takes one write."""
    return sum(len(picture["jobs" if kind == "rayjobs" else kind]) for kind in CHILDREN)


@contextmanager
def replaced_when_dead(operator: OperatorProcess, line: Line) -> Iterator[None]:
    died, ended = threading.Event(), threading.Event()
    line.on_death = died.set

    def replace() -> None:
        died.wait()
        if not ended.is_set():
            operator.kill()
            line.revive()
            operator.start()

    waiting = threading.Thread(target=replace)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        died.set()
        waiting.join()
        operator.stop()
