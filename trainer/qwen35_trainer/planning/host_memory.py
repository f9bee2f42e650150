"""The memory of a pod: what its processes hold in host memory, and what is in /dev/shm.

train pod      offloaded state; two versions of each rank's shard of the published weights: one is read while the next
               one is written (`weights/segment.py`), and with RDMA a third one while a replica is late; a copy of the
               shard if versions are published as changes; what a save of a checkpoint takes at least
rollout pod    a whole version for each replica while the replica loads it; two versions with RDMA, because other replicas
               read them (`weights/relay.py`), and if versions are published as changes to the one before
Colocated      one pod has both; with LoRA, also the base weights of each sleeping replica of vLLM, which moves them to host memory
/dev/shm       Ray's object store: a batch. With router replay, the experts of a batch in train pods, and those of all sequences
               in the pipeline in rollout pods. With the transports Auto and ObjectStore, a train pod also has the published
               shards there, instead of in its processes, and a rollout pod has one bucket (a part of a version) for
               each replica. With Folder, the bucket is in the replica's process
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest import RolloutSpec
from qwen35_trainer.manifest.publication import DEFAULT_BUCKET_MEBIBYTES
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning import parameters

Pool = Literal["train", "rollout"]
DEVICE_PROCESS_BYTES = 4 * 2**30
"""Assumed bytes of a process that has imported torch and opened an accelerator: its libraries, context and pinned
buffers. Tensors are counted separately."""
CPU_PROCESS_BYTES = 1.2 * 2**30
"""Assumed bytes of a process that has imported torch on a CPU, without tensors: a worker takes 1.3 GB (docs/models.md)."""
SAVED_TOGETHER_BYTES = 2 * 2**29
"""Maximum bytes of the tensors of two files of a checkpoint, of which the Megatron engine gathers one while it writes the other, if
no single tensor is larger: `engines/megatron/checkpoint.py`."""
CHANGED_SHARE = 0.1
"""Assumed size of the changes between two versions, as a share of a version. Measured: 1.6 % at a learning rate of 1e-6, and
8.3 % at 1e-5 (docs/benchmarks.md)."""
TOKEN_BYTES = 4 + 4 + 1
"""Bytes of a response token in a batch: its id, its log-prob, and whether it trains."""


@dataclass(frozen=True)
class PodMemory:
    """The memory that a pod of one pool needs, in bytes."""

    pool: Pool
    processes: float
    """Assumed bytes of the processes themselves, without tensors."""
    tensors: float
    """Offloaded state of train ranks, and what a save takes; on a CPU, all tensors of ranks and replicas."""
    staging: float
    """Published versions in the memory of processes."""
    shared: float
    """Bytes in /dev/shm; they count towards the pod's memory."""

    @property
    def total(self) -> float:
        """Sum of all parts: the bytes that count towards the pod's memory limit."""
        return self.processes + self.tensors + self.staging + self.shared


def version_bytes(shape: ModelSizes, spec: TrainingSpec) -> float:
    """Return the bytes of a published version: all weights in the model's precision, or only
    the adapters in float32 with LoRA.
    """
    from qwen35_trainer.planning.fsdp_memory import adapter_parameters

    if (lora := spec.train.lora) is not None:
        return 4.0 * adapter_parameters(shape, lora.rank, lora.targets)
    width = 2 if spec.model.precision == "BF16" else 4
    return float(width * (parameters.text(shape).total + parameters.vision(shape)))


def train_pod(shape: ModelSizes, spec: TrainingSpec, tensors: float) -> PodMemory:
    """Return the memory of a pod of the train pool. tensors: bytes of tensors that one rank has in host memory."""
    devices, version = spec.accelerator.devicesPerNode, version_bytes(shape, spec)
    shard = 0.0 if spec.mode == "SFT" else version * devices / spec.world_size  # of all ranks of the pod
    staged = shard * (3 if spec.publication.transport == "RDMA" and spec.mode == "FullyAsync" else 2)
    before, changes = 0.0, 0.0
    if _publishes_changes(spec):
        before, changes = shard, shard * min(1.0, CHANGED_SHARE * (spec.publication.wholeEvery - 1))
    in_store = _uses_object_store(spec)
    parallel = spec.train.parallelism
    ranks_of_share = parallel.context * (parallel.tensor * parallel.pipeline if spec.train.engine == "Megatron" else 1)
    # Ranks that compute a share together read the same choices, each node once.
    nodes = min(spec.train.nodes, spec.world_size / ranks_of_share)
    batch = _batch_bytes(spec) / spec.train.nodes + _choices_bytes(shape, spec) / nodes
    buckets = devices * _beyond_default(_bucket_bytes(spec, version))
    return PodMemory(
        "train",
        devices * _process_bytes(spec),
        devices * tensors + save_bytes(shape, spec),
        before + (buckets if in_store else buckets + staged),
        batch + (staged + changes if in_store else 0.0),
    )


def save_bytes(shape: ModelSizes, spec: TrainingSpec) -> float:
    """Return the bytes that the ranks of a train pod need in host memory to save a checkpoint, in addition to their
    offloaded state; 0 with FSDP.

    A rank of the Megatron engine has float32 values of some tensors (`SAVED_TOGETHER_BYTES`), or of one that is larger: each rank those of
    its experts of a layer, and one rank of a stage a table. The FSDP engine copies its state only if there is room, and
    otherwise less than this at a time (`engines/checkpoint_writer.py`), which is part of the memory of a process.
    """
    if spec.train.engine != "Megatron":
        return 0.0
    cut, devices = spec.train.parallelism, spec.accelerator.devicesPerNode
    of_rank = 12 * parameters.text(shape).total / spec.world_size
    experts = 4 * 2 * shape.hidden * shape.expert_intermediate * shape.experts / cut.expert
    table = 4 * parameters.embedding(shape).total
    tables = 1 if shape.tied or cut.pipeline == 1 else 2
    window = max(min(SAVED_TOGETHER_BYTES, of_rank), experts)
    return devices * window + tables * max(0.0, table - window)


def rollout_pod(shape: ModelSizes, spec: TrainingSpec, tensors: float) -> PodMemory | None:
    """Return the memory of a pod of the rollout pool; None if the training has no rollout pool.

    tensors: bytes of tensors that a replica has in host memory for each of its devices; 0 on accelerators.
    """
    if spec.rollout is None:
        return None
    devices, version = spec.accelerator.devicesPerNode, version_bytes(shape, spec)
    replicas = max(1.0, devices / spec.rollout.tensorParallel)
    versions = 2 if spec.publication.transport == "RDMA" or _publishes_changes(spec) else 1
    # Each node of a replica that is larger than a node has a whole version, and the first one the records of all tokens.
    staged, bucket = replicas * versions * version, _bucket_bytes(spec, version)
    in_store = _uses_object_store(spec)
    return PodMemory(
        "rollout",
        devices * _process_bytes(spec),
        devices * tensors + replicas * _recording_bytes(shape, spec, spec.rollout),
        staged if in_store else staged + replicas * _beyond_default(bucket),
        (replicas * bucket if in_store else 0.0)
        + (_batch_bytes(spec) + _batches_in_pipeline(spec) * _choices_bytes(shape, spec)) / spec.rollout.nodes,
    )


def colocated_pod(
    shape: ModelSizes, spec: TrainingSpec, train: PodMemory, rollout: PodMemory, parked: float
) -> PodMemory:
    """Return the memory of a pod in mode Colocated, where train ranks and replicas take turns on the devices.

    train, rollout: the memory of the ranks and of the replicas in the pod. parked: bytes of a rank's tensors that are
    moved from its device to host memory while the replicas generate. They do not save a checkpoint meanwhile.
    """
    staging, shared = train.staging + rollout.staging, train.shared + rollout.shared
    if spec.train.nodes == 1 and spec.publication.transport in ("Auto", "SharedMemory"):
        # The ranks read the experts in the object store to which the replicas have written them.
        choices = _batches_in_pipeline(spec) * _choices_bytes(shape, spec)
        staging, shared = 2 * version_bytes(shape, spec), _batch_bytes(spec) + choices
    more = max(0.0, spec.accelerator.devicesPerNode * parked - save_bytes(shape, spec))
    tensors = train.tensors + rollout.tensors + more + _base_weights_of_sleepers(shape, spec)
    return PodMemory("train", train.processes + rollout.processes, tensors, staging, shared)


def _base_weights_of_sleepers(shape: ModelSizes, spec: TrainingSpec) -> float:
    """Return the bytes that the sleeping replicas of a pod keep in host memory.

    A replica of vLLM that gets adapters cannot get its base weights from a publication when it wakes. On an accelerator, vLLM
    copies them to pinned host memory while the replica sleeps. Without adapters they are discarded.
    """
    rollout = spec.rollout
    on_cpu = spec.accelerator.profile == "CPU"
    if spec.train.lora is None or rollout is None or rollout.engine != "VLLM" or on_cpu:
        return 0.0
    replicas = max(1.0, spec.accelerator.devicesPerNode / rollout.tensorParallel)
    width = 2 if spec.model.precision == "BF16" else 4
    return replicas * width * (parameters.text(shape).total + parameters.vision(shape))


def _publishes_changes(spec: TrainingSpec) -> bool:
    """Return whether versions are published as changes to the version before, which trainer and replicas then keep."""
    return spec.publication.wholeEvery > 1 and spec.publication.transport in ("Auto", "ObjectStore", "Folder")


def _process_bytes(spec: TrainingSpec) -> float:
    return CPU_PROCESS_BYTES if spec.accelerator.profile == "CPU" else DEVICE_PROCESS_BYTES


def _bucket_bytes(spec: TrainingSpec, version: float) -> float:
    """Return the maximum bytes of a version that a rank stores, and a replica fetches, at a time: a bucket, which has
    parts of one rank only.

    version: bytes of a version. SFT, and the transports SharedMemory and RDMA, have no buckets.
    """
    if spec.mode == "SFT" or spec.publication.transport in ("SharedMemory", "RDMA"):
        return 0.0
    return min(spec.publication.bucketMebibytes * 2.0**20, version / spec.world_size)


def _beyond_default(bucket: float) -> float:
    """Return by how many bytes a bucket in a process exceeds one of the default size, which is part of the memory of a
    process.
    """
    return max(0.0, bucket - DEFAULT_BUCKET_MEBIBYTES * 2.0**20)


def _uses_object_store(spec: TrainingSpec) -> bool:
    return spec.publication.transport in ("Auto", "ObjectStore")


def _batch_bytes(spec: TrainingSpec) -> float:
    samples = spec.samples_per_update * spec.async_.updatesPerBatch
    return float(samples * (spec.data.maxPromptTokens * 4 + spec.data.maxResponseTokens * TOKEN_BYTES))


def _choices_bytes(shape: ModelSizes, spec: TrainingSpec) -> float:
    """Return the maximum bytes of the experts that replicas have recorded for a batch; 0 without router replay."""
    if not spec.train.router.replay:
        return 0.0
    sequences = spec.samples_per_update * spec.async_.updatesPerBatch
    return float(sequences * _sequence_choices(shape, spec))


def _recording_bytes(shape: ModelSizes, spec: TrainingSpec, rollout: RolloutSpec) -> float:
    """Return the bytes in which a replica records the experts of its running sequences; 0 without router replay.

    vLLM has a table for the blocks of its cache, and a record for each sequence (`rollout/vllm_choices.py`).
    """
    copies = 2 if rollout.engine == "VLLM" else 1
    return float(spec.train.router.replay * copies * rollout.maxSequencesPerReplica * _sequence_choices(shape, spec))


def _sequence_choices(shape: ModelSizes, spec: TrainingSpec) -> int:
    """Return the maximum bytes of the experts of a sequence."""
    width = 1 if shape.experts <= 1 << 8 else 2
    tokens = spec.data.maxPromptTokens + spec.data.maxResponseTokens
    return tokens * shape.layers * shape.experts_per_token * width


def _batches_in_pipeline(spec: TrainingSpec) -> float:
    """Return the maximum number of batches whose groups are generated, wait or train at the same time."""
    return 2.0 + spec.async_.stalenessThreshold if spec.mode == "FullyAsync" else 1.0
