"""The objective that an update minimises.

    loss = aggregate( weight · policy_loss  +  kl_coefficient · kl  -  entropy_coefficient · entropy )

A token can have different log-probs under three policies. The behaviour policy sampled the token, the proximal policy
is the centre of the trust region, and the current policy has the gradient. The correction's ratio r = proximal /
behaviour gives the weight of a token. The loss's ratio current / denominator bounds the step. The correction decides
which log-probs the two ratios use:

correction     proximal log-probs          loss's denominator     weight of the policy loss      name in verl
None           not used                    behaviour              1                              bypass
Recomputed     required                    proximal               1                              the default: neither bypass nor weights
TokenTIS       current, unless passed      proximal               min(r, cap) per token          decoupled
SequenceTIS    current, unless passed      proximal               min(Π r, cap) per sequence     decoupled
IcePop         current, unless passed      proximal               r in [floor, cap], else 0      decoupled
SequenceMask   current, unless passed      proximal               1, or 0 for a whole sequence   decoupled
DecoupledPPO   required                    proximal               min(r, cap) per token          decoupled

The table follows one rule: the change from the behaviour policy to the current policy is corrected exactly once. With
correction None, the ratio of the loss corrects the whole change, and the weight is 1. With any other correction, the
weight corrects the change from behaviour to proximal policy, and the ratio of the loss corrects the change from
proximal to current policy. There are four special cases. Recomputed leaves the change from behaviour to proximal policy
as it is, as synchronous trainers do that take it for rounding between engines: do not use it with stale tokens.
SequenceMask corrects that change by dropping sequences. GPG has no ratio, so with correction None its loss is not corrected. DPPO's trust region
is around the policy in the denominator of the loss's ratio and should be around the behaviour policy, so the manifest
requires correction None.

"Current, unless passed": with one optimizer step per batch, the weights at the batch's start are the current ones. The
proximal log-probs are then the current ones, detached. The ratio of the loss is 1 and nothing is clipped: only the
bounds of the correction limit the step. With several steps per batch, pass log-probs that were computed with the
weights at the batch's start, so that clipping has an effect. DecoupledPPO and Recomputed require these log-probs.

Under truncated sampling, all log-probs of a token, including those of the reference model, are over the tokens that the
sampler kept. The ratio of an unchanged policy is therefore 1 (docs/numerics.md).

DecoupledPPO is the objective of Hilton et al., arXiv:2110.00641, and AReaL, arXiv:2505.24298. The code of AReaL drops
tokens whose ratio is above the cap; here the ratio is truncated to the cap.

The KL and entropy terms cover all trained tokens, with weight 1 under every correction. With GSPO, all three terms are
always aggregated by SequenceMeanTokenMean, because only then is GSPO's gradient that of the sequence's ratio
(arXiv:2507.18071). With kl_placement Reward, the KL penalty is already in the advantages
(`AdvantageInputs.token_penalty`), and here it is only reported. With LossAndReward, the penalty is in the advantages
and in the loss, with a coefficient for each.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from qwen35_trainer.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from qwen35_trainer.algorithms.corrections import CORRECTIONS, correction
from qwen35_trainer.algorithms.kl import ESTIMATORS, kl
from qwen35_trainer.algorithms.losses import LOSSES, LossInputs
from qwen35_trainer.algorithms.masking import token_sum, zero_padding
from qwen35_trainer.algorithms.user import is_user_function, loss_of

KL_PLACEMENTS = ("None", "Loss", "Reward", "LossAndReward")


@dataclass(frozen=True)
class Objective:
    """Settings of the policy objective. Functions are given by their names in the registries. The loss can also
    be a function of the user, given as `module:function`.

    The constructor raises ValueError if a field is wrong; the message names all wrong fields.
    """

    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    """Ratio above 1 at which PPOClip bounds the loss of tokens with a negative advantage; None: no such bound."""
    aggregation: str
    """Name of the aggregation. The loss GSPO ignores this field and always aggregates by SequenceMeanTokenMean."""
    kl_placement: str
    """Where the KL penalty is applied: "None", "Loss", "Reward" or "LossAndReward"."""
    kl_coefficient: float
    """Factor of the KL penalty in the loss. The penalty in the reward has another factor, which the
    objective does not need."""
    kl_estimator: str
    entropy_coefficient: float
    """Factor of the entropy that is subtracted from the loss: a value above 0 rewards entropy."""
    correction: str
    cap: float
    """Upper bound of the correction's ratio, proximal / behaviour probability."""
    floor: float
    """Lower bound of the correction's ratio, proximal / behaviour probability. Only IcePop and SequenceMask use it."""
    tau_positive: float = 1.0
    """SAPO's τ for tokens with a positive advantage."""
    tau_negative: float = 1.05
    """SAPO's τ for tokens with a negative advantage."""
    max_divergence: float | None = None
    """Divergence of a token above which DPPO masks the token. None: the paper's value."""

    def __post_init__(self) -> None:
        choices = {
            "loss": LOSSES.names,
            "aggregation": AGGREGATIONS.names,
            "kl_placement": KL_PLACEMENTS,
            "kl_estimator": ESTIMATORS.names,
            "correction": CORRECTIONS.names,
        }
        problems = [
            f"{field} {getattr(self, field)!r} is unknown, use one of {', '.join(names)}"
            for field, names in choices.items()
            if getattr(self, field) not in names and not (field == "loss" and is_user_function(self.loss))
        ]
        if self.dual_clip is not None and self.dual_clip <= 1:
            problems.append(f"dual_clip {self.dual_clip} would cut off the gradient at ratio 1, use a value above 1")
        if self.floor >= self.cap:
            problems.append(f"floor {self.floor} is not below cap {self.cap}, no token would train")
        if problems:
            raise ValueError("objective: " + "; ".join(problems) + ".")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss."""
        return self.kl_placement in ("Loss", "LossAndReward")

    def adapted(self, coefficient: float | None) -> Self:
        """Return the objective with `coefficient` as the factor of the KL penalty in the loss.

        coefficient: None if the factor is constant; the objective is then returned unchanged. If `kl_placement` is not
        "Loss", the objective is also returned unchanged. With "LossAndReward", only the factor of the penalty in the
        reward adapts.
        """
        if coefficient is None or self.kl_placement != "Loss":
            return self
        return replace(self, kl_coefficient=coefficient)


def needs_proximal(correction: str) -> bool:
    """Return whether `policy_objective` needs the argument `proximal_log_probs` with this correction.

    Raises ValueError for an unknown correction.
    """
    CORRECTIONS.get(correction)
    return correction in ("DecoupledPPO", "Recomputed")


def policy_objective(
    objective: Objective,
    *,
    log_probs: Tensor,
    entropy: Tensor | None,
    behaviour_log_probs: Tensor,
    proximal_log_probs: Tensor | None,
    reference_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    counts: GlobalCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute one micro-batch's part of the loss of its update, and the sums for its metrics.

    All tensors are (N, T), N sequences of up to T tokens. Only log_probs and entropy carry gradient.
    proximal_log_probs, entropy and reference_log_probs may be None where the objective does not use them. Raises
    ValueError naming all tensors that the objective uses and that are None.

    Returns the scalar loss, and scalar sums over trained tokens. The caller adds up the losses and the sums over
    micro-batches and data-parallel ranks, and divides the sums by `tokens`. The sums are tokens, policy_loss
    (weighted), the metrics of the loss (such as ratio), correction_weight, kept_tokens, behaviour_kl (K3 estimate of
    KL(behaviour ‖ current), nats), entropy if `entropy` is passed, and kl if `reference_log_probs` is passed. The sums
    do not depend on the aggregation: policy_loss / tokens equals the policy term of the loss only for TokenMean.
    """
    _require_inputs(objective, entropy, proximal_log_probs, reference_log_probs)
    # All gradients pass through this line, and aggregation selects the values; in between, padding may hold NaN.
    log_probs = zero_padding(log_probs, mask)
    proximal = log_probs.detach() if proximal_log_probs is None else proximal_log_probs
    denominator = behaviour_log_probs if objective.correction == "None" else proximal
    corrected = correction(objective.correction)(behaviour_log_probs, proximal, mask, objective.cap, objective.floor)
    policy = loss_of(objective.loss)(
        LossInputs(
            log_probs,
            denominator,
            advantages,
            mask,
            objective.clip_low,
            objective.clip_high,
            objective.dual_clip,
            objective.tau_positive,
            objective.tau_negative,
            objective.max_divergence,
        )
    )
    per_token = corrected.weights * policy.per_token
    sums = {
        "policy_loss": per_token,
        "correction_weight": corrected.weights,
        "kept_tokens": corrected.keep,
        "tokens": mask.bool(),
        "behaviour_kl": kl("K3")(behaviour_log_probs, log_probs),
    }
    if entropy is not None:
        sums["entropy"] = entropy = zero_padding(entropy, mask)
        per_token = per_token - objective.entropy_coefficient * entropy
    if reference_log_probs is not None:
        sums["kl"] = divergence = kl(objective.kl_estimator)(log_probs, reference_log_probs)
        if objective.kl_in_loss:
            per_token = per_token + objective.kl_coefficient * divergence
    metrics = policy.metrics | {name: token_sum(value.detach(), mask) for name, value in sums.items()}
    return aggregate(_aggregation(objective))(per_token, mask, counts), metrics


def supervised_objective(log_probs: Tensor, mask: Tensor, counts: GlobalCounts) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute one micro-batch's part of the mean negative log-likelihood of the trained tokens of its update (SFT).

    log_probs, mask: (N, T), N sequences of up to T tokens. Returns the scalar loss, which the caller adds up over
    micro-batches and data-parallel ranks, and two sums over trained tokens: `tokens`, and `nll` in nats.
    """
    nll = -zero_padding(log_probs, mask)
    metrics = {"tokens": token_sum(mask.bool(), mask), "nll": token_sum(nll.detach(), mask)}
    return aggregate("TokenMean")(nll, mask, counts), metrics


def _aggregation(objective: Objective) -> str:
    return "SequenceMeanTokenMean" if objective.loss == "GSPO" else objective.aggregation


def _require_inputs(
    objective: Objective, entropy: Tensor | None, proximal_log_probs: Tensor | None, reference_log_probs: Tensor | None
) -> None:
    problems = []
    if proximal_log_probs is None and needs_proximal(objective.correction):
        problems.append(
            f"proximal_log_probs is None, but {objective.correction} needs them recomputed with the weights at the "
            "batch's start; pass them or use TokenTIS"
        )
    if entropy is None and objective.entropy_coefficient != 0:
        problems.append(
            f"entropy is None, but entropy_coefficient is {objective.entropy_coefficient}; pass it or use 0"
        )
    if reference_log_probs is None and objective.kl_in_loss:
        problems.append(
            f"reference_log_probs is None, but kl_placement is {objective.kl_placement}; pass them or use None"
        )
    if problems:
        raise ValueError("policy objective: " + "; ".join(problems) + ".")
