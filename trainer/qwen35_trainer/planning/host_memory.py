"""The memory of a pod: what its processes hold in the host, and what lies in /dev/shm.

train pod      offloaded state; the published copy of each rank's shard: two versions, of which one is read while the next is
               written (`weights/segment.py`)
rollout pod    each replica holds a whole version while it loads it, with RDMA two, from which others read (`weights/relay.py`)
/dev/shm       Ray's object store: the parts of a version that the ranks of the pod have put there, and a batch; with the transport
               RDMA or Folder only the batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import parameters

Pool = Literal["train", "rollout"]
DEVICE_PROCESS_BYTES = 4 * 2**30
"""Assumed for a process that has imported torch and opened an accelerator, in addition to what is listed here: its libraries, context and pinned
buffers."""
CPU_PROCESS_BYTES = 1.2 * 2**30
"""The same on a CPU: a worker takes 1.3 GB (docs/models.md)."""
BUCKET_BYTES = 256 * 2**20
"""Bytes of a version that a replica fetches at a time, at most: `weights/shard_streams.py`."""
TOKEN_BYTES = 4 + 4 + 1
"""Bytes of a response token of a batch: its id, its log-prob, and whether it trains."""


@dataclass(frozen=True)
class PodMemory:
    """Bytes of a pod of a pool."""

    pool: Pool
    processes: float
    tensors: float
    """Offloaded state of ranks; on a CPU all tensors of ranks and replicas."""
    staging: float
    """Published versions in the memory of processes."""
    shared: float
    """Bytes in /dev/shm; they count towards the pod's memory."""

    @property
    def total(self) -> float:
        """All bytes that count towards the pod's limit."""
        return self.processes + self.tensors + self.staging + self.shared


def version_bytes(shape: ModelSizes, spec: TrainingSpec) -> float:
    """Return the bytes of a published version: bfloat16, or the adapters alone with LoRA."""
    from qwen35_trainer.planning.fsdp_memory import adapter_parameters

    if (lora := spec.train.lora) is not None:
        return 4.0 * adapter_parameters(shape, lora.rank, lora.targets)
    width = 2 if spec.model.precision == "BF16" else 4
    megatron = spec.train.engine == "Megatron"
    return float(width * (parameters.text(shape).total + (0 if megatron else parameters.vision(shape))))


def train_pod(shape: ModelSizes, spec: TrainingSpec, tensors: float) -> PodMemory:
    """Return the memory of a pod of the train pool. tensors: bytes of each rank in the host."""
    devices, version = spec.accelerator.devicesPerNode, version_bytes(shape, spec)
    staged = 0.0 if spec.mode == "SFT" else 2 * version * devices / spec.world_size
    in_store = _uses_object_store(spec)
    batch = _batch_bytes(spec) / spec.train.nodes
    return PodMemory(
        "train",
        devices * _process_bytes(spec),
        devices * tensors,
        0.0 if in_store else staged,
        batch + (staged if in_store else 0.0),
    )


def rollout_pod(shape: ModelSizes, spec: TrainingSpec, tensors: float) -> PodMemory | None:
    """Return the memory of a pod of the rollout pool; None without one. tensors: bytes of each device's process in the host."""
    if spec.rollout is None:
        return None
    devices, version = spec.accelerator.devicesPerNode, version_bytes(shape, spec)
    replicas = max(1.0, devices / spec.rollout.tensorParallel)
    versions = 2 if spec.publication.transport == "RDMA" else 1
    nodes_of_replica = max(1.0, spec.rollout.tensorParallel / devices)
    staged = replicas * versions * version / nodes_of_replica
    shared = replicas * BUCKET_BYTES if _uses_object_store(spec) else 0.0
    return PodMemory(
        "rollout",
        devices * _process_bytes(spec),
        devices * tensors,
        staged,
        shared + _batch_bytes(spec) / spec.rollout.nodes,
    )


def colocated_pod(
    shape: ModelSizes, spec: TrainingSpec, train: PodMemory, rollout: PodMemory, parked: float
) -> PodMemory:
    """Return the memory of a pod whose ranks and replicas take turns. parked: bytes of a rank's tensors between two updates."""
    staging, shared = train.staging + rollout.staging, train.shared + rollout.shared
    if spec.train.nodes == 1 and spec.publication.transport in ("Auto", "SharedMemory"):
        staging, shared = 2 * version_bytes(shape, spec), _batch_bytes(spec)
    tensors = train.tensors + rollout.tensors + spec.accelerator.devicesPerNode * parked
    return PodMemory("train", train.processes + rollout.processes, tensors, staging, shared)


def _process_bytes(spec: TrainingSpec) -> float:
    return CPU_PROCESS_BYTES if spec.accelerator.profile == "CPU" else DEVICE_PROCESS_BYTES


def _uses_object_store(spec: TrainingSpec) -> bool:
    return spec.publication.transport in ("Auto", "ObjectStore")


def _batch_bytes(spec: TrainingSpec) -> float:
    samples = spec.samples_per_update * spec.async_.updatesPerBatch
    return float(samples * (spec.data.maxPromptTokens * 4 + spec.data.maxResponseTokens * TOKEN_BYTES))
