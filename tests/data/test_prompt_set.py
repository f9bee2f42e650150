import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data import DataError, Prompt, PromptOrder, PromptSet, prompt_set
from qwen35_trainer.data.prompt_set import MIN_PREPARED_PROMPTS
from qwen35_trainer.manifest.data import SourceSpec

lengths = st.integers(1, 60)
seeds = st.integers(0, 2**31 - 1)


def prompts(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}/{row}", name, "text") for row in range(count)]


@given(st.lists(st.integers(0, 5), max_size=5))
def test_a_set_is_the_concatenation_of_its_sources(counts: list[int]) -> None:
    parts = [prompts(str(number), count) for number, count in enumerate(counts)]
    together = [prompt for part in parts for prompt in part]
    joined = PromptSet(parts)
    assert list(joined) == together
    assert len(joined) == len(together)
    assert joined[1:] == together[1:]
    with pytest.raises(IndexError):
        joined[len(together)]


def test_the_problems_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    sources = [
        SourceSpec.model_validate({"name": "a", "files": {"paths": ["absent.jsonl"]}}),
        SourceSpec.model_validate({"name": "b", "gym": {"task": "absent", "size": 1}}),
    ]
    with pytest.raises(DataError) as raised:
        PromptSet.load(sources, tmp_path)
    first, second = raised.value.problems
    assert first.startswith("source a: ")
    assert second.startswith("source b: ")


def test_files_and_gyms_load_into_one_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sources = [
        SourceSpec.model_validate({"name": "a", "files": {"paths": ["a.jsonl"]}}),
        SourceSpec.model_validate({"name": "b", "gym": {"task": "chain_sum", "size": 2}}),
    ]
    loaded = PromptSet.load(sources, tmp_path, answers_required=True)
    assert [prompt.id for prompt in loaded] == ["a/0", "b/0", "b/1"]


@given(lengths, seeds, st.integers(1, 4))
def test_every_epoch_is_a_permutation(length: int, seed: int, epochs: int) -> None:
    order = PromptOrder(length, seed, epochs)
    for epoch in range(epochs):
        indices = [order.prompt_index(epoch * length + place) for place in range(length)]
        assert sorted(indices) == list(range(length))


@given(lengths, seeds, st.data())
def test_a_resumed_order_continues_where_it_stopped(length: int, seed: int, data: st.DataObject) -> None:
    order = PromptOrder(length, seed, epochs=3)
    whole = [order.prompt_index(position) for position in range(len(order))]
    stopped = data.draw(st.integers(0, len(order)))
    resumed = PromptOrder(length, seed, epochs=3)
    assert [resumed.prompt_index(position) for position in range(stopped, len(resumed))] == whole[stopped:]


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = PromptOrder(50, seed, epochs=2)
        return [order.prompt_index(number * 50 + place) for place in range(50)]

    assert len({tuple(epoch(seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_the_order_is_the_same_for_ever() -> None:
    order = PromptOrder(8, seed=1)
    assert [order.prompt_index(position) for position in range(8)] == [5, 3, 7, 0, 4, 2, 6, 1]


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    order = PromptOrder(3, epochs=2, shuffle=False)
    assert [order.prompt_index(position) for position in range(6)] == [0, 1, 2, 0, 1, 2]


@given(lengths, seeds, st.integers(0, 400))
def test_an_order_without_end_continues_like_one_of_many_epochs(length: int, seed: int, position: int) -> None:
    endless, counted = PromptOrder(length, seed, epochs=None), PromptOrder(length, seed, epochs=position // length + 1)
    assert endless.prompt_index(position) == counted.prompt_index(position)


def test_an_order_without_end_has_no_length_and_no_position_before_its_start() -> None:
    order = PromptOrder(3, epochs=None)
    with pytest.raises(TypeError, match="without end has no length"):
        len(order)
    with pytest.raises(IndexError, match="position -1 is outside any number of passes over 3 prompts"):
        order.prompt_index(-1)


@pytest.mark.parametrize("position", [-1, 6])
def test_a_position_outside_the_epochs_is_an_error(position: int) -> None:
    with pytest.raises(IndexError, match=rf"position {position} is outside 2 passes over 3 prompts"):
        PromptOrder(3, epochs=2).prompt_index(position)


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(DataError, match="0 prompts × 1 epochs: nothing to train on"):
        PromptOrder(0)


def test_the_order_of_a_seed_stays_the_same_from_release_to_release() -> None:
    order = PromptOrder(6, seed=3, epochs=2)
    assert [order.prompt_index(position) for position in range(12)] == [0, 5, 1, 2, 4, 3, 3, 0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("epoch", "digest"),
    [
        (0, "aacc9c5ee5fcc8b85e5439a145603fb1fe6bf1b2f47177ac12d2ea7a4a496358"),
        (1, "75fec62ecf127649ebe4de05123e0f43c5543dad7262a1a9882de2a5e6fe3cd2"),
    ],
)
def test_the_order_of_many_prompts_stays_the_same_from_release_to_release(epoch: int, digest: str) -> None:
    length = 50_000
    assert length >= MIN_PREPARED_PROMPTS
    order = PromptOrder(length, seed=7, epochs=2)
    indices = [order.prompt_index(epoch * length + place) for place in range(length)]
    assert hashlib.sha256(np.array(indices, "<i8").tobytes()).hexdigest() == digest


def test_the_order_of_the_next_epoch_is_computed_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second per million prompts, in which the driver would do nothing else."""
    computed: dict[int, threading.Thread] = {}

    def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
        computed[epoch] = threading.current_thread()
        return np.arange(length)

    monkeypatch.setattr(prompt_set, "permutation", permutation)
    order = PromptOrder(MIN_PREPARED_PROMPTS, epochs=4)
    order.prepare(MIN_PREPARED_PROMPTS + 5)
    for position in (MIN_PREPARED_PROMPTS + 5, 2 * MIN_PREPARED_PROMPTS, 3 * MIN_PREPARED_PROMPTS):
        order.prompt_index(position)
    assert list(computed) == [1, 2, 3]
    assert threading.current_thread() not in computed.values()


def test_an_error_on_the_other_thread_is_raised_where_the_order_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(prompt_set, "permutation", permutation)
    order = PromptOrder(MIN_PREPARED_PROMPTS)
    order.prepare(0)
    with pytest.raises(MemoryError):
        order.prompt_index(0)
