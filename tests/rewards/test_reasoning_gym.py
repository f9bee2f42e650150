from pathlib import Path

import pytest

from qwen35_trainer.data import PromptSet
from qwen35_trainer.manifest.data import SourceSpec
from qwen35_trainer.rewards.reasoning_gym import answer_part
from qwen35_trainer.rewards.reward import PromptFields, Response, RewardSetupError


def gym(task: str, **config: object) -> SourceSpec:
    return SourceSpec.model_validate({"name": task, "gym": {"task": task, "size": 3, "seed": 1, "config": config}})


async def test_each_task_is_scored_by_its_own_scorer(build, tmp_path: Path) -> None:
    sources = [gym("chain_sum", min_terms=2, max_terms=2), gym("countdown"), gym("graph_color")]
    scorer = await build({"type": "Gym"}, sources=sources)
    prompts = PromptSet.load(sources, tmp_path)

    async def score(row: int, text: str) -> float | None:
        scored = await scorer.score(Response(PromptFields.of(prompts[row]), text, 1, truncated=False))
        assert not scored.errors
        return scored.value

    assert await score(0, str(prompts[0].answer)) == 1.0
    assert await score(0, f"<answer>1</answer> no, <answer> {prompts[0].answer} </answer>") == 1.0
    assert await score(0, "nothing") == 0.0
    assert await score(3, str(prompts[3].answer)) == 1.0
    assert await score(3, "<answer>1+1</answer>") == pytest.approx(0.05)
    assert await score(6, "no colouring") < 1.0


async def test_an_expression_of_the_model_that_never_ends_is_ended(build, tmp_path: Path) -> None:
    sources = [gym("countdown")]
    scorer = await build({"type": "Gym", "timeoutSeconds": 2.0}, sources=sources)
    prompt = PromptFields.of(PromptSet.load(sources, tmp_path)[0])
    scored = await scorer.score(Response(prompt, "9**9**9**9", 1, truncated=False))
    assert "Timeout" in scored.errors["Gym"]


async def test_a_prompt_from_files_is_an_error_that_names_it(build, complete) -> None:
    scorer = await build({"type": "Gym"}, sources=[gym("chain_sum")])
    scored = await scorer.score(complete("1"))
    assert scored.errors == {"Gym": "NoGymPrompt: prompt s/0 comes from no gym source"}


async def test_without_a_gym_source_there_is_nothing_to_ask(build) -> None:
    with pytest.raises(RewardSetupError, match="reward Gym: no source is a gym"):
        await build({"type": "Gym"})


def test_without_tags_the_whole_response_is_the_answer() -> None:
    assert answer_part(" 12\n") == "12"
    assert answer_part("<answer>\n1\n2\n</answer>") == "1\n2"
