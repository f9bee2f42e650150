"""spec.rollout: the pool that generates responses."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.accelerator import MAX_NODES
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.vllm import VLLMSpec

RolloutEngineName = Literal["VLLM", "Torch"]

MAX_VLLM_TOP_K = 512
"""Maximum of topK with the engine VLLM, which returns topK log-probs for each token. prime-rl has the same limit
(PrimeIntellect-ai/prime-rl#3431)."""
MIN_VLLM_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a request has a lower one above 0 (`_MAX_TEMP` in its sampling_params.py)."""


class StragglerLaneSpec(Section):
    """Nodes of the rollout pool that are reserved for finishing long sequences faster."""

    nodes: int = Field(
        ge=1,
        le=MAX_NODES,
        description="Nodes of the pool that form the straggler lane; fewer than rollout.nodes and rollout.minNodes. Their "
        "number does not change with the size of the pool. No default. verl: none.",
    )
    tensorParallel: int = Field(
        ge=1,
        le=1024,
        description="Devices per replica of the straggler lane; more than rollout.tensorParallel, otherwise it is not"
        " faster. With VLLM, a number that divides the model's heads. With Torch, "
        "which has one device per replica, a multiple of its threads, and only with profile CPU. No default. verl: none.",
    )
    afterTokens: int = Field(
        ge=1,
        le=1_048_576,
        description="Response tokens after which a sequence may move to the straggler lane, fewer than data.maxResponseTokens. It moves if it is expected "
        "to gain more time there than its second prefill costs. No default, because it depends on the lengths of your "
        "responses. verl: none.",
    )


class AutoscaleSpec(Section):
    """Limits at which the rollout pool grows and shrinks between minNodes and maxNodes, one step at a time."""

    growAboveTrainIdle: float = Field(
        0.3,
        gt=0,
        le=1,
        description="Idle share of the train pool above which the rollout pool grows. Default 0.3: a train pool that "
        "waits for batches almost a third of its time. verl: none.",
    )
    shrinkAboveRolloutIdle: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Idle share of the rollout pool above which it shrinks. Default 0.5, above growAboveTrainIdle, so"
        " that the pool does not oscillate. verl: none.",
    )
    stabilizationSeconds: int = Field(
        600,
        ge=1,
        le=86_400,
        description="Minimum time between two changes, in seconds. Default 600, which covers the start of a node and "
        "several updates. verl: none.",
    )


class RolloutSpec(Section):
    """The pool of replicas that generate responses."""

    engine: RolloutEngineName = Field(
        "Torch",
        description="Inference engine: Torch, which is part of the trainer and made for small models, or VLLM, which "
        "must be installed and generates in BF16. Default Torch, which runs everywhere. verl: "
        "actor_rollout_ref.rollout.name.",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=MAX_NODES,
        description="Nodes of the pool; can change while the training runs. Default 1. verl: rollout.nnodes.",
    )
    minNodes: int | None = Field(
        None,
        ge=1,
        le=MAX_NODES,
        description="Minimum number of nodes that the training continues with, and the lower limit of autoscaling. "
        "Default: nodes. verl: none.",
    )
    maxNodes: int | None = Field(
        None, ge=1, le=MAX_NODES, description="Upper limit of autoscaling. Default: nodes. verl: none."
    )
    autoscale: AutoscaleSpec | None = Field(
        None,
        description="Change the size of the pool by the idle shares that the training reports; nodes is then the "
        "initial size. Default: none, the size is nodes. verl: none.",
    )
    tensorParallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices per replica: an equal part of a node, or in mode FullyAsync several whole nodes. Default 1, for models that fit "
        "into one device. verl: actor_rollout_ref.rollout.tensor_model_parallel_size.",
    )
    memoryFraction: float = Field(
        0.6,
        gt=0,
        le=1,
        description="Share of device memory for weights and KV cache; with profile CPU, the maximum share of available "
        "memory for the KV cache. Only for VLLM. Default 0.6, as in the published recipes. verl: "
        "actor_rollout_ref.rollout.gpu_memory_utilization.",
    )
    maxSequencesPerReplica: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Maximum number of sequences that a replica decodes concurrently (its slots). Default 256, as in "
        "verl; lower it when memory is short. verl: actor_rollout_ref.rollout.max_num_seqs.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        le=10,
        description="Sampling temperature. Default 1, which samples from the policy that is trained. verl: "
        "actor_rollout_ref.rollout.temperature.",
    )
    topP: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the most likely tokens that together have this probability; 1 disables "
        "it. The trainer computes log-probs over the same tokens. With VLLM it needs topK. Default 1, which samples from the "
        "policy that is trained. verl: actor_rollout_ref.rollout.top_p.",
    )
    topK: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Sample from the k most likely tokens; 0 disables it. The trainer computes log-probs over the same "
        f"tokens. At most {MAX_VLLM_TOP_K} with VLLM. Default 0, which samples from the policy that is trained. verl: "
        "actor_rollout_ref.rollout.top_k.",
    )
    minP: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample only tokens at least this share as likely as the most likely token; 0 disables it. The "
        "trainer computes log-probs over the same tokens. With VLLM it needs topK. Default 0, which samples from the policy that "
        "is trained. verl: none.",
    )
    vllm: VLLMSpec | None = Field(
        None, description="Options of the engine VLLM. Default: those of its fields. verl: none."
    )
    stragglerLane: StragglerLaneSpec | None = Field(
        None,
        description="Reserve nodes of the pool for long sequences. Default: none, because it pays off only with "
        "long-tailed response lengths. verl: none.",
    )
