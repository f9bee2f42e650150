"""spec.failurePolicy: what follows a failed attempt."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.spec.base import Section

FailureAction = Literal["Restart", "RestartWithoutCounting", "Fail"]
Pool = Literal["head", "rollout", "train"]


class FailureRule(Section):
    """One rule: every condition that is written must hold; the first rule that matches decides."""

    name: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="Name of the rule, unique; appears in status and events. No default. verl: none.",
    )
    action: FailureAction = Field(
        description="Start the next attempt, do so without using up maxRestarts, or fail for good. No default. "
        "verl: none."
    )
    pool: Pool | None = Field(None, description="Pool of the failed pod. By default any. verl: none.")
    exitCodes: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        (), strict=False, max_length=64, description="Exit codes that match. Empty, the default, is any. verl: none."
    )
    reasons: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Failure reasons that match, such as OOMKilled or Evicted. Empty, the default, is any. verl: none.",
    )
    messagePattern: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Regular expression to be found in the failure's message. By default any. verl: none.",
    )


class FailurePolicy(Section):
    """When to try again. Faults that the running job survives by itself do not count."""

    maxRestarts: int = Field(
        5, ge=0, le=1000, description="Further attempts after the first. 5 rides out a bad night. verl: none."
    )
    backoffSeconds: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="Wait before the next attempt, in seconds, doubled each time. 10 gives a node time to vanish. "
        "verl: none.",
    )
    stallFactor: float = Field(
        20.0,
        ge=2,
        le=1_000_000,
        description="Times the median time between versions without a new one after which an attempt counts as stalled, "
        "a failure with reason Stalled. 20 is beyond any long tail. verl: none.",
    )
    rules: tuple[FailureRule, ...] = Field(
        (),
        strict=False,
        max_length=32,
        description="Own rules, asked in order before the built-in ones. Empty by default. verl: none.",
    )
