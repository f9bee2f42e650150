"""spec.rollout: the pool that generates."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.accelerator import MAX_NODES
from qwen35_trainer.spec.base import Section

RolloutEngine = Literal["VLLM", "Torch"]


class Lane(Section):
    """Nodes of the rollout pool set aside to finish long sequences faster."""

    nodes: int = Field(
        ge=1,
        le=MAX_NODES,
        description="Nodes of the pool that form the lane; fewer than rollout.nodes. No default. verl: none.",
    )
    tensorParallel: int = Field(
        ge=1,
        le=1024,
        description="Devices per replica of the lane; more than rollout.tensorParallel, or it is no faster. No "
        "default. verl: none.",
    )
    afterTokens: int = Field(
        ge=1,
        le=1_048_576,
        description="Response tokens after which a sequence moves to the lane. No default: it depends on the lengths "
        "observed. verl: none.",
    )


class Autoscale(Section):
    """When the pool grows and shrinks between minNodes and maxNodes, one step at a time."""

    growAbove: float = Field(
        0.3,
        gt=0,
        le=1,
        description="Idle share of the train pool above which the rollout pool grows. 0.3 is a train pool that waits "
        "a third of its time. verl: none.",
    )
    shrinkAbove: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Idle share of the rollout pool above which it shrinks. 0.5, above growAbove, so that the two do "
        "not chase each other. verl: none.",
    )
    stabilizationSeconds: int = Field(
        600,
        ge=1,
        le=86_400,
        description="Seconds after a change in which there is no other. 600 covers the start of a node and some "
        "updates. verl: none.",
    )


class Rollout(Section):
    """The engines that answer the prompts."""

    engine: RolloutEngine = Field(
        "Torch",
        description="Torch, which is part of the trainer, or VLLM, which this release cannot run yet. Torch runs everywhere. "
        "verl: actor_rollout_ref.rollout.name.",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=MAX_NODES,
        description="Nodes of the pool; may change while running. 1 is the least. verl: rollout.nnodes.",
    )
    minNodes: int | None = Field(
        None,
        ge=1,
        le=MAX_NODES,
        description="Fewest nodes to go on with and to scale down to. By default nodes. verl: none.",
    )
    maxNodes: int | None = Field(
        None, ge=1, le=MAX_NODES, description="Most nodes to scale up to. By default nodes. verl: none."
    )
    autoscale: Autoscale | None = Field(
        None,
        description="Sizes the pool by the idle shares that the training reports; nodes is then its first size. None "
        "by default: nodes decides. verl: none.",
    )
    tensorParallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices per replica. 1 suits a model that fits one device. "
        "verl: actor_rollout_ref.rollout.tensor_model_parallel_size.",
    )
    memoryFraction: float = Field(
        0.6,
        gt=0,
        le=1,
        description="Share of device memory for weights and KV cache. 0.6 as in the published recipes. "
        "verl: actor_rollout_ref.rollout.gpu_memory_utilization.",
    )
    maxSequences: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Sequences that a replica decodes at once (slots). 256 as in verl; lower it when memory is short. "
        "verl: actor_rollout_ref.rollout.max_num_seqs.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        le=10,
        description="Sampling temperature. 1 samples from the policy that is trained. "
        "verl: actor_rollout_ref.rollout.temperature.",
    )
    topP: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; 1 is off. 1 keeps sampler and trainer alike. "
        "verl: actor_rollout_ref.rollout.top_p.",
    )
    topK: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Sample among the k likeliest tokens; 0 is off. 0 keeps sampler and trainer alike. "
        "verl: actor_rollout_ref.rollout.top_k.",
    )
    lane: Lane | None = Field(
        None,
        description="A lane for stragglers, made of the pool's own nodes. None by default: it pays only with long "
        "tails. verl: none.",
    )
