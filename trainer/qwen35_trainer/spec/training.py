"""The whole spec of a training."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.accelerator import Accelerator
from qwen35_trainer.spec.algorithm import Algorithm
from qwen35_trainer.spec.asynchrony import Async
from qwen35_trainer.spec.base import Section
from qwen35_trainer.spec.checkpoint import Checkpoint
from qwen35_trainer.spec.data import Data
from qwen35_trainer.spec.evaluation import Evaluation
from qwen35_trainer.spec.failure import FailurePolicy
from qwen35_trainer.spec.model import Model
from qwen35_trainer.spec.pods import Pods
from qwen35_trainer.spec.rewards import Reward
from qwen35_trainer.spec.rollout import Rollout
from qwen35_trainer.spec.tracking import Tracking
from qwen35_trainer.spec.train import Train
from qwen35_trainer.spec.weights import Weights

Mode = Literal["FullyAsync", "Colocated", "SFT"]


class TrainingSpec(Section):
    """What a training is: the `spec` of a Qwen35Training.

    Parsing checks each field; `qwen35_trainer.spec.checks.check` checks how they fit together.
    """

    mode: Mode = Field(
        "FullyAsync",
        description="FullyAsync generates while it trains, Colocated takes turns on the same devices, SFT only "
        "trains. FullyAsync is the fastest within a bounded staleness. verl: the choice of main program.",
    )
    suspend: bool = Field(
        False,
        description="Checkpoint, then release all nodes until this is false again. Off: a new training starts. "
        "verl: none.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Seed of data order, sampling and initial weights. 0 by convention. "
        "verl: data.seed, actor_rollout_ref.rollout.seed.",
    )
    accelerator: Accelerator = Field(
        Accelerator(), description="The devices of a node. 8 NVIDIA GPUs by default. verl: trainer.device."
    )
    model: Model = Field(description="The model that is trained. No default. verl: actor_rollout_ref.model.")
    data: Data = Field(description="The prompts. No default. verl: data.")
    rewards: tuple[Reward, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="How responses are scored; at least one unless mode is SFT, then none. Empty by default. "
        "verl: reward.",
    )
    evaluation: Evaluation = Field(
        Evaluation(),
        description="When validation prompts are evaluated. Before and after by default. verl: trainer.test_freq.",
    )
    algorithm: Algorithm = Field(Algorithm(), description="From rewards to the loss. GRPO by default. verl: algorithm.")
    rollout: Rollout | None = Field(
        None,
        description="The pool that generates; required unless mode is SFT, then absent. No default, so that its size "
        "is a choice. verl: actor_rollout_ref.rollout.",
    )
    train: Train = Field(
        Train(),
        description="The pool that updates the weights. One FSDP node by default. verl: actor_rollout_ref.actor.",
    )
    async_: Async = Field(
        Async(),
        alias="async",
        description="How far generation may run ahead. Half a version by default. verl: async_training.",
    )
    weights: Weights = Field(
        Weights(), description="The publication of weights. verl: actor_rollout_ref.rollout.checkpoint_engine."
    )
    checkpoint: Checkpoint = Field(
        Checkpoint(),
        description="What a resumed run starts from. Every 20 updates by default. verl: trainer.save_freq.",
    )
    tracking: Tracking = Field(Tracking(), description="Metric sinks. TensorBoard by default. verl: trainer.logger.")
    pods: Pods = Field(Pods(), description="The pods of a cluster. As the profile has them by default. verl: none.")
    failurePolicy: FailurePolicy = Field(
        FailurePolicy(), description="What follows a failed attempt. 5 restarts by default. verl: none."
    )
    ttlSecondsAfterFinished: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Seconds after its end at which the training's child objects are deleted. By default they stay. "
        "verl: none.",
    )
    activeDeadlineSeconds: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Seconds that the training may run over all attempts; then it fails. By default no limit. "
        "verl: none.",
    )

    @property
    def world_size(self) -> int:
        """Devices of the train pool."""
        return self.train.nodes * self.accelerator.perNode

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks of the dense layers."""
        cut = self.train.parallelism
        return self.world_size // (cut.tensor * cut.pipeline * cut.context)

    @property
    def expert_data_parallel(self) -> int:
        """Data-parallel ranks of the experts."""
        cut = self.train.parallelism
        return self.world_size // (cut.expertTensor * cut.expert * cut.pipeline)

    @property
    def samples_per_update(self) -> int:
        """Sequences of one optimizer step; SFT has one per prompt."""
        return self.train.batch.promptsPerUpdate * (1 if self.mode == "SFT" else self.algorithm.groupSize)

    @property
    def rollout_replicas(self) -> int:
        """Replicas of the rollout pool at its present size, the lane's not counted; 0 without a pool."""
        return 0 if self.rollout is None else self.replicas_on(self.rollout.nodes)

    def replicas_on(self, nodes: int) -> int:
        """Replicas of the rollout pool, the lane's not counted, when it has so many nodes."""
        assert self.rollout is not None
        pool = nodes - (self.rollout.lane.nodes if self.rollout.lane else 0)
        return pool * self.accelerator.perNode // self.rollout.tensorParallel

    @property
    def lane_replicas(self) -> int:
        """Replicas of the straggler lane; 0 without one."""
        lane = self.rollout.lane if self.rollout is not None else None
        return 0 if lane is None else lane.nodes * self.accelerator.perNode // lane.tensorParallel

    @property
    def groups_per_batch(self) -> int:
        """P of the staleness rule: prompt groups in one batch."""
        return self.train.batch.promptsPerUpdate * self.async_.requireBatches

    @property
    def batches_per_version(self) -> int:
        """K of the staleness rule: batches between two publications."""
        return self.async_.updatesPerSync

    @property
    def effective_async(self) -> Async:
        """The knobs as the loop uses them: outside FullyAsync, and at threshold 0, nothing runs ahead."""
        if self.mode != "FullyAsync":
            synchronous = {"stalenessThreshold": 0.0, "maxVersionLag": 0, "onMissedDeadline": "Wait"}
            alone = {"adaptiveDispatch": False, "partialRollout": False}
            return self.async_.model_copy(update=synchronous | alone)
        if self.async_.stalenessThreshold == 0:
            return self.async_.model_copy(update={"partialRollout": False})
        return self.async_
