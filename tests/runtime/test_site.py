"""Ray's start on this machine, which may take longer than Ray allows."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from qwen35_trainer.runtime import site

TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Starts:
    """Stands in for `ray.init`. Each call starts a process and an agent, and raises the next failure until none is left."""

    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.decoys: list[subprocess.Popen[bytes]] = []
        self.agents: list[psutil.Process] = []

    def __call__(self, **options: object) -> None:
        self.decoys.append(subprocess.Popen([*SLEEP, f"{Path(ray.__file__).parent}/raylet"]))
        # Not a child of this process, as an agent whose raylet has ended.
        raylet = os.environ | {"RAY_RAYLET_PID": str(self.decoys[-1].pid)}
        agent = subprocess.run(
            ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *SLEEP], env=raylet, capture_output=True, check=True
        )
        self.agents.append(psutil.Process(int(agent.stdout)))
        if self.failures:
            raise Exception(self.failures.pop(0))  # noqa: TRY002  # as Ray does


@pytest.fixture
def starts(monkeypatch):
    made: list[Starts] = []

    def fails(*failures: str) -> Starts:
        made.append(Starts(*failures))
        monkeypatch.setattr(ray, "init", made[0])
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        return made[0]

    yield fails
    for process in made[0].decoys:
        process.kill()
        process.wait()
    for agent in made[0].agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()


def test_a_ray_that_is_not_up_in_time_is_ended_and_started_again(starts):
    tried = starts(TIMED_OUT)
    bystander = subprocess.Popen(SLEEP)
    try:
        with site.connected(in_cluster=False):
            (first, second), agents = tried.decoys, tried.agents
            assert (_runs(psutil.Process(second.pid)), _runs(agents[1])) == (True, True)
            assert not psutil.pid_exists(first.pid)
            assert not _runs(agents[0])
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_it_is_not_tried_for_ever(starts):
    tried = starts(*[TIMED_OUT] * site.MAX_RAY_STARTS)
    with pytest.raises(Exception, match="timed out during startup"), site.connected(in_cluster=False):
        pass
    assert len(tried.decoys) == site.MAX_RAY_STARTS


def test_another_failure_is_not_tried_again(starts):
    tried = starts("no space left on device")
    with pytest.raises(Exception, match="no space left"), site.connected(in_cluster=False):
        pass
    assert len(tried.decoys) == 1


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
