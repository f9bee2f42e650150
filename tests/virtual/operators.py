"""Operators of a cluster in memory: `main.operate`, with a transport without sockets and without kopf."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from kubernetes.aio.client.configuration import Configuration
from prometheus_client import generate_latest

from qwen35_operator import handlers, main
from qwen35_operator.kube import client
from qwen35_operator.kube.client import RequestObserver, RestClient
from qwen35_operator.metrics import Metrics
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.probes import Obstacles, readiness
from tests.controlplane import operator_process
from tests.virtual import training_feed
from tests.virtual.clock import read_by_the_operator
from tests.virtual.plane import VirtualPlane
from tests.virtual.rights import Rights
from tests.virtual.transport import Disturber, Transport, Undisturbed


@dataclass
class VirtualOperator:
    """One operator. It ends with the test, or by `stop` or `kill`."""

    plane: VirtualPlane
    settings: OperatorSettings
    rights: Rights
    transport: Transport
    messages: list[str]
    """What all operators of this cluster have logged."""
    task: asyncio.Task[None] | None = None
    _metrics: Metrics = field(default_factory=Metrics)
    _obstacles: Callable[[], Obstacles] = dict
    _started: int = 0

    def start(self) -> None:
        self._started += 1
        operator_process.released(self.plane, self.settings.lease_namespace, self.settings.lease_name)
        self.task = self.plane.loop.create_task(main.operate(self.settings, self.settings.identity))
        self.plane.tasks.append(self.task)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.plane.loop.run_until_complete(self.cancel())

    async def cancel(self) -> None:
        """The same, from within the loop."""
        if self.task is not None:
            self.plane.tasks.remove(self.task)
            self.task.cancel()
            await asyncio.wait({self.task})
            self.task = None

    @property
    def pid(self) -> int:
        """A number that changes when the operator is started again."""
        assert self.task is not None
        assert not self.task.done()
        return self._started

    def readiness(self) -> tuple[int, str]:
        """What the kubelet is answered: status and text."""
        return readiness(self._obstacles())

    @property
    def log(self) -> str:
        """The messages of all operators of this cluster."""
        return "\n".join(self.messages)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, as Prometheus reads them."""
        lines = generate_latest(self._metrics.registry).decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def refused_requests(self) -> dict[str, float]:
        """Requests that were not permitted, by verb and resource."""
        return operator_process.refused(self.metrics())


@dataclass
class Operators:
    """Makes the operators of one cluster."""

    plane: VirtualPlane
    messages: list[str] = field(default_factory=list)
    made: dict[str, VirtualOperator] = field(default_factory=dict)

    def operator(
        self,
        namespaces: tuple[str, ...] = (),
        *,
        rules: list[dict[str, object]] | None = None,
        disturber: Disturber | None = None,
        lease: str = "qwen35-operator",
    ) -> VirtualOperator:
        """An operator with the rights of the chart, or with these rules. It has not been started yet."""
        number = len(self.made) + 1
        name = f"operator-{number}"
        settings = OperatorSettings(
            namespaces=namespaces,
            lease_namespace=operator_process.LEASE_NAMESPACE,
            lease_name=lease,
            identity=name,
            metrics_port=number,
            health_port=number,
            workers=2,
        )
        granted = operator_process.rules() if rules is None else rules
        rights = Rights(name, granted, namespaces, always=operator_process.LEASE_RULES)
        transport = Transport(self.plane.server, rights, disturber or Undisturbed())
        made = VirtualOperator(self.plane, settings, rights, transport, self.messages)
        self.made[name] = made
        return made

    async def connect(self, kubeconfig: str, observer: RequestObserver) -> RestClient:
        """In the place of `client.connect`. kubeconfig: the operator's identity."""
        configuration = Configuration()
        configuration.host = f"http://{kubeconfig}"
        return RestClient(configuration, observer)

    def transport(self, configuration: Configuration) -> Transport:
        """In the place of kubernetes.aio's RESTClientObject."""
        return self.made[configuration.host.removeprefix("http://")].transport

    @asynccontextmanager
    async def serving(
        self,
        metrics: Metrics,
        obstacles: Callable[[], Obstacles],
        *,
        metrics_port: int,
        health_port: int,
        access: None,
        certificate: None,
    ) -> AsyncIterator[None]:
        """In the place of `probes.serving`: nothing listens. metrics_port: the operator's number."""
        operator = self.made[f"operator-{metrics_port}"]
        operator._metrics, operator._obstacles = metrics, obstacles
        assert health_port == metrics_port
        yield


class Messages(logging.Handler):
    """Keeps the text of what is logged."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextmanager
def virtual_plane() -> Iterator[tuple[VirtualPlane, Operators]]:
    """A cluster in memory, and what makes operators for it."""
    plane = VirtualPlane()
    operators = Operators(plane)
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": operator_process.LEASE_NAMESPACE}})
    with read_by_the_operator(plane.clock), pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "RESTClientObject", operators.transport)
        patch.setattr(main, "connect", operators.connect)
        patch.setattr(main, "serving", operators.serving)
        patch.setattr(handlers, "follow", training_feed.follow)
        logger, handler = logging.getLogger("qwen35_operator"), Messages(operators.messages)
        logger.addHandler(handler)
        try:
            yield plane, operators
        finally:
            logger.removeHandler(handler)
            plane.close()
