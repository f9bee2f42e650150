"""The prompts of several sources as one set, and the order in which they train."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import overload

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.epoch_permutations import EpochPermutations
from qwen35_trainer.data.gym_prompts import GymPrompts
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_files import read_prompts
from qwen35_trainer.manifest.data import SourceSpec


class PromptSet(Sequence[Prompt]):
    """The prompts of several data sources, read as one sequence: all prompts of the first source, then those of the next."""

    def __init__(self, parts: Iterable[Sequence[Prompt]]) -> None:
        self._parts = tuple(part for part in parts if part)
        self._ends = tuple(accumulate(len(part) for part in self._parts))

    @classmethod
    def load(cls, sources: Iterable[SourceSpec], base: Path, *, answers_required: bool = False) -> "PromptSet":
        """Load the prompts of all sources.

        base: the folder of the manifest, to which paths are relative. answers_required: whether rows of files must have
        an answer, because a reward or SFT needs it. Raises DataError with the problems of all sources.
        """
        parts: list[Sequence[Prompt]] = []
        problems: list[str] = []
        for source in sources:
            try:
                if source.files is not None:
                    parts.append(read_prompts(source, base, answers_required=answers_required))
                else:
                    parts.append(GymPrompts(source))
            except DataError as error:
                problems.extend(error.problems)
        if problems:
            raise DataError(problems)
        return cls(parts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        row = range(len(self))[index]
        part = bisect_right(self._ends, row)
        start = self._ends[part - 1] if part else 0
        return self._parts[part][row - start]


@dataclass(frozen=True)
class PromptOrder:
    """The order in which prompts train. It depends only on seed and position, so a resumed run needs only its position.

    length: number of prompts in the set. epochs: number of passes over the set; None: no limit. shuffle: whether each
    epoch has another permutation; otherwise every epoch has the order 0, 1, 2, … Raises DataError for an empty set.
    """

    length: int
    seed: int = 0
    epochs: int | None = 1
    shuffle: bool = True
    _permutations: EpochPermutations = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_permutations", EpochPermutations(self.length, self.seed))
        if self.length < 1 or (self.epochs is not None and self.epochs < 1):
            raise DataError([f"{self.length} prompts × {self.epochs} epochs: nothing to train on. Add prompts."])

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("an order without end has no length")
        return self.length * self.epochs

    def prompt_index(self, position: int) -> int:
        """Return the index in the set of the prompt at `position`.

        Positions count prompts over all epochs, from 0. Raises IndexError if the position is after the last epoch.
        """
        if position < 0 or (self.epochs is not None and position >= self.length * self.epochs):
            passes = "any number of" if self.epochs is None else self.epochs
            raise IndexError(f"position {position} is outside {passes} passes over {self.length} prompts")
        epoch, place = divmod(position, self.length)
        if not self.shuffle:
            return place
        index = int(self._permutations.of(epoch)[place])
        if self.epochs is None or epoch + 1 < self.epochs:
            self._permutations.prepare(epoch + 1)
        return index

    def prepare(self, position: int) -> None:
        """Begin to compute the order of the epoch that contains `position` on another thread, if that takes long."""
        if self.shuffle:
            self._permutations.prepare(position // self.length)
