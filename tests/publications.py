"""Publications for tests: whole tensors from the shards of an engine, and weights as replicas receive them, by the product's own way."""

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from qwen35_trainer.engines.train_engine import TrainEngine
from qwen35_trainer.weights.division import ReplicaShape
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import PublishedWeights, StagedShard, joined
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender

ALONE = RankContext(0, 1, None)


def whole_shards(weights: Iterable[tuple[str, Tensor]]) -> list[WeightShard]:
    """The shards of the only rank, in the types of the tensors."""
    return [WeightShard(name, tuple(tensor.shape), tensor.dtype, 0, tensor.detach()) for name, tensor in weights]


def received(weights: Iterable[tuple[str, Tensor]], version: int, replica: ReplicaShape | None = None) -> HostWeights:
    """The weights as a replica of the same host receives them. replica: for whose ranks they are staged; None: for one rank."""
    sender = SharedMemorySender(
        dataclasses.replace(ALONE, replica=replica or ReplicaShape())
    )  # until the weights are opened, it is the only one that holds them
    return _opened(joined([sender.stage(whole_shards(weights), version, frozenset())], version))


def published_by(engine: TrainEngine) -> dict[str, Tensor]:
    """What an engine publishes, on rank 0; nothing on other ranks. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sender = SharedMemorySender(RankContext(rank, ranks, dist.group.WORLD if ranks > 1 else None))
    shard = sender.stage(engine.shards(), 1, frozenset())
    all_shards: list[StagedShard | None] = [None] * ranks
    dist.all_gather_object(all_shards, shard)
    if rank > 0:
        return {}
    weights = _opened(joined([each for each in all_shards if each is not None], 1))
    return {name: tensor.clone() for name, tensor in weights.items()}


def _opened(publication: PublishedWeights) -> HostWeights:
    assert isinstance(publication.source, SegmentHandle)
    weights = HostWeights.open(publication.manifest, publication.source)
    weights.verify()
    return weights


def same(left: Iterable[tuple[str, Tensor]], right: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether both have the same names in the same order, with the same types and values."""
    pairs = list(zip(left, right, strict=True))
    return all(a[0] == b[0] and a[1].dtype == b[1].dtype and torch.equal(a[1], b[1]) for a, b in pairs)
