"""The spec of a training: all its sections, and the sizes that follow from them."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.accelerator import AcceleratorSpec
from qwen35_trainer.manifest.algorithm import AlgorithmSpec
from qwen35_trainer.manifest.asynchrony import AsyncSpec
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.checkpoint import CheckpointSpec
from qwen35_trainer.manifest.data import DataSpec
from qwen35_trainer.manifest.evaluation import EvaluationSpec
from qwen35_trainer.manifest.failure import FailurePolicySpec
from qwen35_trainer.manifest.model import ModelSpec
from qwen35_trainer.manifest.pods import PodsSpec
from qwen35_trainer.manifest.publication import PublicationSpec
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.manifest.rollout import RolloutSpec
from qwen35_trainer.manifest.tracking import TrackingSpec
from qwen35_trainer.manifest.train import TrainSpec

Mode = Literal["FullyAsync", "Colocated", "SFT"]


class TrainingSpec(Section):
    """The desired state of a training: the `spec` of a Qwen35Training.

    Parsing checks each field; `qwen35_trainer.manifest.checks.check` checks how they fit together.
    """

    mode: Mode = Field(
        "FullyAsync",
        description="FullyAsync generates while it trains, Colocated alternates between both on the same devices, and"
        " SFT only trains. Default FullyAsync, the fastest with a bounded staleness. verl: the choice of "
        "main program.",
    )
    suspend: bool = Field(
        False,
        description="Save a checkpoint and release all nodes until this is false again. Default false: a new training"
        " starts. verl: none.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Seed of the data order, of sampling and of random initial weights. Default 0. verl: data.seed, "
        "actor_rollout_ref.rollout.seed.",
    )
    accelerator: AcceleratorSpec = Field(
        AcceleratorSpec(), description="The devices of a node. Default: 8 NVIDIA GPUs. verl: trainer.device."
    )
    model: ModelSpec = Field(description="The model to train. No default. verl: actor_rollout_ref.model.")
    data: DataSpec = Field(description="The prompts. No default. verl: data.")
    rewards: tuple[RewardSpec, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Reward functions that score responses. At least one is required, except in mode SFT, which has "
        "none. Default: empty. verl: reward.",
    )
    evaluation: EvaluationSpec = Field(
        EvaluationSpec(),
        description="When held-out prompts are evaluated. Default: before and after training. verl: trainer.test_freq.",
    )
    algorithm: AlgorithmSpec = Field(
        AlgorithmSpec(), description="The algorithm, from rewards to the loss. Default: GRPO. verl: algorithm."
    )
    rollout: RolloutSpec | None = Field(
        None,
        description="The pool that generates responses. Required, except in mode SFT, which has none. No default, "
        "because its size is a choice. verl: actor_rollout_ref.rollout.",
    )
    train: TrainSpec = Field(
        TrainSpec(),
        description="The pool that updates the weights. Default: one node with FSDP. verl: actor_rollout_ref.actor.",
    )
    async_: AsyncSpec = Field(
        AsyncSpec(),
        alias="async",
        description="How far generation may run ahead of training. Default: half a version. verl: async_training.",
    )
    publication: PublicationSpec = Field(
        PublicationSpec(),
        description="How versions of the weights reach the replicas. verl: "
        "actor_rollout_ref.rollout.checkpoint_engine.",
    )
    checkpoint: CheckpointSpec = Field(
        CheckpointSpec(),
        description="When checkpoints are saved; a resumed run starts from the newest. Default: every 20 updates. "
        "verl: trainer.save_freq.",
    )
    tracking: TrackingSpec = Field(
        TrackingSpec(), description="Metric sinks. Default: TensorBoard. verl: trainer.logger."
    )
    pods: PodsSpec = Field(PodsSpec(), description="Additions to the pods of the cluster. Default: none. verl: none.")
    failurePolicy: FailurePolicySpec = Field(
        FailurePolicySpec(), description="What follows a failed attempt. Default: up to 5 restarts. verl: none."
    )
    disruptionBudget: Literal["None", "HeadAndTrain"] = Field(
        "None",
        description="Which pods a drain of their node must not evict while the training has pods. HeadAndTrain: the pods of the pools "
        "head and train, whose loss ends the attempt, by a PodDisruptionBudget; every drain of their nodes waits until the "
        "training ends, is suspended, or has None. Nodes that fail, and preemption by the scheduler, do not wait. "
        "Default: None, because an attempt whose pods are evicted continues from the last checkpoint, and a long training would "
        "block the upgrades of nodes. verl: none.",
    )
    cleanupSecondsAfterFinished: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Seconds after the end of the training at which its child objects are deleted. Default: they are "
        "kept. verl: none.",
    )
    activeDeadlineSeconds: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Maximum time that the training may be active, in seconds over all attempts; then it fails. Time in "
        "which a queue holds an attempt back does not count. "
        "Default: no limit. verl: none.",
    )

    @property
    def world_size(self) -> int:
        """Number of devices of the train pool."""
        return self.train.nodes * self.accelerator.devicesPerNode

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks of the dense layers: train devices / (tensor × pipeline × context)."""
        cut = self.train.parallelism
        return self.world_size // (cut.tensor * cut.pipeline * cut.context)

    @property
    def expert_data_parallel(self) -> int:
        """Number of data-parallel ranks of the experts: train devices / (expertTensor × expert × pipeline)."""
        cut = self.train.parallelism
        return self.world_size // (cut.expertTensor * cut.expert * cut.pipeline)

    @property
    def samples_per_update(self) -> int:
        """Number of sequences that train in one update; in SFT, one for each prompt."""
        return self.train.batch.promptsPerUpdate * (1 if self.mode == "SFT" else self.algorithm.groupSize)

    @property
    def rollout_replicas(self) -> int:
        """Number of replicas on rollout.nodes nodes; 0 without a rollout pool.

        Replicas of the straggler lane, which are reserved for long sequences, are not counted.
        """
        return 0 if self.rollout is None else self.replicas_on(self.rollout.nodes)

    def replicas_on(self, nodes: int) -> int:
        """Return the number of replicas of a rollout pool with `nodes` nodes.

        Replicas of the straggler lane, which are reserved for long sequences, are not counted.
        """
        assert self.rollout is not None
        return (nodes - self.lane_nodes) * self.accelerator.devicesPerNode // self.rollout.tensorParallel

    @property
    def lane_nodes(self) -> int:
        """Number of nodes of the rollout pool that are reserved for long sequences (the straggler lane); 0 without a lane."""
        lane = self.rollout.stragglerLane if self.rollout is not None else None
        return 0 if lane is None else lane.nodes

    @property
    def min_rollout_nodes(self) -> int:
        """Minimum number of nodes of the rollout pool: rollout.minNodes, or rollout.nodes if minNodes is not set.

        The result is at least one more than the number of nodes that are reserved for long sequences (the straggler
        lane), because a training of an earlier release may have a minNodes that leaves no node for other sequences.
        """
        assert self.rollout is not None
        return max(self.rollout.minNodes or self.rollout.nodes, self.lane_nodes + 1)

    @property
    def lane_replicas(self) -> int:
        """Number of replicas that are reserved for long sequences (the straggler lane); 0 without a lane."""
        lane = self.rollout.stragglerLane if self.rollout is not None else None
        return 0 if lane is None else lane.nodes * self.accelerator.devicesPerNode // lane.tensorParallel

    def replica_devices(self, *, lane: bool) -> int:
        """Return the number of devices of a rollout replica.

        lane: whether the replica belongs to the straggler lane, which is reserved for long sequences.
        """
        assert self.rollout is not None
        of_lane = self.rollout.stragglerLane if lane else None
        return self.rollout.tensorParallel if of_lane is None else of_lane.tensorParallel

    def nodes_of_replica(self, *, lane: bool) -> int:
        """Return the number of nodes of a rollout replica: 1, unless it is larger than a node. lane: as for `replica_devices`.

        A Torch replica is one process, whose threads count as devices in the straggler lane, so it has one node.
        """
        assert self.rollout is not None
        if self.rollout.engine == "Torch":
            return 1
        return -(-self.replica_devices(lane=lane) // self.accelerator.devicesPerNode)

    def devices_on_node(self, *, lane: bool) -> int:
        """Return the number of devices that a rollout replica has on each of its nodes. lane: as for `replica_devices`."""
        return self.replica_devices(lane=lane) // self.nodes_of_replica(lane=lane)

    @property
    def rollout_devices(self) -> int:
        """Number of devices of all replicas of the rollout pool, with those reserved for long sequences; 0 without a pool."""
        if self.rollout is None:
            return 0
        pool = self.rollout_replicas * self.replica_devices(lane=False)
        return pool + self.lane_replicas * self.replica_devices(lane=True)

    @property
    def groups_per_batch(self) -> int:
        """Number of groups in one batch: P in docs/design/staleness.md. A group is the set of samples for one prompt."""
        return self.train.batch.promptsPerUpdate * self.async_.updatesPerBatch

    @property
    def batches_per_version(self) -> int:
        """Number of batches between two publications of weights: K in docs/design/staleness.md."""
        return self.async_.batchesPerPublication

    @property
    def effective_async(self) -> AsyncSpec:
        """The values of `spec.async` that take effect.

        In modes other than FullyAsync, both bounds of staleness are 0, onMissedDeadline is Wait, and adaptiveDispatch
        and partialRollout are false. With stalenessThreshold 0 no sequence is unfinished at a publication, so
        partialRollout is false too.
        """
        if self.mode != "FullyAsync":
            synchronous = {"stalenessThreshold": 0.0, "maxVersionLag": 0, "onMissedDeadline": "Wait"}
            alone = {"adaptiveDispatch": False, "partialRollout": False}
            return self.async_.model_copy(update=synchronous | alone)
        if self.async_.stalenessThreshold == 0:
            return self.async_.model_copy(update={"partialRollout": False})
        return self.async_
