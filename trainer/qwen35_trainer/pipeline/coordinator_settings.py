"""The settings of a coordinator. Settings with which a run would never end are refused."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.window import Window

PATIENCE_BATCHES = 100
MAX_RESPONSE_TOKENS = 1 << 20


@dataclass(frozen=True)
class CoordinatorSettings:
    """The settings by which the coordinator schedules a run.

    Raises ValueError, with all problems in the message, if a number is too small or settings contradict each other.
    """

    window: Window
    group_size: int
    """G: number of sequences per prompt."""
    batches: int
    """Number of batches of the whole run."""
    on_missed_deadline: MissedDeadlinePolicy = MissedDeadlinePolicy.WAIT
    partial_rollout: bool = True
    """Whether unfinished sequences continue with the new weights after a publication.

    If False, a publication waits until no sequence is being generated, so that each sequence comes from one version.
    """
    taking_turns: bool = False
    """Whether the pools share devices and take turns: no batch trains while any sequence is being generated."""
    dynamic_sampling: bool = False
    """Whether groups without signal (all rewards equal) leave untrained, and other prompts are dispatched instead."""
    lane_after: int | None = None
    """Number of response tokens after which a sequence may move to the straggler lane. None: there is no lane."""
    lane_breaks_even: bool = True
    """Whether a sequence moves to the lane only if the move is expected to save more time than it costs.

    If False, every sequence moves after `lane_after` tokens; this is for comparison only.
    """
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    """Maximum number of tokens of a response (data.maxResponseTokens)."""
    group_affinity: bool = True
    """Whether the samples of a prompt go to the same replica, which computes the prompt once.

    If False, each sample goes to the least loaded replica.
    """
    adaptive: bool = False
    """Whether fewer groups are dispatched while too many groups are predicted to miss their deadlines."""

    @property
    def patience(self) -> int:
        """The number of consecutive untrained groups (failed or filtered) at which the run fails."""
        return PATIENCE_BATCHES * self.window.groups_per_batch

    def __post_init__(self) -> None:
        problems = [
            *(
                []
                if self.group_size >= 1
                else [f"groupSize {self.group_size} < 1: a group without samples never trains"]
            ),
            *([] if self.batches >= 0 else [f"batches {self.batches} < 0"]),
            *(
                [
                    f"groupSize {self.group_size} < 2 with dynamicSampling: one reward cannot differ, every group is left out"
                ]
                if self.dynamic_sampling and self.group_size == 1
                else []
            ),
            *(
                [f"lane.afterTokens {self.lane_after} < 1: every sequence would start in the lane"]
                if self.lane_after is not None and self.lane_after < 1
                else []
            ),
        ]
        if problems:
            raise ValueError("; ".join(problems))
