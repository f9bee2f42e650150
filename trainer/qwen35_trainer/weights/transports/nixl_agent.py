"""One-sided reads (RDMA) by NIXL (github.com/ai-dynamo/nixl), with its UCX backend.

UCX uses InfiniBand and RoCE where there are any, otherwise TCP, and shared memory between processes of one host.

NIXL is imported when an agent is made. The import takes half a second, and only machines that use RDMA need the package.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.transfer_agent import PendingRead, RemoteMemory, SourceLost, Span

PACKAGE, MODULE = "nixl-cu13", "nixl_cu13"
"""The package of NIXL for CUDA 13, and its Python module. They work on machines without a GPU and its driver.

The package `nixl` would also install the libraries for CUDA 12.
"""
HOST_MEMORY = "DRAM"
PROGRESS_MICROSECONDS = 100_000
"""Maximum time, in microseconds, that NIXL's thread waits for an event before it looks again.

NIXL's class `nixl_agent` has 0: a thread that never waits and takes a whole core in every process. Reads over TCP were
as fast with this value.
"""


def is_installed() -> bool:
    """Return whether this process can import NIXL."""
    return find_spec(MODULE) is not None


class NixlAgent:
    """A NIXL agent: it registers memory of this process, and reads registered memory of other processes.

    One agent is enough for a process. It takes half a second to make, and has a thread that answers other processes.
    """

    def __init__(self) -> None:
        api = _imported()
        self._name = f"qwen35-{uuid.uuid4().hex}"
        self._agent = _agent(api, self._name)
        self._errors = _error_types(api)
        self._registered: dict[int, Any] = {}  # by address
        self._known: set[tuple[str, bytes]] = set()  # agents, with the metadata that was loaded
        # NIXL's default is to leave this to the caller.
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return self._name

    def register(self, memory: Memory) -> RemoteMemory:
        address = memory.ctypes.data
        with self._lock:
            regions = [(address, memory.nbytes, 0, "")]
            self._registered[address] = self._agent.register_memory(regions, HOST_MEMORY)
            return RemoteMemory(self._name, self._agent.get_agent_metadata(), address, memory.nbytes)

    def unregister(self, memory: RemoteMemory) -> None:
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(memory.address))

    def start_read(self, source: RemoteMemory, memory: Memory, spans: Sequence[Span]) -> PendingRead:
        places = np.array([(span.source, span.target, span.size) for span in spans], np.uint64).reshape(-1, 3)
        remote, local = np.zeros((2, len(spans), 3), np.uint64)  # address, size, number of the device
        remote[:, 0], remote[:, 1] = places[:, 0] + np.uint64(source.address), places[:, 2]
        local[:, 0], local[:, 1] = places[:, 1] + np.uint64(memory.ctypes.data), places[:, 2]
        with self._lock:
            try:
                self._learn(source)
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, HOST_MEMORY),
                    self._agent.get_xfer_descs(remote, HOST_MEMORY),
                    source.agent,
                )
                state = self._agent.transfer(handle)
            except self._errors as error:
                raise _lost(source.agent, error) from error
            if state != "PROC":
                self._agent.release_xfer_handle(handle)
        return _NixlRead(self, handle, source.agent, state)

    def poll(self, read: _NixlRead) -> None:
        """Update `read.state` of a read that is in flight, and release the read's handle if it has ended.

        If NIXL reports that the read has failed, the state becomes `ERR`, and nothing is raised: `is_done` raises
        SourceLost for that state. Raises SourceLost only if NIXL's call itself raises.
        """
        with self._lock:
            try:
                read.state = self._agent.check_xfer_state(read.handle)
            except self._errors as error:
                read.state = "ERR"
                raise _lost(read.source, error) from error
            finally:
                if read.state != "PROC":
                    self._agent.release_xfer_handle(read.handle)

    def _learn(self, source: RemoteMemory) -> None:
        """Load the metadata of an agent, unless the same metadata was loaded before.

        Newer metadata of an agent adds the memory that it has registered since then.
        """
        entry = (source.agent, source.metadata)
        if entry in self._known:
            return
        try:
            self._agent.add_remote_agent(source.metadata)
        except self._errors:  # NIXL then forgets all that it knew of the agent
            self._known = {other for other in self._known if other[0] != source.agent}
            raise
        self._known.add(entry)


class _NixlRead:
    """A read by NIXL.

    state: `PROC` while the read is in flight, `DONE` if all bytes have arrived, or `ERR` if it has failed.
    """

    def __init__(self, agent: NixlAgent, handle: Any, source: str, state: str) -> None:  # noqa: ANN401  # NIXL's handle
        self._agent, self.handle, self.source, self.state = agent, handle, source, state

    def is_done(self) -> bool:
        if self.state == "PROC":
            self._agent.poll(self)
        if self.state == "ERR":
            raise SourceLost(f"NIXL agent {self.source} cannot be read: the transfer failed")
        return self.state == "DONE"


def _imported() -> ModuleType:
    """Return NIXL's Python API, and undo a change of its import to logging in the whole process."""
    raises = logging.raiseExceptions
    import nixl_cu13._api as api

    logging.raiseExceptions = raises
    api.logger.setLevel(logging.WARNING)
    module: ModuleType = api
    return module


def _agent(api: ModuleType, name: str) -> Any:  # noqa: ANN401  # NIXL's nixl_agent
    """Return an agent of NIXL with the UCX backend, whose progress thread waits for events."""
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.useListenThread = True, False
    config.pthrDelay = PROGRESS_MICROSECONDS
    agent.agent = api.nixlBind.nixlAgent(name, config)  # nixl_agent_config cannot set the delay
    agent.create_backend("UCX")
    return agent


def _error_types(api: ModuleType) -> tuple[type[Exception], ...]:
    """Return NIXL's exceptions, which have no common base class."""
    classes = (each for each in vars(api.nixlBind).values() if isinstance(each, type))
    return tuple(each for each in classes if issubclass(each, Exception))


def _lost(agent: str, error: Exception) -> SourceLost:
    return SourceLost(f"NIXL agent {agent} cannot be read: {error}")
