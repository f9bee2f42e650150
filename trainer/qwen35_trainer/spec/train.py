"""spec.train: the pool that updates the weights."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.spec.accelerator import MAX_NODES
from qwen35_trainer.spec.base import Section
from qwen35_trainer.spec.model import Precision

TrainEngine = Literal["FSDP", "Megatron"]
Schedule = Literal["Constant", "Linear", "Cosine"]
Part = Literal["Vision", "Embeddings", "Router"]
ModuleName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""The large matrices of a decoder layer: attention, Gated DeltaNet, MLP or shared expert."""


class Parallelism(Section):
    """How the model is cut; what is left of the pool is data-parallel."""

    tensor: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share each matrix product. 1 is the least communication. "
        "verl: actor_rollout_ref.actor.megatron.tensor_model_parallel_size.",
    )
    pipeline: int = Field(
        1,
        ge=1,
        le=1024,
        description="Stages that the layers are split into. 1 has no bubble. "
        "verl: actor_rollout_ref.actor.megatron.pipeline_model_parallel_size.",
    )
    context: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share each sequence; divides the heads of every layer. With FSDP this is Ulysses: "
        "each device holds a slice of the tokens, and layers exchange heads for tokens. 1 suits responses of a few "
        "thousand tokens. verl: actor_rollout_ref.actor.ulysses_sequence_parallel_size, "
        "actor_rollout_ref.actor.megatron.context_parallel_size.",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=1024,
        description="Copies of the model that FSDP keeps, each sharded over the pool's other devices (HSDP); FSDP only. 1 "
        "needs the least memory; the number of nodes keeps the gathering of weights within a node. "
        "verl: actor_rollout_ref.actor.fsdp_config.fsdp_size (the devices of one copy).",
    )
    expert: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share the experts of a layer. 1 for dense models. "
        "verl: actor_rollout_ref.actor.megatron.expert_model_parallel_size.",
    )
    expertTensor: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that share each expert's matrix products. 1, since experts are small. "
        "verl: actor_rollout_ref.actor.megatron.expert_tensor_parallel_size.",
    )


class Batch(Section):
    """What one update trains on."""

    promptsPerUpdate: int = Field(
        32,
        ge=1,
        le=65_536,
        description="Prompts (groups) per optimizer step; examples, for SFT. 32 as in the 35B recipe. "
        "verl: actor_rollout_ref.actor.ppo_mini_batch_size.",
    )
    microBatchPerDevice: int = Field(
        1,
        ge=1,
        le=4096,
        description="Sequences per forward and backward pass of a data-parallel rank; ignored when dynamic. 1 needs "
        "the least memory. verl: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu.",
    )
    removePadding: bool = Field(
        False,
        description="Pack the sequences of a micro-batch into one row instead of padding them. The engine first checks "
        "with its own numbers that no layer leaks across boundaries, and refuses to start otherwise. Off, as in most "
        "published recipes. verl: actor_rollout_ref.model.use_remove_padding.",
    )
    dynamic: bool = Field(
        False,
        description="Fill micro-batches by tokens instead of by sequences; padding counts unless it is removed. Off, as "
        "in the published recipes. verl: actor_rollout_ref.actor.use_dynamic_bsz.",
    )
    maxTokensPerDevice: int = Field(
        16_384,
        ge=1,
        le=16_777_216,
        description="Tokens per micro-batch when dynamic; holds the longest prompt and response. 16384 as in verl. "
        "verl: actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
    )


class Optimizer(Section):
    """The optimizer and its learning rate."""

    type: Literal["AdamW", "Muon"] = Field(
        "AdamW",
        description="AdamW, or Muon for matrices with AdamW for everything else. Muon's steps are scaled to the size of "
        "AdamW's: the same learning rate and weight decay do. AdamW, the field's default. "
        "verl: actor_rollout_ref.actor.optim.optimizer.",
    )
    learningRate: float = Field(
        1e-6,
        gt=0,
        le=1,
        description="Peak learning rate. 1e-6 as in the published recipes. verl: actor_rollout_ref.actor.optim.lr.",
    )
    weightDecay: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Decoupled weight decay. 0.1 as in the published recipes. "
        "verl: actor_rollout_ref.actor.optim.weight_decay.",
    )
    decayAll: bool = Field(
        False,
        description="Decay every parameter. Off, which spares parameters of one dimension (weights of norms, biases, "
        "A_log, dt_bias), as Megatron does, and the filters of the short convolutions: 0 means nothing special to them. "
        "verl's FSDP engine decays all. verl: none.",
    )
    beta1: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Decay of the gradient's mean. 0.9, AdamW's own. verl: actor_rollout_ref.actor.optim.betas.",
    )
    beta2: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Decay of the gradient's square. 0.95 as for large language models. "
        "verl: actor_rollout_ref.actor.optim.betas.",
    )
    epsilon: float = Field(
        1e-8,
        gt=0,
        le=1,
        description="Added to the denominator. 1e-8, AdamW's own. "
        "verl: actor_rollout_ref.actor.optim.override_optimizer_config.",
    )
    momentum: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Decay of Muon's mean gradient; Muon only. 0.95, Muon's own. "
        "verl: actor_rollout_ref.actor.optim.override_optimizer_config.",
    )
    gradientClip: float = Field(
        1.0,
        gt=0,
        le=1_000_000,
        description="Greatest global gradient norm. 1 as in the published recipes. "
        "verl: actor_rollout_ref.actor.optim.clip_grad.",
    )
    warmupUpdates: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Updates over which the learning rate rises from 0. 0: at 1e-6 there is little to warm. "
        "verl: actor_rollout_ref.actor.optim.lr_warmup_steps.",
    )
    schedule: Schedule = Field(
        "Constant",
        description="Course of the learning rate after the warm-up. Constant as in the published recipes. "
        "verl: actor_rollout_ref.actor.optim.lr_scheduler_type.",
    )
    minLearningRateRatio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Where Linear and Cosine end, as a share of the peak. 0 is the plain schedule. "
        "verl: actor_rollout_ref.actor.optim.min_lr_ratio.",
    )


class Offload(Section):
    """What rests in host memory while it is not needed."""

    parameters: bool = Field(
        False,
        description="Parameters. With FSDP gradients and optimizer state go with them, and the host makes the step. Off, "
        "since the copies take time. verl: actor_rollout_ref.actor.fsdp_config.offload_policy, "
        "actor_rollout_ref.actor.megatron.param_offload.",
    )
    gradients: bool = Field(
        False,
        description="Gradients. With FSDP they are where the parameters are. Off, since the copies take time. "
        "verl: actor_rollout_ref.actor.megatron.grad_offload.",
    )
    optimizer: bool = Field(
        False,
        description="Optimizer state: on the device only while it makes a step. Off, since the copies take time. "
        "verl: actor_rollout_ref.actor.fsdp_config.optimizer_offload, "
        "actor_rollout_ref.actor.megatron.optimizer_offload.",
    )


class LoRA(Section):
    """Low-rank adapters: the model stays as it is, and a product of two thin matrices is added to each target's."""

    rank: int = Field(
        32,
        ge=1,
        le=1024,
        description="Width of the thin matrices. 32 learns about what full training does in reinforcement learning. "
        "verl: actor_rollout_ref.model.lora_rank.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        le=65_536,
        description="The product is scaled by alpha / rank. 32, a scale of 1 at the default rank. "
        "verl: actor_rollout_ref.model.lora_alpha.",
    )
    targets: tuple[ModuleName, ...] = Field(
        LINEAR_LAYERS,
        strict=False,
        min_length=1,
        max_length=32,
        description="Last names of the linear layers that get an adapter; every one must exist unless this is the "
        "default, all large matrices of the decoder layers. Routed experts have none. "
        "verl: actor_rollout_ref.model.target_modules.",
    )


class Router(Section):
    """Losses on the routers of a mixture of experts, added to the objective; every layer has its own."""

    loadBalancingLoss: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the load-balancing loss of each sequence, averaged over tokens and summed over layers; the loss "
        "is 1 where experts are used alike. 0 as in verl's FSDP recipes; its Megatron recipes have 0.01. "
        "verl: actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff.",
    )
    zLoss: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the squared log of the router's partition function, averaged over tokens and summed over "
        "layers. 0 as in verl's FSDP recipes; its Megatron recipes have 0.001. "
        "verl: actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff.",
    )


class Train(Section):
    """The engine that updates the weights, and its pool."""

    engine: TrainEngine = Field(
        "FSDP",
        description="FSDP (FSDP2) or Megatron. FSDP runs everywhere; Megatron is for large MoE models. "
        "verl: actor_rollout_ref.actor.strategy.",
    )
    nodes: int = Field(1, ge=1, le=MAX_NODES, description="Nodes of the pool. 1 is the least. verl: trainer.nnodes.")
    updates: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Optimizer steps of the run. By default data.epochs decides. verl: trainer.total_training_steps.",
    )
    parallelism: Parallelism = Field(
        Parallelism(),
        description="How the model is cut over the pool. By default it is only data-parallel. "
        "verl: actor_rollout_ref.actor.megatron.",
    )
    batch: Batch = Field(
        Batch(), description="What one update trains on. 32 prompts by default. verl: actor_rollout_ref.actor."
    )
    optimizer: Optimizer = Field(
        Optimizer(), description="Optimizer and schedule. AdamW by default. verl: actor_rollout_ref.actor.optim."
    )
    router: Router = Field(
        Router(),
        description="Losses on the routers of a mixture of experts. None by default. "
        "verl: actor_rollout_ref.actor.megatron.override_transformer_config.",
    )
    offload: Offload = Field(
        Offload(),
        description="What rests in host memory. Nothing by default. verl: actor_rollout_ref.actor.fsdp_config.",
    )
    activationCheckpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, about a third more compute. Off, for "
        "speed. verl: actor_rollout_ref.model.enable_gradient_checkpointing.",
    )
    headPrecision: Precision = Field(
        "BF16",
        description="Number format of the logits, in training and in the Torch rollout engine. BF16 rounds them to "
        "model.precision, as published recipes do; FP32 keeps them whole, which takes rounding of some hundredths of a nat "
        "out of log-probabilities (MiniMax-M1, arXiv:2506.13585). Without an NVIDIA device the output layer's product then "
        "runs in float32. verl: none.",
    )
    collectiveTimeoutSeconds: float = Field(
        600.0,
        gt=0,
        le=604_800,
        description="Longest time for the ranks to find each other, and for each exchange between them, in seconds; a rank "
        "that waits longer ends, and names the exchange. It must cover the difference in time between the fastest and the "
        "slowest rank. The driver does not wait for any step longer than async.stallSeconds: raise both. 600 as in verl. "
        "verl: actor_rollout_ref.nccl_timeout.",
    )
    freeze: tuple[Part, ...] = Field(
        (),
        strict=False,
        max_length=3,
        description="Parts that do not train: Vision (the tower, which never trains on data without pictures), Embeddings (of "
        "tokens, and the output layer), Router (of experts). None by default. verl: actor_rollout_ref.actor.freeze_vision_tower, "
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_freeze.",
    )
    lora: LoRA | None = Field(
        None,
        description="Train low-rank adapters instead of the weights; checkpoints and publications hold the adapters alone. "
        "None by default: all weights train. verl: actor_rollout_ref.model.lora_rank.",
    )
