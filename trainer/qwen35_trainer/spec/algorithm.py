"""spec.algorithm: from rewards to the loss."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.base import FUNCTION, Section

AdvantageType = Literal["GRPO", "DrGRPO", "RLOO", "ReinforcePlusPlus", "GAE", "Function"]
LossType = Literal["PPOClip", "GSPO", "CISPO", "GPG", "Function"]
Aggregation = Literal["TokenMean", "SequenceMeanTokenSum", "SequenceMeanTokenMean", "SequenceMeanTokenSumNorm"]
KLPlacement = Literal["None", "Loss", "Reward"]
KLEstimator = Literal["K1", "K2", "K3"]
CorrectionType = Literal["None", "TokenTIS", "SequenceTIS", "IcePop", "SequenceMask", "DecoupledPPO"]


class Loss(Section):
    """The policy loss."""

    type: LossType = Field(
        "PPOClip",
        description="Policy loss: clipped ratio per token (PPOClip) or per sequence (GSPO), clipped weight (CISPO), "
        "plain policy gradient (GPG), your own (Function). PPOClip is the field's default. "
        "verl: actor_rollout_ref.actor.policy_loss.loss_mode.",
    )
    function: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_losses:loss"],
        description="module:function that computes the loss of each token, for type Function and only there. No default. "
        "verl: register_policy_loss.",
    )
    clipLow: float = Field(
        0.2,
        ge=0,
        le=1,
        description="How far the ratio may fall below 1; less than 1. 0.2 as in PPO. "
        "verl: actor_rollout_ref.actor.clip_ratio_low.",
    )
    clipHigh: float = Field(
        0.28,
        ge=0,
        le=100,
        description="How far the ratio may rise above 1. 0.28, above clipLow, keeps exploration alive (DAPO). "
        "verl: actor_rollout_ref.actor.clip_ratio_high.",
    )
    dualClip: float | None = Field(
        3.0,
        gt=1,
        le=1000,
        description="Bound of the ratio for negative advantages (dual-clip PPO), PPOClip only; null is none. 3 as in "
        "verl. verl: actor_rollout_ref.actor.clip_ratio_c.",
    )
    aggregation: Aggregation = Field(
        "TokenMean",
        description="How token losses become one number; the Norm form divides by maxResponseTokens. TokenMean "
        "weighs all tokens alike. GSPO always averages within sequences. "
        "verl: actor_rollout_ref.actor.loss_agg_mode.",
    )


class KL(Section):
    """The penalty for leaving the reference model."""

    placement: KLPlacement = Field(
        "None",
        description="Where the penalty enters: nowhere, the loss, or the reward. Off saves the reference model's "
        "memory and forward pass. verl: actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward.",
    )
    coefficient: float = Field(
        0.001,
        ge=0,
        le=100,
        description="Weight of the penalty. 0.001 as in verl. "
        "verl: actor_rollout_ref.actor.kl_loss_coef, algorithm.kl_ctrl.kl_coef.",
    )
    estimator: KLEstimator = Field(
        "K3",
        description="Estimator of the divergence per token (Schulman). K3 is never negative and of low variance. "
        "verl: actor_rollout_ref.actor.kl_loss_type, algorithm.kl_penalty.",
    )


class Correction(Section):
    """What makes up for tokens that older weights, or another kernel, sampled."""

    type: CorrectionType = Field(
        "TokenTIS",
        description="Importance weights between sampler and trainer: truncated per token or sequence (TIS), masked "
        "per token (IcePop) or sequence, or recomputed proximal log-probs (DecoupledPPO). TokenTIS costs no extra "
        "forward pass. verl: algorithm.rollout_correction.rollout_is, .rollout_rs, .bypass_mode.",
    )
    cap: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Greatest weight; above it TIS truncates and the masks drop. 2 as in verl. "
        "verl: algorithm.rollout_correction.rollout_is_threshold.",
    )
    floor: float = Field(
        0.5,
        ge=0,
        le=1000,
        description="Least weight that IcePop and SequenceMask keep; below cap. 0.5 mirrors a cap of 2. "
        "verl: algorithm.rollout_correction.rollout_rs_threshold.",
    )


class Algorithm(Section):
    """The reinforcement-learning algorithm."""

    advantage: AdvantageType = Field(
        "GRPO",
        description="Advantage estimator; Function is your own. GRPO needs no critic and is what the published recipes use. "
        "verl: algorithm.adv_estimator.",
    )
    advantageFunction: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_advantages:advantage"],
        description="module:function that computes the advantage of each token, for advantage Function and only there. No "
        "default. verl: register_adv_est.",
    )
    groupSize: int = Field(
        8,
        ge=1,
        le=1024,
        description="Samples per prompt. 8 gives a usable group mean at moderate cost. "
        "verl: actor_rollout_ref.rollout.n.",
    )
    dynamicSampling: bool = Field(
        False,
        description="Leave out groups whose rewards are all equal, and generate others instead (DAPO). Off: such groups "
        "train nothing and cost nothing but their place. verl: algorithm.filter_groups.enable.",
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description="Discount per token. 1: only the end is rewarded. verl: algorithm.gamma."
    )
    lambda_: float = Field(
        1.0,
        alias="lambda",
        ge=0,
        le=1,
        description="Trade-off of bias and variance in GAE. 1 is unbiased. verl: algorithm.lam.",
    )
    entropyCoefficient: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the entropy bonus. 0 as in the published recipes. "
        "verl: actor_rollout_ref.actor.entropy_coeff.",
    )
    reportEntropy: bool = Field(
        True,
        description="Compute the policy's entropy for the metrics even where entropyCoefficient is 0. On, since a collapse "
        "shows there first; off saves one more pass over the logits. verl: actor_rollout_ref.actor.calculate_entropy.",
    )
    loss: Loss = Field(
        Loss(), description="The policy loss. PPOClip by default. verl: actor_rollout_ref.actor.policy_loss."
    )
    kl: KL = Field(KL(), description="Penalty against the reference model. Off by default. verl: algorithm.kl_ctrl.")
    correction: Correction = Field(
        Correction(),
        description="Off-policy correction. On by default, since the default mode is off-policy. "
        "verl: algorithm.rollout_correction.",
    )

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's functions by the path of their field, from `spec.algorithm`."""
        found = {"loss.function": self.loss.function, "advantageFunction": self.advantageFunction}
        return {path: function for path, function in found.items() if function is not None}
