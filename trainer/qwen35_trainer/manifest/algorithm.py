"""spec.algorithm: from rewards to the loss."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import FUNCTION, Section

AdvantageType = Literal["GRPO", "DrGRPO", "RLOO", "ReinforcePlusPlus", "GAE", "Function"]
LossType = Literal["PPOClip", "GSPO", "CISPO", "GPG", "Function"]
AggregationName = Literal["TokenMean", "SequenceMeanTokenSum", "SequenceMeanTokenMean", "SequenceMeanTokenSumNorm"]
KLPlacement = Literal["None", "Loss", "Reward"]
KLEstimator = Literal["K1", "K2", "K3"]
CorrectionType = Literal["None", "TokenTIS", "SequenceTIS", "IcePop", "SequenceMask", "DecoupledPPO"]


class LossSpec(Section):
    """The policy loss."""

    type: LossType = Field(
        "PPOClip",
        description="Policy loss: PPOClip clips the ratio per token, GSPO per sequence; CISPO clips the weight; GPG "
        "is the plain policy gradient; Function calls your own. Default PPOClip, the most common one. "
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
    aggregation: AggregationName = Field(
        "TokenMean",
        description="How the losses of tokens are reduced to one number; SequenceMeanTokenSumNorm divides by "
        "maxResponseTokens, and GSPO always averages within sequences. Default TokenMean, which weighs "
        "all tokens equally. verl: actor_rollout_ref.actor.loss_agg_mode.",
    )


class KLSpec(Section):
    """The penalty for moving away from the reference model."""

    placement: KLPlacement = Field(
        "None",
        description="Where the penalty is added: nowhere, to the loss, or to the reward. Default None, which saves "
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


class CorrectionSpec(Section):
    """Correction for tokens that were sampled by older weights or by another implementation of the model."""

    type: CorrectionType = Field(
        "TokenTIS",
        description="Importance weights between sampler and trainer: truncated per token or per sequence (TIS), "
        "masked per token (IcePop) or per sequence (SequenceMask), or log-probabilities recomputed before"
        " the update (DecoupledPPO). Default TokenTIS, which needs no additional forward pass. verl: "
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


class AlgorithmSpec(Section):
    """The reinforcement-learning algorithm."""

    advantage: AdvantageType = Field(
        "GRPO",
        description="Advantage estimator; Function calls your own. Default GRPO, which needs no critic and which the "
        "published recipes use. verl: algorithm.adv_estimator.",
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
        description="Responses sampled for each prompt; together they are a group. Default 8, which gives a usable "
        "group mean at moderate cost. verl: actor_rollout_ref.rollout.n.",
    )
    dynamicSampling: bool = Field(
        False,
        description="Drop groups whose rewards are all equal and generate others instead (DAPO). Default false: such "
        "groups have no gradient and only take up places in the batch. verl: "
        "algorithm.filter_groups.enable.",
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
    def own_functions(self) -> dict[str, str]:
        """The user's functions (`module:name`), each under the path of its field below `spec.algorithm`."""
        functions = {"loss.function": self.loss.function, "advantageFunction": self.advantageFunction}
        return {path: function for path, function in functions.items() if function is not None}
