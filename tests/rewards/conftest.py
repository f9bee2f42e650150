from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from qwen35_trainer.data import Prompt
from qwen35_trainer.rewards.base import Completion
from qwen35_trainer.rewards.build import build_scorer
from qwen35_trainer.rewards.scorer import Scorer
from qwen35_trainer.spec.data import Source
from qwen35_trainer.spec.rewards import Reward

type Complete = Callable[..., Completion]
type Build = Callable[..., Scorer]


@pytest.fixture
def complete() -> Complete:
    def completion(text: str, answer: str | None = None, **metadata: object) -> Completion:
        return Completion(Prompt("s/0", "s", "question", answer, metadata), text, len(text), truncated=False)

    return completion


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Builds scorers in a manifest's folder of its own, and closes them."""
    built: list[Scorer] = []

    def scorer(*rewards: dict[str, object], sources: Sequence[Source] = ()) -> Scorer:
        built.append(build_scorer([Reward.model_validate(reward) for reward in rewards], sources, tmp_path))
        return built[-1]

    yield scorer
    for entry in built:
        entry.close()
