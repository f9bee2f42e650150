"""spec.rewards: how a response is scored."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.base import FUNCTION, Section

RewardType = Literal["Math", "ExactMatch", "Gym", "Function"]
OnError = Literal["Zero", "Skip", "Fail"]


class Reward(Section):
    """One scorer; a sample's reward is the weighted sum of all."""

    name: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="Name in metrics, unique. By default the type's name. verl: none.",
    )
    type: RewardType = Field(
        description="Math compares expressions, ExactMatch text, Gym asks the prompt's task, Function calls user "
        "code. No default. verl: reward.custom_reward_function, data_source dispatch."
    )
    weight: float = Field(
        1.0,
        ge=-1000,
        le=1000,
        description="Factor of this score in the sum; negative punishes. 1, so that one reward is itself. verl: none.",
    )
    extract: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Regular expression (RE2); its first group, or else its whole match, is what is compared (Math and "
        "ExactMatch). By default the whole response. verl: none.",
    )
    function: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_rewards:score"],
        description="module:function to call, for type Function and only there. No default. "
        "verl: reward.custom_reward_function.path and .name.",
    )
    timeoutSeconds: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Longest time for one call, in seconds; then the call is ended and onError decides. 10 is ample "
        "for rules. verl: none.",
    )
    onError: OnError = Field(
        "Zero",
        description="When a call fails or times out: Zero scores the sample 0; Skip leaves it out of the loss and of "
        "its group's mean; Fail ends the run. Zero keeps going, and errors are counted. verl: none.",
    )
