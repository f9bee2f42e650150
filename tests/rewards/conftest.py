from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from qwen35_trainer.data import Prompt
from qwen35_trainer.manifest.data import SourceSpec
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.rewards.combiner import Combiner
from qwen35_trainer.rewards.reward import CombinedScore, PromptFields, Response
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup
from qwen35_trainer.rewards.scorer import Scorer, build_scorer

type Complete = Callable[..., Response]
type Build = Callable[..., Awaitable[Rewards]]


@dataclass(frozen=True)
class Rewards:
    """All rewards of a run without a scoring process: only functions have processes."""

    scorer: Scorer
    combiner: Combiner

    async def score(self, response: Response) -> CombinedScore:
        [scores] = await self.scorer.score([response])
        return self.combiner.combined(response.prompt.id, scores)


@pytest.fixture
def complete() -> Complete:
    def completion(text: str, answer: str | None = None, **metadata: object) -> Response:
        prompt = Prompt("s/0", "s", "question", answer, metadata)
        return Response(PromptFields.of(prompt), text, len(text), truncated=False)

    return completion


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    """Builds the rewards of a manifest's folder of its own, and closes them."""
    built: list[Rewards] = []

    async def rewards(*specs: dict[str, object], sources: Sequence[SourceSpec] = ()) -> Rewards:
        setup = RewardsSetup.of([RewardSpec.model_validate(spec) for spec in specs], sources, tmp_path)
        built.append(Rewards(await build_scorer(setup, ProcessLimits()), Combiner(setup.terms)))
        return built[-1]

    yield rewards
    for entry in built:
        await entry.scorer.close()
