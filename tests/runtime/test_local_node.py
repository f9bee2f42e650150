"""Which processes Ray starts for a run on this machine."""

import subprocess
import sys

import psutil
import pytest

from qwen35_trainer.runtime import agent_stand_in
from qwen35_trainer.runtime.local_node import (
    DASHBOARD_AGENT,
    PRESTARTED,
    RUNTIME_ENV_AGENT,
    STAND_IN,
    unused_agents,
    with_few_workers,
    with_stand_ins,
)
from tests.patience import PATIENCE

STARTED = """
import psutil
from qwen35_trainer.runtime.process import set_environment
set_environment(in_cluster=False)
from qwen35_trainer.runtime.site import connected
with connected(in_cluster=False, workers=1):
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        def processes(self):
            raylet = psutil.Process().parent()
            return [" ".join(process.cmdline()[:3]) for process in [*raylet.parent().children(), *raylet.children()]]

    print(*ray.get(Worker.remote().processes.remote()), sep="\\n")
"""
RAYLET = f"""
import os, subprocess, sys, time
environment = {{**os.environ, "{agent_stand_in.RAYLET}": str(os.getpid())}}
print(subprocess.Popen([sys.executable, "-IS", "{STAND_IN}"], env=environment).pid, flush=True)
time.sleep(600)
"""
"""Starts a stand-in as the raylet does, and prints its process id."""
WORKER = "default_worker.py"
NEEDED = ("gcs_server", "raylet/raylet", STAND_IN.name, "ray::", WORKER)
"""A part of the command of each process that a run needs. A worker has a title of its own after it has started."""


def test_ray_starts_nothing_that_a_run_on_this_machine_does_not_use(tmp_path):
    """With Ray's own services there were five processes more, each of which imported Ray."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = [next((part for part in NEEDED if part in line), line) for line in done.stdout.splitlines()]
    assert {*kinds} - {WORKER} == {*NEEDED} - {WORKER}
    assert kinds.count(STAND_IN.name) == 2, "one for each agent that the raylet requires"


def test_only_the_commands_of_agents_are_replaced():
    command = ["raylet", "--head", f"{DASHBOARD_AGENT}python agent.py --head", f"{RUNTIME_ENV_AGENT}python main.py"]
    replaced = with_stand_ins(command, (DASHBOARD_AGENT,))
    assert replaced == [*command[:2], f"{DASHBOARD_AGENT}{sys.executable} -IS {STAND_IN}", command[3]]


def test_no_more_workers_are_started_in_advance_than_the_run_has():
    command = ["raylet", f"{PRESTARTED}64", "--head"]
    assert with_few_workers(command, 3) == ["raylet", f"{PRESTARTED}3", "--head"]
    assert with_few_workers(command, 100) == command


@pytest.mark.parametrize("variable", ["RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR"])
def test_who_sets_a_runtime_environment_gets_rays_agent_for_it(monkeypatch, variable):
    for name in ("RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    assert unused_agents() == (DASHBOARD_AGENT, RUNTIME_ENV_AGENT)
    monkeypatch.setenv(variable, "{}")
    assert unused_agents() == (DASHBOARD_AGENT,)


def test_a_stand_in_whose_raylet_has_ended_before_it_began_ends(monkeypatch):
    """The raylet may be killed while the stand-in's interpreter starts."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setenv(agent_stand_in.RAYLET, str(ended.pid))
    command = [sys.executable, "-IS", str(STAND_IN)]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == 0


def test_a_stand_in_ends_with_the_raylet(eventually, monkeypatch):
    assert agent_stand_in.RAYLET_CHECK_SECONDS <= 1
    monkeypatch.delenv(agent_stand_in.RAYLET, raising=False)
    with subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None
        stand_in = psutil.Process(int(raylet.stdout.readline()))
        raylet.kill()
    eventually(lambda: not stand_in.is_running() or stand_in.status() == psutil.STATUS_ZOMBIE, "its end")
