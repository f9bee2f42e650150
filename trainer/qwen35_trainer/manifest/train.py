"""spec.train: the pool that updates the weights."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.manifest.accelerator import MAX_NODES
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.megatron import SettingName, SettingValue
from qwen35_trainer.manifest.model import Precision

TrainEngineName = Literal["FSDP", "Megatron"]
Schedule = Literal["Constant", "Linear", "Cosine"]
FrozenPart = Literal["Vision", "Embeddings", "Router"]
ModuleName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""Names of a decoder layer's linear layers with large matrices: attention, Gated DeltaNet, MLP or shared expert."""


class ParallelismSpec(Section):
    """Division of the model and of sequences over the devices of the train pool. All further devices are data-parallel."""

    tensor: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share each matrix product (tensor parallelism). Default 1, which needs the minimum of "
        "communication. verl: actor_rollout_ref.actor.megatron.tensor_model_parallel_size.",
    )
    pipeline: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of pipeline stages that the layers are divided into. Default 1, which has no bubble. "
        "verl: actor_rollout_ref.actor.megatron.pipeline_model_parallel_size.",
    )
    virtualPipeline: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of virtual stages of each pipeline stage; Megatron only. With several, stages wait less for "
        "each other, but hold more activations and exchange more. It must divide the model's layers. Default 1, which "
        "needs the minimum of communication and memory. verl: "
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size.",
    )
    context: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share each sequence (context parallelism); divides the heads of every layer. With "
        "FSDP this is Ulysses: each device holds a slice of the tokens, and layers exchange heads for "
        "tokens. Default 1, for responses of a few thousand tokens. verl: "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size, "
        "actor_rollout_ref.actor.megatron.context_parallel_size.",
    )
    copies: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of copies of the model that FSDP keeps, each sharded over its share of the devices "
        "(HSDP); FSDP only. Default 1, which needs the smallest amount of memory; set it to the number of nodes to "
        "gather weights within each node. verl: actor_rollout_ref.actor.fsdp_config.fsdp_size (the "
        "devices of one copy).",
    )
    expert: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share the experts of a layer (expert parallelism): each has some of them, and tokens travel "
        "to the experts that they use. It must divide the number of experts. With FSDP, a device then gathers only its "
        "own experts of a layer; the other devices shard them. Default 1, for dense models. "
        "verl: actor_rollout_ref.actor.megatron.expert_model_parallel_size.",
    )
    expertTensor: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share the matrix products of each expert. Default 1, because experts are small. "
        "verl: actor_rollout_ref.actor.megatron.expert_tensor_parallel_size.",
    )


class BatchSpec(Section):
    """The prompts of one update, and how their sequences are divided into micro-batches."""

    promptsPerUpdate: int = Field(
        32,
        ge=1,
        le=65_536,
        description="Prompts per update (optimizer step); in SFT, examples. Default 32, as in the 35B recipe. verl: "
        "actor_rollout_ref.actor.ppo_mini_batch_size.",
    )
    microBatchSequences: int = Field(
        1,
        ge=1,
        le=4096,
        description="Sequences per forward and backward pass of a data-parallel rank; ignored with "
        "dynamicMicroBatches. Default 1, which needs the smallest amount of memory. verl: "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu.",
    )
    removePadding: bool = Field(
        False,
        description="Pack the sequences of a micro-batch into one row instead of padding them. The engine verifies at"
        " start that no layer leaks across sequence boundaries and refuses to run otherwise. Default "
        "false, as in most published recipes. verl: actor_rollout_ref.model.use_remove_padding.",
    )
    sharePrompts: bool = Field(
        False,
        description="Compute the prompt of a group once for all of its samples in a micro-batch, instead of once for each sample "
        "(prefix grouping, arXiv:2506.05433); FSDP only, and only with removePadding and micro-batches of several samples. "
        "Loss and gradients stay the same. Whole groups are then divided over ranks, so that ranks have less equal numbers "
        "of tokens. The engine verifies at start that responses with a shared prompt are computed like separate sequences. "
        "Default false, because most published recipes do not use it. verl: actor_rollout_ref.actor.use_prefix_grouper.",
    )
    dynamicMicroBatches: bool = Field(
        False,
        description="Fill micro-batches up to maxTokensPerDevice instead of a number of sequences; padding counts "
        "unless it is removed. Default false, as in the published recipes. verl: "
        "actor_rollout_ref.actor.use_dynamic_bsz.",
    )
    maxTokensPerDevice: int = Field(
        16_384,
        ge=1,
        le=16_777_216,
        description="Maximum tokens of a micro-batch per device, with dynamicMicroBatches; must hold the longest "
        "prompt and response. Default 16384, as in verl. verl: "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
    )


class OptimizerSpec(Section):
    """The optimizer and the schedule of its learning rate."""

    type: Literal["AdamW", "Muon"] = Field(
        "AdamW",
        description="AdamW for everything, or Muon for matrices and AdamW for the rest. Muon's updates are scaled to "
        "the size of AdamW's, so that the same learning rate and weight decay apply. Default AdamW, the "
        "most common one. verl: actor_rollout_ref.actor.optim.optimizer.",
    )
    learningRate: float = Field(
        1e-6,
        gt=0,
        le=1,
        description="Peak learning rate. Default 1e-6, as in the published recipes. verl: "
        "actor_rollout_ref.actor.optim.lr.",
    )
    weightDecay: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Decoupled weight decay. Default 0.1, as in the published recipes. verl: "
        "actor_rollout_ref.actor.optim.weight_decay.",
    )
    decayAll: bool = Field(
        False,
        description="Apply weight decay to every parameter. Default false: one-dimensional parameters (norm weights, "
        "biases, A_log, dt_bias) are exempt, as in Megatron, and so are the filters of the short "
        "convolutions, because 0 has no special meaning for them. verl's FSDP engine decays all. verl: "
        "none.",
    )
    beta1: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Decay rate of the first moment. Default 0.9, that of AdamW. verl: "
        "actor_rollout_ref.actor.optim.betas.",
    )
    beta2: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Decay rate of the second moment. Default 0.95, usual for large language models. verl: "
        "actor_rollout_ref.actor.optim.betas.",
    )
    epsilon: float = Field(
        1e-8,
        gt=0,
        le=1,
        description="Term added to the denominator. Default 1e-8, that of AdamW. verl: "
        "actor_rollout_ref.actor.optim.override_optimizer_config.",
    )
    momentum: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Decay rate of Muon's mean gradient; only for Muon. Default 0.95, that of Muon. verl: "
        "actor_rollout_ref.actor.optim.override_optimizer_config.",
    )
    gradientClip: float = Field(
        1.0,
        gt=0,
        le=1_000_000,
        description="Maximum global gradient norm; larger gradients are scaled down to it. Default 1, as in the "
        "published recipes. verl: actor_rollout_ref.actor.optim.clip_grad.",
    )
    warmupUpdates: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Updates over which the learning rate rises from 0. Default 0, because a peak of 1e-6 needs no "
        "warm-up. verl: actor_rollout_ref.actor.optim.lr_warmup_steps.",
    )
    schedule: Schedule = Field(
        "Constant",
        description="Schedule of the learning rate after the warm-up. Default Constant, as in the published recipes. "
        "verl: actor_rollout_ref.actor.optim.lr_scheduler_type.",
    )
    minLearningRateRatio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Final learning rate of Linear and Cosine, as a fraction of the peak. Default 0. verl: "
        "actor_rollout_ref.actor.optim.min_lr_ratio.",
    )


class OffloadSpec(Section):
    """Data that is kept in host memory while the devices do not need it."""

    parameters: bool = Field(
        False,
        description="Offload parameters. With FSDP, gradients and optimizer state are offloaded with them, and the "
        "optimizer step runs on the host. With Megatron, the reference model is on the device only while it scores, and "
        "the trained one at all other times. Default false, because the copies take time. verl: "
        "actor_rollout_ref.actor.fsdp_config.offload_policy, "
        "actor_rollout_ref.actor.megatron.param_offload.",
    )
    gradients: bool = Field(
        False,
        description="Offload gradients. With FSDP they are where the parameters are. With Megatron their buffers take "
        "memory only during an update, so that scoring has more. Default false, because the copies take time. verl: "
        "actor_rollout_ref.actor.megatron.grad_offload.",
    )
    optimizer: bool = Field(
        False,
        description="Offload optimizer state; it is on the device only during the optimizer step. Default false, "
        "because the copies take time. verl: actor_rollout_ref.actor.fsdp_config.optimizer_offload, "
        "actor_rollout_ref.actor.megatron.optimizer_offload.",
    )
    activations: bool = Field(
        False,
        description="Offload activations: the input of each layer is in host memory from its forward pass to its backward pass, "
        "which starts with it. FSDP only, and only with activationCheckpointing. Default false, because the copies take time. verl: "
        "actor_rollout_ref.model.enable_activation_offload.",
    )


class LoRASpec(Section):
    """Low-rank adapters: the weights stay fixed, and the product of two thin matrices is added to each target."""

    rank: int = Field(
        32,
        ge=1,
        le=1024,
        description="Rank of the adapters. Default 32, which learns about as much as full training in reinforcement "
        "learning. verl: actor_rollout_ref.model.lora_rank.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        le=65_536,
        description="Scale of the adapters: their product is multiplied by alpha / rank. Default 32, a factor of 1 at"
        " the default rank. verl: actor_rollout_ref.model.lora_alpha.",
    )
    targets: tuple[ModuleName, ...] = Field(
        LINEAR_LAYERS,
        strict=False,
        min_length=1,
        max_length=32,
        description="Names (last parts) of the linear layers that get adapters; each must exist, unless this is the "
        "default. Default: all large matrices of the decoder layers. Routed experts get none. verl: "
        "actor_rollout_ref.model.target_modules.",
    )


class RouterSpec(Section):
    """Auxiliary losses of the routers in a mixture of experts, summed over layers, and router replay."""

    loadBalancingLoss: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the load-balancing loss, computed per sequence, averaged over tokens and summed over "
        "layers; the loss is 1 when all experts are used equally. Default 0, as in verl's FSDP recipes; "
        "its Megatron recipes set 0.01. verl: "
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff, "
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_load_balancing_type.",
    )
    zLoss: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the squared logarithm of the router's partition function, averaged over tokens and "
        "summed over layers. Default 0, as in verl's FSDP recipes; its Megatron recipes use 0.001. verl: "
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff.",
    )
    replay: bool = Field(
        False,
        description="Compute each token with the experts that the rollout chose for it, instead of those that the trainer's "
        "routers would choose after rounding differently (R3, arXiv:2510.11370); not in mode SFT. The choices take layers × "
        "experts per token × 1 byte for each token, twice that with more than 256 experts. Default false, as in verl. verl: "
        "actor_rollout_ref.actor.router_replay.mode, actor_rollout_ref.rollout.enable_rollout_routing_replay.",
    )


class MultiTokenPredictionSpec(Section):
    """Training of the head of a published model that predicts one more token (`mtp.*`), for SFT with Megatron."""

    lossWeight: float = Field(
        0.1,
        gt=0,
        le=100,
        description="Weight of the head's loss, the mean negative log-likelihood of the trained tokens, in the loss of the update. "
        "Default 0.1, as in Megatron and in verl's recipes. verl: actor_rollout_ref.model.mtp.mtp_loss_scaling_factor.",
    )
    detached: bool = Field(
        False,
        description="The head's loss trains only the head: all other parameters, including embedding and output layer, "
        "learn as without it. Default false, as in Megatron: the loss trains all parameters. verl: "
        "actor_rollout_ref.model.mtp.detach_encoder.",
    )


class TrainSpec(Section):
    """The pool that updates the weights, and its engine."""

    engine: TrainEngineName = Field(
        "FSDP",
        description="Training engine: FSDP (FSDP2), or Megatron for large mixtures of experts. Default FSDP, which "
        "runs everywhere. verl: actor_rollout_ref.actor.strategy.",
    )
    nodes: int = Field(1, ge=1, le=MAX_NODES, description="Nodes of the pool. Default 1. verl: trainer.nnodes.")
    updates: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Number of updates (optimizer steps) of the run. Default: as many as data.epochs makes. verl: "
        "trainer.total_training_steps.",
    )
    parallelism: ParallelismSpec = Field(
        ParallelismSpec(),
        description="How the model is divided over the devices. Default: only data-parallel. verl: "
        "actor_rollout_ref.actor.megatron.",
    )
    batch: BatchSpec = Field(
        BatchSpec(),
        description="The prompts of one update and their micro-batches. Default: 32 prompts. verl: "
        "actor_rollout_ref.actor.",
    )
    optimizer: OptimizerSpec = Field(
        OptimizerSpec(),
        description="Optimizer and learning-rate schedule. Default: AdamW. verl: actor_rollout_ref.actor.optim.",
    )
    router: RouterSpec = Field(
        RouterSpec(),
        description="Auxiliary losses and replay of the routers in a mixture of experts. Default: neither. verl: "
        "actor_rollout_ref.actor.megatron.override_transformer_config.",
    )
    offload: OffloadSpec = Field(
        OffloadSpec(),
        description="What is kept in host memory. Default: nothing. verl: actor_rollout_ref.actor.fsdp_config.",
    )
    activationCheckpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass, which needs less memory and about a third more "
        "compute. Default false, for speed. verl: actor_rollout_ref.model.enable_gradient_checkpointing.",
    )
    reshardAfterForward: bool = Field(
        True,
        description="Free the gathered parameters of a layer after its forward pass and gather them again for its backward pass; "
        "FSDP only. false gathers them once and keeps them until the backward pass, which takes the memory of the "
        "whole model in model.precision. Default true, which fits larger models. verl: "
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward.",
    )
    headPrecision: Precision = Field(
        "BF16",
        description="Number format of the logits, in training and in the Torch rollout engine. BF16 rounds them to "
        "model.precision, as published recipes do; FP32 does not, which removes rounding errors of some "
        "hundredths of a nat from log-probabilities (MiniMax-M1, arXiv:2506.13585). Without an NVIDIA "
        "device, FP32 computes the output layer in float32. Default BF16. verl: none.",
    )
    collectiveTimeoutSeconds: float = Field(
        600.0,
        gt=0,
        le=604_800,
        description="Maximum time, in seconds, for the ranks to find each other and for each collective operation; a "
        "rank that waits longer ends and names the operation. It must cover the difference in time "
        "between the fastest and the slowest rank. The driver waits for no step longer than "
        "async.stallSeconds, so raise both. Default 600, as in verl. verl: "
        "actor_rollout_ref.nccl_timeout.",
    )
    freeze: tuple[FrozenPart, ...] = Field(
        (),
        strict=False,
        max_length=3,
        description="Parts of the model that do not train: Vision (the vision tower, which never trains on data "
        "without pictures), Embeddings (of tokens, and the output layer), Router (of the experts). "
        "Default: none. verl: actor_rollout_ref.actor.freeze_vision_tower, "
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_freeze.",
    )
    lora: LoRASpec | None = Field(
        None,
        description="Train low-rank adapters instead of the weights; checkpoints and publications then hold only the "
        "adapters. Default: none, all weights train. verl: actor_rollout_ref.model.lora_rank.",
    )
    multiTokenPrediction: MultiTokenPredictionSpec | None = Field(
        None,
        description="Load the head for multi-token prediction from the model's folder and train it, so that checkpoints and exports "
        "have it; SFT with Megatron only. Default: none, exports have the head of the model's folder, unchanged. verl: "
        "actor_rollout_ref.model.mtp.enable_train.",
    )
    overrideTransformerConfig: dict[SettingName, SettingValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Further settings of megatron-core, under the names of its class TransformerConfig, such as "
        "bias_activation_fusion; Megatron only. Names and types are checked against the installed version when the training "
        "starts; settings that follow from other fields or from the model's folder are refused. Default: none, the engine's. "
        "verl: actor_rollout_ref.actor.megatron.override_transformer_config.",
    )
