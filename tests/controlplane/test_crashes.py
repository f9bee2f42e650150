"""The operator dies after its n-th write, for every n of every story; in the end all is as if it had not.

The n-th write is carried out, and the operator never hears of it: dying after the answer leaves the same cluster and the
same empty memory behind. How many status writes there are depends on how KubeRay's and the pods' news come together, so a
telling may make fewer writes than the calm one did, and its operator may then survive.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.controlplane import operator_process
from tests.controlplane.in_process import proxied
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.proxy import Line
from tests.controlplane.story import CHILDREN
from tests.controlplane.sweep import Sweep, Tale
from tests.controlplane.tales import TALES
from tests.testbed.control_plane import ControlPlane


@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.name)
def test_a_crash_after_any_write_changes_nothing_in_the_end(sweep: Sweep, tale: Tale):
    _, writes = sweep.endings[tale.name]
    deaths = sweep.disturbed(
        tale, {f"dead after write {n}": partial(Line.arm, kill_at=n) for n in range(1, writes + 1)}
    )
    assert sum(deaths) >= writes // 2


def test_a_killed_process_changes_nothing_in_the_end(control_plane: ControlPlane, sweep: Sweep):
    """SIGKILL, and a new process: what the sweep does within this one, for some writes."""
    (tale,) = (one for one in TALES if one.name == "create")
    picture, _ = sweep.endings[tale.name]
    # Every telling makes each child, and writes the status at least once; how often is its own matter.
    certain = sum(len(picture["jobs" if kind == "rayjobs" else kind]) for kind in CHILDREN) + 1
    numbers = (1, certain // 3, 2 * certain // 3, certain)
    with proxied(control_plane) as proxy:
        kubeconfig = control_plane.kubeconfig_via(proxy.url)

        @contextmanager
        def serving(namespace: str) -> Iterator[Line]:
            served = f"--namespace={namespace}"
            operator = operator_process.process(control_plane, kubeconfig, served, name=namespace, lease=namespace)
            line = proxy.line(namespace)
            with replaced_when_dead(operator, line):
                operator.start()
                yield line

        processes = Sweep(control_plane, serving, sweep.endings)
        deaths = processes.disturbed(tale, {f"killed after write {n}": partial(Line.arm, kill_at=n) for n in numbers})
    assert deaths == [1, 1, 1, 1]


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
