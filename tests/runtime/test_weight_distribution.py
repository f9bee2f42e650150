"""Which replica is sent a version when, and where it reads it: with real transfers between stand-ins for replicas."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from qwen35_trainer.runtime.replica_channel import EngineReport
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.runtime.weight_distribution import WeightDistribution
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import PublishedWeights, RegisteredShards, joined
from qwen35_trainer.weights.relay import MIN_TRAINER_READERS as TRAINER_READERS
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transfer_agent import SourceLost
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.transports.rdma import RdmaReceiver, RdmaSender
from qwen35_trainer.weights.weight_manifest import WeightsDamaged
from tests.runtime.replicas import weights
from tests.weights.memory_agent import MemoryAgent, Network

NETWORK_REPLICAS = 9


class Replica:
    """A replica that fetches when the test lets it."""

    def __init__(self, number: int, network: Network) -> None:
        self.number, self.name = number, f"replica-{number}"
        self.receiver = RdmaReceiver(MemoryAgent(network, self.name))
        self.arrived: list[PublishedWeights] = []
        self.held: HostWeights | None = None

    def send_weights(self, published: PublishedWeights) -> None:
        self.arrived.append(published)

    def source(self) -> str:
        """The agent from which the next version is read."""
        source = self.arrived[0].source
        return source.shards[0].memory.agent if isinstance(source, RegisteredShards) else source.memory.agent

    def load(self) -> EngineReport:
        """Fetch the version that was sent first, as the rollout worker does."""
        published = self.arrived.pop(0)
        version = published.manifest.version
        try:
            self.held = asyncio.run(self.receiver.fetch(published))
        except (SourceLost, WeightsDamaged):
            if isinstance(published.source, RegisteredShards):
                raise
            return EngineReport(1, unread=version)
        return EngineReport(1, loaded=version, copy=self.receiver.copy)


class Run:
    """A trainer, replicas, and the distribution between them."""

    def __init__(self) -> None:
        self.network = Network()
        self.sender = RdmaSender(RankContext(0, 1, None), MemoryAgent(self.network, "trainer"))
        self.distribution = WeightDistribution()
        self.replicas = [Replica(number, self.network) for number in range(NETWORK_REPLICAS)]

    def publish(self, version: int) -> None:
        shard = WeightShard("w", (50,), torch.float32, 0, torch.full((50,), float(version)))
        staged = self.sender.stage([shard], version, frozenset({version - 1}))
        self.distribution.publish(joined([staged], version), self.replicas)

    def load(self, replica: Replica) -> EngineReport:
        report = replica.load()
        self.distribution.reported(replica, report)
        return report

    def load_all(self) -> list[str]:
        """Let all replicas load what they were sent, in the order of their numbers, and return who was read from."""
        sources = []
        while ready := [replica for replica in self.replicas if replica.arrived]:
            sources.append(ready[0].source())
            self.load(ready[0])
        return sources

    def lose(self, replica: Replica) -> None:
        """End the process of a replica: its memory cannot be read any more."""
        self.replicas.remove(replica)
        for entry in [entry for entry in self.network.memory if entry[0] == replica.name]:
            self.network.memory[entry].fill(0)
        self.distribution.lost(replica)

    def have(self, version: int) -> bool:
        return all(bool((replica.held["w"] == version).all()) for replica in self.replicas if replica.held is not None)


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_first_replicas_read_from_the_trainer_and_the_others_from_replicas(run: Run) -> None:
    for version in range(4):
        run.publish(version)
        assert [replica.number for replica in run.replicas if replica.arrived] == list(range(TRAINER_READERS))
        sources = run.load_all()
        assert sources.count("trainer") == TRAINER_READERS
        assert len(sources) == NETWORK_REPLICAS
        assert run.have(version)


def test_readers_of_a_lost_replica_read_elsewhere(run: Run) -> None:
    run.publish(1)
    first, second = run.replicas[:2]
    run.load(first)
    readers = [replica for replica in run.replicas if replica.arrived and replica.source() == first.name]
    assert [reader.number for reader in readers] == [TRAINER_READERS]
    run.lose(first)
    report = run.load(readers[0])
    assert report.unread == 1
    run.load(second)
    run.load_all()
    assert all(replica.held is not None for replica in run.replicas)
    assert run.have(1)


def test_if_all_replicas_that_have_a_version_are_lost_the_trainer_is_read_again(run: Run) -> None:
    run.publish(1)
    for replica in run.replicas[:TRAINER_READERS]:
        run.load(replica)
    for replica in run.replicas[:TRAINER_READERS]:
        run.lose(replica)
    sources = run.load_all()
    assert "trainer" in sources
    assert all(replica.held is not None for replica in run.replicas)
    assert run.have(1)


def test_a_replica_that_still_waits_gets_only_the_next_version(run: Run) -> None:
    run.publish(1)
    run.publish(2)
    waiting = run.replicas[TRAINER_READERS:]
    run.load_all()
    assert run.have(2)
    assert all(replica.held is not None and replica.held.version == 2 for replica in waiting)


def test_a_lost_reader_makes_room_for_the_next_one(run: Run) -> None:
    run.publish(1)
    run.lose(run.replicas[0])
    assert run.replicas[TRAINER_READERS - 1].source() == "trainer"


def test_a_replica_that_joins_reads_from_one_that_has_the_version(run: Run) -> None:
    run.publish(1)
    run.load_all()
    late = Replica(100, run.network)
    run.distribution.send(late)
    assert late.source().startswith("replica-")
    assert run.load(late).loaded == 1


def test_a_starting_replica_whose_source_is_lost_after_the_next_publication_gets_that_one(run: Run) -> None:
    run.publish(1)
    run.load_all()
    starting = Replica(100, run.network)
    run.distribution.send(starting)
    [source] = [replica for replica in run.replicas if replica.name == starting.source()]
    run.publish(2)  # to the replicas that have joined
    run.lose(source)
    assert run.load(starting).unread == 1
    run.replicas.append(starting)
    run.load_all()
    assert starting.held is not None
    assert starting.held.version == 2
    assert run.have(2)


def test_a_starting_replica_that_has_read_the_version_before_is_sent_nothing_for_that(run: Run) -> None:
    run.publish(1)
    run.load_all()
    starting = Replica(100, run.network)
    run.distribution.send(starting)
    run.publish(2)
    assert run.load(starting).loaded == 1
    assert starting.arrived == []


def test_other_transports_send_a_version_to_all_replicas_immediately(run: Run) -> None:
    run.distribution.publish(weights(1), run.replicas)
    assert all(len(replica.arrived) == 1 for replica in run.replicas)


class Refusing:
    """The receiving end of a replica whose sources are lost."""

    copy = None

    async def fetch(self, _: PublishedWeights) -> HostWeights:
        raise SourceLost("the source has ended")


def test_a_worker_reports_a_lost_replica_and_fails_with_a_lost_trainer(run: Run) -> None:
    run.publish(1)
    from_trainer = run.replicas[0].arrived[0]
    run.load(run.replicas[0])
    from_replica = run.replicas[TRAINER_READERS].arrived[0]
    unread: list[int] = []
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._engine, worker._receiver = SimpleNamespace(report_unread=unread.append), Refusing()
    asyncio.run(worker._load(from_replica))
    assert unread == [1]
    with pytest.raises(SourceLost):
        asyncio.run(worker._load(from_trainer))
