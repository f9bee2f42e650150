"""One rank of the train pool: an actor that joins the process group and holds a train engine."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from numpy.typing import NDArray

from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import TrainEngine, UpdateMetrics
from qwen35_trainer.manifest import RolloutSpec, TrainingSpec
from qwen35_trainer.manifest.publication import TransportName
from qwen35_trainer.runtime import stored_choices
from qwen35_trainer.runtime.machine import BACKENDS, device
from qwen35_trainer.runtime.process import Process, own_address, starting
from qwen35_trainer.runtime.site import WorkerLocation
from qwen35_trainer.weights.division import ReplicaShape
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.published import StagedShard
from qwen35_trainer.weights.transports import RankContext, WeightSender, sender

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

SAVING = "saving"
"""Ray's concurrency group of the method `TrainWorker.saved`, so that the method can wait while the rank trains.

Without this group, a checkpoint would be reported as complete only after the batch that trains at the same time.
"""


class TrainWorker(Process):
    """The Ray actor of one train rank.

    Call `location` on all workers and give each a rank. Then call `listen` on rank 0 and `join` on all ranks. Call all
    other methods on all ranks in the same order.

    In logs and errors, a worker is `train-worker-N` until it joins, where N is the number with which it was started.
    From then on it is `train-R`, where R is its rank.

    The actor needs a concurrency group named `SAVING`, so that `saved` waits and returns while a batch trains.
    pictures: whether any batch has pictures. transport: the transport that brings published weights to the replicas.
    publications: folder of the run's publications, for the transport Folder; None with any other transport.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        number: int,
        *,
        vocabulary: int,
        pictures: bool,
        base: Path,
        threads: int,
        logs: Path,
        transport: TransportName,
        publications: Path | None,
    ) -> None:
        super().__init__(f"train-worker-{number}", logs, threads, final=False)
        self._spec = spec
        self._vocabulary, self._pictures, self._base = vocabulary, pictures, base
        self._timeout = timedelta(seconds=spec.train.collectiveTimeoutSeconds)
        self._store: TCPStore | None = None
        self._engine: TrainEngine | None = None
        self._transport: TransportName = transport
        self._publications = publications
        self._sender: WeightSender | None = None

    def location(self) -> WorkerLocation:
        """Return the node and the device of this worker.

        The driver derives the ranks from the locations of all workers (`site.rank_order`).
        """
        context = ray.get_runtime_context()
        assigned = [index for indices in context.get_accelerator_ids().values() for index in indices]
        return WorkerLocation(socket.gethostname(), context.get_node_id(), ",".join(assigned))

    def listen(self, ranks: int) -> tuple[str, int]:
        """Open the rendezvous of the process group on a free port. Returns its host and its port.

        ranks: number of ranks that will join. The driver passes host and port to the other ranks, so MASTER_ADDR and
        MASTER_PORT are not used.
        """
        from torch.distributed import TCPStore  # the driver imports this module without torch

        host = own_address()
        self._store = TCPStore(host, 0, ranks, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return host, self._store.port

    @starting()
    def join(self, rank: int, ranks: int, host: str, port: int) -> None:
        """Enter the process group as `rank` of `ranks`, then build the engine.

        host, port: as returned by `listen` of rank 0.
        """
        import torch  # as above
        import torch.distributed as dist

        from qwen35_trainer.engines import accelerator_libraries
        from qwen35_trainer.engines.create_engine import create
        from qwen35_trainer.engines.origin import origin

        worker, location = self.name, self.location()
        self.rename(f"train-{rank}")
        logger.info(
            "%s is rank %d of %d, on host %s, device %s", worker, rank, ranks, location.host, location.device or "none"
        )
        if self._spec.algorithm.own_functions:
            sys.path.insert(0, str(self._base))  # so that modules of users are found in the manifest's folder
        profile = self._spec.accelerator.profile
        accelerator_libraries.load(self._spec)
        own = device(profile)
        store = self._store or dist.TCPStore(host, port, ranks, is_master=False, timeout=self._timeout)
        dist.init_process_group(BACKENDS[profile], store=store, rank=rank, world_size=ranks, timeout=self._timeout)
        torch.manual_seed(self._spec.seed + rank)
        length = self._spec.data.maxPromptTokens + self._spec.data.maxResponseTokens
        source = origin(
            self._spec.model, seed=self._spec.seed, vocabulary=self._vocabulary, max_length=length, base=self._base
        )
        self._engine = create(source, self._spec, own, pictures=self._pictures)
        group = dist.new_group(backend="gloo", timeout=self._timeout) if ranks > 1 else None
        replica = replica_shape(self._spec.rollout)
        publication = self._spec.publication
        bucket_bytes = publication.bucketMebibytes * 2**20
        context = RankContext(rank, ranks, group, self._publications, publication.wholeEvery, replica, bucket_bytes)
        self._sender = sender(self._transport, context)

    def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        # A rank that waits longer would count as stalled.
        seconds = min(stored_choices.READ_SECONDS, self._spec.async_.stallSeconds / 4)
        return self._ready_engine.train(stored_choices.with_fetched(batch, seconds), learning_rates)

    def negative_log_likelihood(self, batch: TrainBatch) -> float:
        return self._ready_engine.negative_log_likelihood(batch)

    def log_probs(self, batch: TrainBatch) -> NDArray[np.float32]:
        return self._ready_engine.log_probs(batch)

    def publication(self, version: int, needed: frozenset[int]) -> StagedShard:
        """Copy this rank's part of the weights as `version`. All ranks must call this together.

        needed: earlier versions that replicas have or may still fetch. The copy is complete when this method returns,
        so replicas can read it while the optimizer changes the weights.
        """
        assert self._sender is not None, "join comes first"
        return self._sender.stage(self._ready_engine.shards(), version, needed)

    def save(self, folder: Path) -> None:
        """Copy the state of this rank, and begin to write the copy into `folder` as its part of a checkpoint.

        `saved` waits until the files are written.
        """
        self._ready_engine.save(folder)

    @ray.method(concurrency_group=SAVING)
    def saved(self) -> None:
        """Wait until the part of the checkpoint from the last `save` is written. Raises the error if writing failed."""
        self._ready_engine.saved(wait=True)

    def restore(self, folder: Path) -> None:
        self._ready_engine.restore(folder)

    def sleep(self) -> MemoryChange:
        """Move everything that this rank holds on its device to host memory.

        Returns the device memory before and after.
        """
        return self._ready_engine.sleep()

    def wake(self) -> None:
        self._ready_engine.wake()

    @property
    def _ready_engine(self) -> TrainEngine:
        assert self._engine is not None, "join comes first"
        return self._engine


def replica_shape(rollout: RolloutSpec | None) -> ReplicaShape:
    """Return the settings that decide how the weights are divided among the ranks of a replica.

    rollout: settings of the rollout pool; None: the run has no rollout pool.
    """
    if rollout is None:
        return ReplicaShape()
    return ReplicaShape(rollout.tensorParallel, rollout.vllm is not None and rollout.vllm.expert_parallel)
