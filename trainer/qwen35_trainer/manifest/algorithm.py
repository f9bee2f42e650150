"""spec.algorithm: the advantage, the policy loss, the KL penalty, and the off-policy correction of
staleness and train-inference mismatch.
"""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import FUNCTION, Section

AdvantageType = Literal[
    "GRPO",
    "DrGRPO",
    "RLOO",
    "OPO",
    "PassAtK",
    "GPG",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "GAE",
    "Function",
]
LossType = Literal["PPOClip", "GSPO", "CISPO", "GPG", "SAPO", "DPPOBinaryTV", "DPPOBinaryKL", "Function"]
AggregationName = Literal["TokenMean", "SequenceMeanTokenSum", "SequenceMeanTokenMean", "SequenceMeanTokenSumNorm"]
KLPlacement = Literal["None", "Loss", "Reward", "LossAndReward"]
KLEstimator = Literal["K1", "K2", "K3"]
CorrectionType = Literal["None", "Recomputed", "TokenTIS", "SequenceTIS", "IcePop", "SequenceMask", "DecoupledPPO"]


class LossSpec(Section):
    """The policy loss."""

    type: LossType = Field(
        "PPOClip",
        description="Policy loss: PPOClip clips the ratio per token, GSPO per sequence; CISPO clips the weight; GPG "
        "is the plain policy gradient; SAPO replaces clipping by a soft gate; DPPOBinaryTV and DPPOBinaryKL mask tokens by a "
        "divergence; Function calls your own. Default PPOClip, the most common one. "
        "verl: actor_rollout_ref.actor.policy_loss.loss_mode.",
    )
    function: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_losses:loss"],
        description="Function that computes the loss of each token, as module:function. Required with type Function "
        "and refused with every other type. verl: register_policy_loss.",
    )
    clipLow: float = Field(
        0.2,
        ge=0,
        le=1,
        description="How far the ratio may fall below 1 before it is clipped; less than 1. Default 0.2, as in PPO. "
        "verl: actor_rollout_ref.actor.clip_ratio_low.",
    )
    clipHigh: float = Field(
        0.28,
        ge=0,
        le=100,
        description="How far the ratio may rise above 1 before it is clipped. Default 0.28: a bound above clipLow "
        "keeps exploration alive (DAPO). verl: actor_rollout_ref.actor.clip_ratio_high.",
    )
    dualClip: float | None = Field(
        3.0,
        gt=1,
        le=1000,
        description="Maximum ratio for tokens with a negative advantage (dual-clip PPO); only for PPOClip, null "
        "disables it. Default 3, as in verl. verl: actor_rollout_ref.actor.clip_ratio_c.",
    )
    tauPositive: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Temperature of SAPO's gate for tokens with a positive advantage; a higher one bounds the step more. No other "
        "loss uses it. Default 1, as in the paper. verl: actor_rollout_ref.actor.tau_pos.",
    )
    tauNegative: float = Field(
        1.05,
        gt=0,
        le=1000,
        description="Temperature of SAPO's gate for tokens with a negative advantage. No other loss uses it. Default 1.05, as in "
        "the paper: above tauPositive, because such tokens destabilise training more. verl: actor_rollout_ref.actor.tau_neg.",
    )
    maxDivergence: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Divergence of a token from the policy that sampled it, above which DPPOBinaryTV (a difference of "
        "probabilities) and DPPOBinaryKL (nats) mask it; refused with every other loss. Default: 0.15 for TV and 0.05 "
        "for KL, as in the paper. verl: actor_rollout_ref.actor.clip_ratio.",
    )
    aggregation: AggregationName = Field(
        "TokenMean",
        description="How the losses of tokens are reduced to one number; SequenceMeanTokenSumNorm divides by "
        "maxResponseTokens, and GSPO always averages within sequences. Default TokenMean, which weighs "
        "all tokens equally. verl: actor_rollout_ref.actor.loss_agg_mode.",
    )


class AdaptiveKLSpec(Section):
    """A coefficient of the penalty that grows and falls so that the divergence stays near a target."""

    target: float = Field(
        0.1,
        gt=0,
        le=1000,
        description="Mean divergence from the reference model to hold, in nats per token. Default 0.1, as in verl. verl: "
        "algorithm.kl_ctrl.target_kl.",
    )
    horizon: int = Field(
        10_000,
        ge=1,
        le=1_000_000_000,
        description="Number of samples in which the coefficient changes by at most 20 %. Default 10,000, as in verl. verl: "
        "algorithm.kl_ctrl.horizon.",
    )


class KLSpec(Section):
    """The penalty for moving away from the reference model."""

    placement: KLPlacement = Field(
        "None",
        description="Where the penalty is added: nowhere, to the loss, to the reward, or to both. Default None, which saves "
        "the memory and the forward pass of the reference model. verl: "
        "actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward.",
    )
    coefficient: float = Field(
        0.001,
        ge=0,
        le=100,
        description="Weight of the penalty. Default 0.001, as in verl. verl: actor_rollout_ref.actor.kl_loss_coef, "
        "algorithm.kl_ctrl.kl_coef.",
    )
    estimator: KLEstimator = Field(
        "K3",
        description="Estimator of the divergence per token (Schulman). Default K3, which is never negative and has "
        "low variance. verl: actor_rollout_ref.actor.kl_loss_type, algorithm.kl_penalty.",
    )
    rewardCoefficient: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Weight of the penalty in the reward, where placement LossAndReward needs another one than in the loss; refused "
        "with every other placement. Default: coefficient. verl: algorithm.kl_ctrl.kl_coef.",
    )
    rewardEstimator: KLEstimator | None = Field(
        None,
        description="Estimator of the penalty in the reward, where placement LossAndReward needs another one than in the loss; refused "
        "with every other placement. Default: estimator. verl: algorithm.kl_penalty.",
    )
    adaptive: AdaptiveKLSpec | None = Field(
        None,
        description="Adapts the coefficient in the reward, or with placement Loss the one in the loss, to a target divergence. "
        "Default: none, the coefficients are fixed, as in the published recipes. verl: algorithm.kl_ctrl.type.",
    )

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is subtracted from the reward."""
        return self.placement in ("Reward", "LossAndReward")

    @property
    def of_reward(self) -> tuple[float, KLEstimator]:
        """Coefficient and estimator of the penalty that is subtracted from the reward."""
        coefficient = self.coefficient if self.rewardCoefficient is None else self.rewardCoefficient
        return coefficient, self.rewardEstimator or self.estimator

    @property
    def first_adapted(self) -> float | None:
        """Initial value of the coefficient that `adaptive` changes during the run; None if no coefficient changes."""
        if self.adaptive is None or self.placement == "None":
            return None
        return self.of_reward[0] if self.in_reward else self.coefficient


class CorrectionSpec(Section):
    """Correction for tokens that were sampled by older weights or by another implementation of the model."""

    type: CorrectionType = Field(
        "TokenTIS",
        description="Importance weights between sampler and trainer: truncated per token or per sequence (TIS), "
        "masked per token (IcePop) or per sequence (SequenceMask). DecoupledPPO truncates per token and clips around the weights "
        "at the batch's start; Recomputed does the latter without weights; None clips around the sampler. "
        "Default TokenTIS, which needs no additional forward pass. verl: "
        "algorithm.rollout_correction.rollout_is, .rollout_rs, .bypass_mode.",
    )
    cap: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Maximum weight: TIS truncates larger weights to it, and the masks drop them. Default 2, as in "
        "verl. verl: algorithm.rollout_correction.rollout_is_threshold.",
    )
    floor: float = Field(
        0.5,
        ge=0,
        le=1000,
        description="Minimum weight that IcePop and SequenceMask keep; below cap. Default 0.5, the inverse of the "
        "default cap. verl: algorithm.rollout_correction.rollout_rs_threshold.",
    )


class OverlongPenaltySpec(Section):
    """A penalty for responses that come close to the length limit (DAPO's soft overlong punishment)."""

    bufferTokens: int = Field(
        ge=1,
        le=10_000_000,
        description="Number of tokens before data.maxResponseTokens in which the penalty grows from 0 to its full weight. No "
        "default; DAPO uses a fifth of the limit. verl: reward.reward_kwargs.overlong_buffer_cfg.len.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Penalty of a response that reaches the limit, in units of the reward. Default 1, as in DAPO. verl: "
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor.",
    )


class AlgorithmSpec(Section):
    """The reinforcement-learning algorithm."""

    advantage: AdvantageType = Field(
        "GRPO",
        description="Advantage estimator: compares the samples of a prompt (GRPO, DrGRPO, RLOO, OPO, GPG), rewards only the best of "
        "them (PassAtK), compares with a greedy response (ReMax), or whitens over the batch (ReinforcePlusPlus, ReinforcePlusPlusBaseline); Function calls your own. "
        "Default GRPO, which needs no critic and which the published recipes use. verl: algorithm.adv_estimator.",
    )
    advantageFunction: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_advantages:advantage"],
        description="Function that computes the advantage of each token, as module:function. Required with advantage "
        "Function and refused with every other advantage. verl: register_adv_est.",
    )
    groupSize: int = Field(
        8,
        ge=1,
        le=1024,
        description="Responses sampled for each prompt; together they are a group. With ReMax, the last one is greedy and does not "
        "train. Default 8, which gives a usable group mean at moderate cost. verl: actor_rollout_ref.rollout.n.",
    )
    dynamicSampling: bool = Field(
        False,
        description="Drop groups whose rewards are all equal and generate others instead (DAPO). Default false: such "
        "groups have no gradient and only take up places in the batch. verl: "
        "algorithm.filter_groups.enable.",
    )
    overlongPenalty: OverlongPenaltySpec | None = Field(
        None,
        description="Lowers the rewards of responses close to the length limit; held-out responses are not penalised. Default: none, "
        "as in the published recipes. verl: reward.reward_kwargs.overlong_buffer_cfg.enable.",
    )
    maskTruncated: bool = Field(
        False,
        description="Exclude responses that reached the length limit from the loss; their rewards still count in the "
        "statistics of their group. Default false, as in verl. verl: none.",
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description="Discount factor per token. Default 1: no discount. verl: algorithm.gamma."
    )
    lambda_: float = Field(
        1.0,
        alias="lambda",
        ge=0,
        le=1,
        description="Trade-off between bias and variance in GAE. Default 1, which has no bias. verl: algorithm.lam.",
    )
    entropyCoefficient: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the entropy bonus. Default 0, as in the published recipes. verl: "
        "actor_rollout_ref.actor.entropy_coeff.",
    )
    reportEntropy: bool = Field(
        True,
        description="Compute the policy's entropy for the metrics even where entropyCoefficient is 0. Default true, "
        "because a collapse shows there first; false saves one pass over the logits. verl: "
        "actor_rollout_ref.actor.calculate_entropy.",
    )
    loss: LossSpec = Field(
        LossSpec(), description="The policy loss. Default: PPOClip. verl: actor_rollout_ref.actor.policy_loss."
    )
    kl: KLSpec = Field(
        KLSpec(), description="Penalty against the reference model. Default: no penalty. verl: algorithm.kl_ctrl."
    )
    correction: CorrectionSpec = Field(
        CorrectionSpec(),
        description="Off-policy correction. Enabled by default, because the default mode is off-policy. verl: "
        "algorithm.rollout_correction.",
    )

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether the last response of each group is generated greedily, and its reward is
        the baseline of the group's other responses (ReMax).
        """
        return self.advantage == "ReMax"

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's functions: path of the field below `spec.algorithm` → the function that
        the field names, as `module:name`.
        """
        functions = {"loss.function": self.loss.function, "advantageFunction": self.advantageFunction}
        return {path: function for path, function in functions.items() if function is not None}
