import pytest

from qwen35_trainer.data import DataError
from qwen35_trainer.data.gym_prompts import GymPrompts
from qwen35_trainer.manifest.data import SourceSpec


def source(task: str, **fields: object) -> SourceSpec:
    return SourceSpec.model_validate({"name": "gym", "gym": {"task": task, "size": 5, **fields}})


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "graph_color"])
def test_prompts_are_a_function_of_seed_and_row(task: str) -> None:
    prompts = GymPrompts(source(task))
    again = GymPrompts(source(task))
    assert len(prompts) == 5
    assert prompts[3] == again[3]
    assert prompts[-1] == again[4]
    assert [prompt.id for prompt in prompts] == [f"gym/{row}" for row in range(5)]
    assert GymPrompts(source(task, seed=7))[3].text != prompts[3].text


def test_the_entry_of_the_task_travels_with_the_prompt() -> None:
    prompt = GymPrompts(source("chain_sum", config={"min_terms": 2, "max_terms": 2}))[0]
    entry = prompt.metadata["entry"]
    assert isinstance(entry, dict)
    assert (entry["question"], entry["answer"]) == (prompt.text, prompt.answer)


def test_a_task_without_a_reference_answer_gives_none() -> None:
    assert GymPrompts(source("graph_color"))[0].answer is None


def test_an_unknown_task_is_refused_with_near_names() -> None:
    with pytest.raises(
        DataError, match=r"source gym: reasoning-gym has no task 'chain_sums'\. Near names: .*chain_sum"
    ):
        GymPrompts(source("chain_sums"))


def test_every_unknown_option_is_named() -> None:
    with pytest.raises(DataError) as raised:
        GymPrompts(source("chain_sum", config={"min_term": 1, "zzz": 2}))
    first, second = raised.value.problems
    assert "has no option 'min_term'. Near names: min_terms" in first
    assert "has no option 'zzz'. It has " in second


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"), ({"min_terms": "two"}, "'two'")],
)
def test_a_refused_value_is_reported_with_the_config(config: dict[str, object], reason: str) -> None:
    with pytest.raises(DataError) as raised:
        GymPrompts(source("chain_sum", config=config))
    [problem] = raised.value.problems
    assert "task chain_sum refuses config {min_terms: " in problem
    assert reason in problem
