"""Choices of experts as a rollout has recorded them, in a module that the processes of a group can import."""

from dataclasses import dataclass

from qwen35_trainer.data.expert_choices import RecordedChoices


@dataclass(frozen=True)
class Recorded:
    """The choices of one sequence. parts: as `ChoiceSource.read` returns them; None: they cannot be read."""

    parts: list[tuple[RecordedChoices, int]] | None

    def read(self) -> list[tuple[RecordedChoices, int]] | None:
        return self.parts
