"""spec.rewards: the functions that score responses."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import FUNCTION, Section

RewardType = Literal["Math", "ExactMatch", "Gym", "Function"]
OnError = Literal["Zero", "Skip", "Fail"]


class RewardSpec(Section):
    """One reward function. A sample's reward is the weighted sum of the scores of all reward functions."""

    name: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="Name of the reward in metrics, unique. Default: its type. verl: none.",
    )
    type: RewardType = Field(
        description="Math compares expressions, ExactMatch compares text, Gym uses the scorer of the prompt's task, "
        "and Function calls your own. No default. verl: reward.custom_reward_function, data_source "
        "dispatch."
    )
    weight: float = Field(
        1.0,
        ge=-1000,
        le=1000,
        description="Factor of this reward in the sum; a negative weight is a penalty. Default 1. verl: none.",
    )
    extract: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Regular expression (RE2) for Math and ExactMatch. Its first group, or the whole match without a "
        "group, is compared. Default: the whole response is compared. verl: none.",
    )
    function: str | None = Field(
        None,
        max_length=256,
        pattern=FUNCTION,
        examples=["my_rewards:score"],
        description="Function to call, as module:function. Required with type Function and refused with every other "
        "type. verl: reward.custom_reward_function.path and .name.",
    )
    timeoutSeconds: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Maximum time for one call, in seconds; a longer call is ended and treated as failed. Default 10,"
        " ample for rules. verl: none.",
    )
    onError: OnError = Field(
        "Zero",
        description="What to do when a call fails or takes too long: Zero scores the sample 0; Skip excludes it from "
        "the loss and from its group's mean; Fail ends the run. Default Zero; errors are counted in the "
        "metrics. verl: none.",
    )
