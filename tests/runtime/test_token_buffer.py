"""Reported tokens: packed in reports, and in a buffer for each sequence."""

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRun, VersionRuns
from qwen35_trainer.runtime.token_buffer import TokenBlock, TokenBuffer, TokenRows

BYTES_PER_TOKEN = 8


def drawn(count: int, seed: int = 0, *, truncated: bool = False) -> GeneratedTokens:
    """Tokens of which no two are alike. truncated: each has some candidates."""
    random = np.random.default_rng((count, seed))
    counts = random.integers(1, 5, count, np.int32)
    return GeneratedTokens(
        random.integers(0, 2**31, count, np.int32),
        -random.random(count, np.float32),
        VersionRuns.of(np.sort(random.integers(0, 9, count, np.int32))),
        Candidates(counts, random.integers(0, 2**31, counts.sum(), np.int32)) if truncated and count else None,
    )


def packed(tokens: GeneratedTokens) -> tuple[TokenRows, list[VersionRun], Candidates | None]:
    """As a report contains them."""
    [(_, *part)] = TokenBlock({(0, 0): [tokens]}).parts()
    return tuple(part)


def same(left: GeneratedTokens, right: GeneratedTokens) -> bool:
    """Every bit is the same."""
    arrays = [
        [tokens.ids, tokens.log_probs]
        + ([] if tokens.candidates is None else [tokens.candidates.counts, tokens.candidates.ids])
        for tokens in (left, right)
    ]
    return (
        left.versions == right.versions
        and len(arrays[0]) == len(arrays[1])
        and all(
            first.dtype == second.dtype and first.tobytes() == second.tobytes()
            for first, second in zip(*arrays, strict=True)
        )
    )


def buffer_of(parts: Sequence[GeneratedTokens]) -> TokenBuffer:
    buffer = TokenBuffer()
    for part in parts:
        buffer.append(*packed(part))
    return buffer


STEPS = st.lists(st.one_of(st.integers(0, 300), st.floats(0.0, 1.0)), max_size=30)
"""Append this number of tokens, or keep this share of all."""


@pytest.mark.parametrize("truncated", ["no tokens", "all tokens", "later tokens"])
@given(steps=STEPS)
def test_a_buffer_contains_what_was_appended_and_not_cut_off(steps, truncated):
    """Candidates, too, for tokens of truncated sampling."""
    buffer, expected = TokenBuffer(), NO_TOKENS
    for number, step in enumerate(steps):
        if isinstance(step, int):
            new = drawn(
                step, number, truncated=truncated == "all tokens" or (truncated == "later tokens" and number > 1)
            )
            assert buffer.append(*packed(new)) == len(expected) + len(new)
            expected = GeneratedTokens.join([expected, new])
        else:
            buffer.cut(round(step * len(expected)))
            expected = expected[: round(step * len(expected))]
        assert len(buffer) == len(expected)
        assert buffer.tokens().candidates is not None or expected.candidates is None
    assert same(buffer.tokens(), expected)


@given(st.lists(st.integers(0, 2000), max_size=40))
def test_a_buffer_has_the_memory_of_its_tokens_and_no_more(lengths):
    buffer = TokenBuffer()
    for length in lengths:
        buffer.append(*packed(drawn(length)))

    def held() -> int:
        return sum(len(row) for *rows, _ in buffer._parts for row in rows)

    assert held() == BYTES_PER_TOKEN * len(buffer)
    tokens = buffer.tokens()
    assert held() == BYTES_PER_TOKEN * len(buffer)
    if len(buffer):
        [(ids, *_)] = buffer._parts
        assert np.shares_memory(tokens.ids, np.frombuffer(ids, np.int32)), "the parts are gone"


def test_no_token_is_copied_again_while_a_sequence_grows():
    buffer = buffer_of([drawn(10), drawn(20)])
    before = list(buffer._parts)
    buffer.append(*packed(drawn(30)))
    assert all(old is new for old, new in zip(before, buffer._parts, strict=False))


def test_tokens_that_are_read_do_not_change_when_more_arrive():
    buffer = buffer_of([drawn(5)])
    read = buffer.tokens()
    buffer.cut(2)
    buffer.append(*packed(drawn(9, seed=1)))
    assert same(read, drawn(5))


def test_a_buffer_keeps_no_array_of_a_report_alive():
    """A part of a report is a view of the whole report, which contains the tokens of many sequences."""
    block = TokenBlock({(0, 0): [drawn(3, truncated=True)], (0, 1): [drawn(5000, truncated=True)]})
    buffers = []
    for _, *part in block.parts():
        buffers.append(TokenBuffer())
        buffers[-1].append(*part)
        [(*rows, candidates)] = buffers[-1]._parts
        assert [type(row) for row in rows] == [bytes] * 2, "which own their memory"
        assert not np.shares_memory(candidates.ids, block._candidates.ids)
    assert [len(buffer) for buffer in buffers] == [3, 5000]


def test_a_buffer_cannot_keep_more_tokens_than_it_has():
    buffer = buffer_of([drawn(3)])
    buffer.cut(3)
    with pytest.raises(ValueError, match=r"4 tokens .*, and there are 3"):
        buffer.cut(4)


def test_a_buffer_begins_with_the_tokens_that_it_is_given():
    assert same(TokenBuffer(drawn(70)).tokens(), drawn(70))
    assert same(TokenBuffer().tokens(), NO_TOKENS)


NAMES = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 9), max_size=3), max_size=5))
def test_a_block_contains_the_tokens_of_each_sequence_even_after_it_was_sent(lengths):
    """Those of the second half of the groups are sampled with truncation."""
    parts = {
        name: [drawn(length, index, truncated=name[0] > 1) for index, length in enumerate(each)]
        for name, each in lengths.items()
    }
    block = pickle.loads(pickle.dumps(TokenBlock(parts), protocol=5))
    assert list(block) == list(parts)
    for name, rows, *_ in block.parts():
        joined = GeneratedTokens.join(parts[name])
        assert same(block[name], joined)
        assert same(buffer_of([joined]).tokens(), joined)
        assert [len(row) for row in rows] == [len(joined)] * 2
    assert (9, 9) not in block
