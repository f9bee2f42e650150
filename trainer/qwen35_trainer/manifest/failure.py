"""spec.failurePolicy: whether another attempt follows a failed one."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.manifest.base import Section

FailureAction = Literal["Restart", "RestartAndIgnoreMaxRestarts", "Fail"]
PoolName = Literal["head", "rollout", "train"]


class FailureRuleSpec(Section):
    """One rule for failed attempts. A rule matches if all of its conditions hold; the first rule that matches decides."""

    name: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="Name of the rule, unique; it appears in status and events. No default. verl: none.",
    )
    action: FailureAction = Field(
        description="What to do: start another attempt, start one that does not count towards maxRestarts, or fail "
        "the training. No default. verl: none."
    )
    onPool: PoolName | None = Field(
        None, description="Matches failures of pods of this pool. Default: any pool. verl: none."
    )
    onExitCodes: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Matches any of these exit codes. Default: empty, which matches all. verl: none.",
    )
    onReasons: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Matches any of these failure reasons, such as OOMKilled or Evicted. Default: empty, which "
        "matches all. verl: none.",
    )
    onMessagePattern: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Matches failures in whose message this regular expression is found, an RE2 expression without "
        "look-around and back-references. Default: any message. verl: none.",
    )


class FailurePolicySpec(Section):
    """Whether a failed attempt is followed by another. Faults that a running job recovers from do not count."""

    maxRestarts: int = Field(
        5,
        ge=0,
        le=1000,
        description="Maximum number of restarts; those by RestartAndIgnoreMaxRestarts do not count, and none before an "
        "attempt that was active for an hour and got further than the attempts before it. Default 5, enough for transient "
        "faults. verl: none.",
    )
    backoffSeconds: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="Wait before the next attempt, in seconds. Each further failure in a row without progress doubles it, "
        "up to an hour if it is shorter. Default 10, which gives a lost node time to disappear. verl: none.",
    )
    stallFactor: float = Field(
        20.0,
        ge=2,
        le=1_000_000,
        description="An attempt counts as stalled, a failure with reason Stalled, when it has had no new version for "
        "this many times the median time between versions, and for at least a minute. Default 20, longer than any long tail. verl: "
        "none.",
    )
    rules: tuple[FailureRuleSpec, ...] = Field(
        (),
        strict=False,
        max_length=32,
        description="Rules that are tried in order before the built-in ones. Default: empty. verl: none.",
    )
