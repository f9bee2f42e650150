from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from qwen35_trainer.data import Prompt
from qwen35_trainer.manifest.data import SourceSpec
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.rewards.reward import Response
from qwen35_trainer.rewards.scorer import Scorer
from qwen35_trainer.rewards.scorer_builder import build_scorer

type Complete = Callable[..., Response]
type Build = Callable[..., Scorer]


@pytest.fixture
def complete() -> Complete:
    def completion(text: str, answer: str | None = None, **metadata: object) -> Response:
        return Response(Prompt("s/0", "s", "question", answer, metadata), text, len(text), truncated=False)

    return completion


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Builds scorers in a manifest's folder of its own, and closes them."""
    built: list[Scorer] = []

    def scorer(*rewards: dict[str, object], sources: Sequence[SourceSpec] = ()) -> Scorer:
        built.append(build_scorer([RewardSpec.model_validate(reward) for reward in rewards], sources, tmp_path))
        return built[-1]

    yield scorer
    for entry in built:
        entry.close()
