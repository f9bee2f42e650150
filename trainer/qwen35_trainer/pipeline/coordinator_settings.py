"""The settings of a coordinator, and a check that refuses settings with which a run would never end."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.window import Window

PATIENCE_BATCHES = 100


@dataclass(frozen=True)
class CoordinatorSettings:
    """The settings by which the coordinator schedules a run.

    Raises ValueError that lists every violated inequality: such a run would wait forever.
    """

    window: Window
    group_size: int
    """G: sequences per prompt."""
    batches: int
    """Batches of the whole run."""
    on_missed_deadline: MissedDeadlinePolicy = MissedDeadlinePolicy.WAIT
    partial_rollout: bool = True
    """Sequences continue across a publication. Otherwise each comes from one version, and a publication waits for all."""
    taking_turns: bool = False
    """The pools share devices: no batch trains while any sequence is generated."""
    dynamic_sampling: bool = False
    """Groups without signal leave and are replaced."""
    lane_after: int | None = None
    """Response tokens after which a sequence moves to the straggler lane. None: there is no lane."""
    adaptive: bool = False
    """Hold back dispatch when a predicted finish would miss its deadline."""

    @property
    def patience(self) -> int:
        """The number of groups in a row that leave untrained before the run fails."""
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
