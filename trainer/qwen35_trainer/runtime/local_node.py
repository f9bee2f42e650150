"""Ray's node of a run on this machine, without the services that such a run does not use.

    ray.init ─► LocalNode ─► gcs_server, raylet ─► workers
                                           └─────► stand-ins for its two agents (agent_stand_in.py)

left out                   serves                                     in a run on this machine
API server                 the dashboard, usage statistics            both are off
monitor                    the autoscaler                             there is one node
log monitor                output of the workers, for the command     workers have log files in the run's folder
dashboard agent            metrics and logs of the node, jobs         no process reads them
runtime environment agent  packages and variables of single workers   workers inherit the command's environment

Each of these five processes imports Ray. Together they take as long as importing torch, and `ray.init` waits for three of
them. Ray has no options to leave them out. The raylet ends if an agent is missing, so a stand-in runs in its place, and
the file with its port says that the service is not available, as Ray's file does if the packages of its dashboard are
not installed. Without the last agent, no task and no actor may have a `runtime_env`: it would end the raylet.

This module replaces private methods of Ray, and changes private arguments, so it belongs to the pinned version of Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray._private import node, ray_constants, services, utils
from ray._private.ray_constants import RAY_RUNTIME_ENV_HOOK
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._raylet import (  # type: ignore[attr-defined]  # its stubs lack these
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

DASHBOARD_AGENT, RUNTIME_ENV_AGENT = "--dashboard_agent_command=", "--runtime_env_agent_command="
"""Arguments of the raylet: the commands of its agents."""
PRESTARTED = "--num_prestart_python_workers="
"""Argument of the raylet: the number of workers that it starts before an actor needs them."""
PORTS = {
    DASHBOARD_AGENT: (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME),
    RUNTIME_ENV_AGENT: (RUNTIME_ENV_AGENT_PORT_NAME,),
}
"""Argument of an agent's command → names of the ports for which the raylet waits until the agent has written them."""
NOT_AVAILABLE = -1
"""The port of a service that does not run."""
STAND_IN = Path(__file__).with_name("agent_stand_in.py")


class LocalNode(node.Node):
    """A node that starts only what a run on this machine needs.

    workers: number of the run's workers. Ray starts a worker for each core of the machine in advance, but no more than these.
    """

    def __init__(self, *arguments: Any, workers: int, **options: Any) -> None:  # noqa: ANN401  # Ray is untyped
        self._workers = workers
        super().__init__(*arguments, **options)

    def start_api_server(self, **_: object) -> None:
        """Do not start it. The empty address means that there is none."""
        self._webui_url = ""

    def start_monitor(self) -> None:
        """Do not start it."""

    def start_log_monitor(self) -> None:
        """Do not start it."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  # Ray is untyped
        agents = unused_agents()
        for port in (port for agent in agents for port in PORTS[agent]):
            persist_port(self._session_dir, self._node_id, port, NOT_AVAILABLE)
        start = services.start_ray_process

        def start_changed(command: list[str], *others: Any, **more: Any) -> Any:  # noqa: ANN401  # as above
            return start(with_few_workers(with_stand_ins(command, agents), self._workers), *others, **more)

        with patch.object(services, "start_ray_process", start_changed):
            super().start_raylet(*arguments, **options)


@contextmanager
def only_needed_services(workers: int) -> Iterator[None]:
    """Context manager: let `ray.init` start a LocalNode in the body.

    workers: number of workers of the run.
    """
    # The answer only decides how the agents and the API server start, and takes half a second.
    without_question = patch.object(utils, "get_dashboard_dependency_error", lambda: None)
    # Under `uv run`, each worker would have a runtime environment.
    without_uv = patch.object(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False)
    with patch.object(node, "Node", partial(LocalNode, workers=workers)), without_question, without_uv:
        yield


def unused_agents() -> tuple[str, ...]:
    """Return the arguments of the raylet with the commands of those agents that the run does not use.

    A runtime environment can only come from Ray's variables for it, if the user has set them.
    """
    has_environment = bool({RAY_RUNTIME_ENV_HOOK, RAY_JOB_CONFIG_JSON_ENV_VAR} & os.environ.keys())
    return (DASHBOARD_AGENT,) if has_environment else (DASHBOARD_AGENT, RUNTIME_ENV_AGENT)


def with_stand_ins(command: list[str], agents: tuple[str, ...]) -> list[str]:
    """Return the raylet's command with stand-ins in place of the agents."""
    stand_in = subprocess.list2cmdline([sys.executable, "-IS", str(STAND_IN)])
    return [
        next((f"{agent}{stand_in}" for agent in agents if argument.startswith(agent)), argument) for argument in command
    ]


def with_few_workers(command: list[str], workers: int) -> list[str]:
    """Return the raylet's command in which at most `workers` workers are started in advance."""
    return [
        f"{PRESTARTED}{min(int(argument.removeprefix(PRESTARTED)), workers)}"
        if argument.startswith(PRESTARTED)
        else argument
        for argument in command
    ]
