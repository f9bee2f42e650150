"""An advantage function of a user: it needs the masks and penalties of all samples of the batch."""

from torch import Tensor

from qwen35_trainer.algorithms.advantages import AdvantageInputs


def relative_to_batch(inputs: AdvantageInputs) -> Tensor:
    """Each token's reward less the mean over all trained tokens of the batch."""
    assert inputs.token_penalty is not None
    rewards = inputs.rewards[:, None] - inputs.token_penalty
    return rewards - rewards[inputs.mask].mean()
