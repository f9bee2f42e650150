"""Reported tokens: packed in reports, and the progress of the sequences of a replica."""

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.reported_tokens import LONG_TOKENS, Progress, TokenBlock
from qwen35_trainer.runtime.worker_connection import pack, unpack


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


def sent(block: TokenBlock) -> TokenBlock:
    """As it arrives in the driver: its arrays are views of the message."""
    pickled, arrays = pack(block)
    message = bytearray(b"".join(np.asarray(array).tobytes() for array in arrays))
    views, at = [], 0
    for array in arrays:
        views.append(np.frombuffer(message, np.uint8)[at : at + array.nbytes])
        at += array.nbytes
    return unpack((pickled, views))


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
    copies = dict(block.copies())
    assert list(copies) == list(parts)
    for name, tokens in copies.items():
        assert same(tokens, GeneratedTokens.join(parts[name]))
        assert same(block[name], tokens)
    assert (9, 9) not in block
    with pytest.raises(KeyError):
        block[9, 9]


def test_a_copy_does_not_keep_the_message_in_memory():
    """A message contains the tokens of many sequences, and other things."""
    block = sent(TokenBlock({(0, 0): [drawn(3, truncated=True)], (0, 1): [drawn(50_000, truncated=True)]}))
    assert block._data.base is not None, "the message"
    for _, tokens in block.copies():
        for own, of_block in (
            (tokens.ids, block._data),
            (tokens.log_probs, block._data),
            (tokens.candidates.ids, block._candidates.ids),
        ):
            assert not np.shares_memory(own, of_block)


@given(st.lists(st.sampled_from([0, 5, LONG_TOKENS - 1, LONG_TOKENS, LONG_TOKENS + 9]), max_size=5), st.booleans())
def test_long_sequences_have_arrays_of_their_own_which_are_read_without_a_copy(lengths, truncated):
    whole = {(0, index): drawn(length, index, truncated=truncated) for index, length in enumerate(lengths)}
    pickled, arrays = pack(TokenBlock({name: [tokens] for name, tokens in whole.items()}))
    block = unpack((pickled, arrays))
    assert block.token_count == sum(lengths)
    for (name, tokens), expected in zip(block.copies(), whole.values(), strict=True):
        assert same(tokens, expected)
        assert not tokens.ids.flags.writeable, name
        assert not tokens.log_probs.flags.writeable, name
        sources = [array.nbytes for array in arrays if np.shares_memory(array, tokens.ids)]
        assert sources == ([8 * len(tokens)] if len(tokens) >= LONG_TOKENS else []), name


def test_tokens_that_are_read_cannot_be_written():
    [(_, tokens)] = TokenBlock({(0, 0): [drawn(3)]}).copies()
    assert not tokens.ids.flags.writeable
    assert not tokens.log_probs.flags.writeable


ACTS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "report", "report"]), st.sets(NAMES, min_size=1)), max_size=40
)


@given(acts=ACTS, truncated=st.booleans())
def test_of_each_sequence_progress_has_what_was_reported_since_it_began(acts, truncated):
    """Also if the sequence was here before. A report may contain sequences that are not here any more."""
    progress, expected, reports = Progress(), dict[SequenceId, list[GeneratedTokens]](), 0
    for kind, names in acts:
        if kind == "report":
            reports += 1
            new = {
                name: drawn(1 + sum(name), reports, truncated=truncated and reports % 2 == 0) for name in sorted(names)
            }
            progress.add(TokenBlock({name: [tokens] for name, tokens in new.items()}))
            for name in names & expected.keys():
                expected[name].append(new[name])
        for name in names if kind != "report" else ():
            if kind == "begin" and name not in expected:
                progress.begin(name)
                expected[name] = []
            elif kind == "end" and name in expected:
                progress.end(name)
                del expected[name]
        assert set(progress.sequences) == expected.keys()
        for read in (progress.read(list(expected)), *(progress.read([name]) for name in expected)):
            for name, tokens in read.items():
                assert same(tokens, GeneratedTokens.join(expected[name]))


def test_progress_keeps_only_reports_that_are_not_older_than_all_its_sequences():
    """300 sequences, of which each is there for 8 reports."""
    progress = Progress()
    for number in range(300):
        progress.begin((number, 0))
        if number >= 8:
            progress.end((number - 8, 0))
        progress.add(TokenBlock({(at, 0): [drawn(5)] for at in range(max(0, number - 7), number + 1)}))
        assert len(progress._blocks) <= 8
    for number in range(292, 300):
        assert len(progress.read([(number, 0)])[number, 0]) == 5 * (300 - number)
        progress.end((number, 0))
    assert not progress._blocks
    progress.add(TokenBlock({(0, 0): [drawn(5)]}))
    assert not progress._blocks, "of no sequence"


@pytest.mark.parametrize(("sequences", "tokens", "most"), [(128, 30, 500), (16, 2000, 17_000)])
def test_what_is_reported_of_a_running_sequence_takes_hardly_more_memory_than_its_tokens(sequences, tokens, most):
    """8 bytes a token, and little for each part of a sequence: long ones are reported in a thousand parts. most: bytes per part."""
    names = [(group, 0) for group in range(sequences)]
    pickled, arrays = pack(TokenBlock({name: [drawn(tokens)] for name in names}))
    progress, reports = Progress(), 100
    for name in names:
        progress.begin(name)
    tracemalloc.start()
    try:
        for _ in range(reports):
            progress.add(unpack((pickled, [array.copy() for array in arrays])))
        assert tracemalloc.get_traced_memory()[0] <= most * sequences * reports
    finally:
        tracemalloc.stop()
    assert len(progress.read(names[:1])[names[0]]) == tokens * reports
