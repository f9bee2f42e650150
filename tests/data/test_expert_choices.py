"""The experts that were chosen for a sequence: cut and joined with its tokens, and laid out for the trainer's inputs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data import expert_choices
from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns

LAYERS, TOP_K, EXPERTS = 3, 2, 7


def choices_of(inputs: int, seed: int = 0) -> np.ndarray:
    """Different experts for each input and layer."""
    random = np.random.default_rng(seed)
    drawn = random.random((inputs, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K]
    return drawn.astype(np.uint8)


def response(prompt: int, tokens: int) -> GeneratedTokens:
    """A whole response, with the choices of all its inputs."""
    return GeneratedTokens(
        np.arange(tokens, dtype=np.int32),
        np.zeros(tokens, np.float32),
        VersionRuns.of([0] * tokens),
        choices=choices_of(prompt + tokens - 1),
    )


@given(prompt=st.integers(1, 9), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_parts_of_a_response_have_the_rows_of_their_inputs(prompt: int, lengths: list[int]) -> None:
    """The first part with tokens also has those of the prompt. Joined, the parts are the whole."""
    tokens = sum(lengths)
    if tokens == 0:
        return
    whole = response(prompt, tokens)
    ends = np.cumsum(lengths).tolist()
    parts = [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    assert whole.choices is not None
    begun = False
    for part, end in zip(parts, ends, strict=True):
        if len(part) == 0:
            continue
        first = 0 if not begun else prompt + end - len(part) - 1
        begun = True
        assert part.choices is not None
        np.testing.assert_array_equal(part.choices, whole.choices[first : prompt + end - 1])
    joined = GeneratedTokens.join([part for part in parts if len(part)])
    np.testing.assert_array_equal(joined.choices, whole.choices)


def test_a_part_without_choices_leaves_the_whole_without() -> None:
    recorded, unrecorded = (
        response(2, 3),
        GeneratedTokens(*[getattr(response(2, 1), n) for n in ("ids", "log_probs", "versions")]),
    )
    assert GeneratedTokens.join([recorded, unrecorded]).choices is None
    assert GeneratedTokens.join([NO_TOKENS, recorded]).choices is not None
    assert GeneratedTokens.join([NO_TOKENS]).choices is None


@given(prompt=st.integers(1, 9), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_trainer_gets_every_row_at_the_input_from_which_the_token_was_computed(
    prompt: int, lengths: list[int]
) -> None:
    whole, ends = response(prompt, sum(lengths)), np.cumsum(lengths).tolist()
    parts = [(whole[end - length : end].choices, end) for end, length in zip(ends, lengths, strict=True)]
    replayed = expert_choices.replayed(parts, prompt=prompt, response=sum(lengths))
    assert replayed.dtype == np.int16
    np.testing.assert_array_equal(replayed, whole.choices)


def test_inputs_that_no_part_has_are_left_to_the_trainers_routers() -> None:
    """Leading rows, as with prompts that an engine had computed before, and a part in the middle."""
    whole = choices_of(4 + 6 - 1)
    parts = [(whole[2:5], 2), (whole[7:9], 6)]
    replayed = expert_choices.replayed(parts, prompt=4, response=6)
    expected = whole.astype(np.int16)
    expected[[0, 1, 5, 6]] = NO_CHOICE
    np.testing.assert_array_equal(replayed, expected)


def test_numbers_of_experts_take_a_byte_where_that_is_enough() -> None:
    assert expert_choices.recorded_type(256) == np.uint8
    assert expert_choices.recorded_type(257) == np.uint16
