"""Generates the prompts of tasks of the reasoning-gym library."""

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.manifest.data import GymSpec, SourceSpec


class GymPrompts(RowSequence[Prompt]):
    """The prompts of a reasoning-gym task, generated on access. A prompt depends only on task, config, seed and row.

    The metadata of a prompt have two keys: `gym` has the settings of the source, and `entry` the data that the task's
    scorer needs. Raises DataError for an unknown task or option, and for a value that the task refuses.
    """

    def __init__(self, source: SourceSpec) -> None:
        assert source.gym is not None, "the caller chooses the reader by the kind of source"
        self._name = source.name
        self._gym = source.gym.model_dump()
        self._dataset = create_task(source.name, source.gym)

    def __len__(self) -> int:
        return len(self._dataset)

    def _row(self, row: int) -> Prompt:
        entry = self._dataset[row]
        # Some tasks (graph_color, rush_hour …) have no reference answer: only their scorer can judge a response.
        answer = None if entry["answer"] is None else str(entry["answer"])
        metadata = {"gym": self._gym, "entry": entry}
        return Prompt(f"{self._name}/{row}", self._name, entry["question"], answer, metadata)


def create_task(source: str, gym: GymSpec) -> Any:  # noqa: ANN401  # reasoning-gym is untyped
    """Create the reasoning-gym dataset of a source. source: its name, for errors.

    Raises DataError for an unknown task, for all unknown options together, and if the task refuses a value.
    """
    with warnings.catch_warnings():
        # A dependency of reasoning-gym has invalid comparisons, which Python reports on the first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # four seconds to import
        from reasoning_gym.factory import DATASETS

    if gym.task not in DATASETS:
        raise DataError([f"source {source}: reasoning-gym has no task {gym.task!r}. {_near(gym.task, DATASETS)}"])
    options = {entry.name for entry in dataclasses.fields(DATASETS[gym.task][1])} - {"seed", "size"}
    problems = [
        f"source {source}: task {gym.task} has no option {name!r}. {_near(name, options)}"
        for name in gym.config
        if name not in options
    ]
    if problems:
        raise DataError(problems)
    try:
        return reasoning_gym.create_dataset(gym.task, size=gym.size, seed=gym.seed, **gym.config)
    # Tasks check their options by assertions or not at all; the latter fail on the first use of the value.
    except (AssertionError, TypeError, ValueError, KeyError, AttributeError) as error:
        config = ", ".join(f"{name}: {value!r}" for name, value in gym.config.items())
        raise DataError([f"source {source}: task {gym.task} refuses config {{{config}}}: {error}"]) from error


def _near(name: str, names: Mapping[str, object] | set[str]) -> str:
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    if close:
        return f"Near names: {', '.join(close)}."
    listed = sorted(names)
    return f"It has {', '.join(listed[:20])}{' …' if len(listed) > 20 else ''}."
