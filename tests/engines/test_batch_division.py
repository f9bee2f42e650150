"""Which samples' tokens each data-parallel rank gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.engines.batch_division import ONE_SHARE, BatchDivision
from qwen35_trainer.engines.train_batch import TrainBatch

DIVISIONS = st.builds(
    BatchDivision,
    shares=st.integers(1, 5),
    sequences=st.integers(1, 4),
    max_tokens=st.none() | st.integers(1, 60),
    packed=st.booleans(),
    whole_masks=st.booleans(),
)


def some_candidates(tokens: int) -> Candidates:
    """None, one or two for each token."""
    counts = (np.arange(tokens) % 3).astype(np.int32)
    return Candidates(counts, np.arange(counts.sum(), dtype=np.int32))


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Every token is another number, so that a wrong place shows."""
    updates = draw(st.integers(1, 3))
    samples = updates * draw(st.integers(1, 5))
    prompts, responses = (np.array(draw(st.lists(st.integers(1, 9), min_size=samples, max_size=samples))) for _ in "ab")
    tokens = int(responses.sum())
    return TrainBatch(
        prompts=np.arange(prompts.sum(), dtype=np.int32),
        prompt_lengths=prompts,
        responses=np.arange(tokens, dtype=np.int32) + 1000,
        response_lengths=responses,
        trainable=np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))),
        log_probs=-np.arange(tokens, dtype=np.float32),
        candidates=draw(st.sampled_from([None, some_candidates(tokens)])),
        rewards=np.arange(samples, dtype=np.float32),
        group=np.arange(samples) // 2,
        updates=updates,
    )


def by_sample(batch: TrainBatch, values: np.ndarray) -> dict[int, list[float]]:
    """Sample → its part of packed values of responses."""
    held = batch.held_samples
    parts = np.split(values, np.cumsum(batch.response_lengths[held])[:-1])
    return {sample: part.tolist() for sample, part in zip(held.tolist(), parts, strict=False)}


@given(batch=batches(), division=DIVISIONS)
def test_each_sample_is_in_one_share_with_its_own_tokens(batch, division):
    shares = list(division.shares_of(batch))
    assert len(shares) == division.shares
    assert sorted(np.concatenate([share.held_samples for share in shares]).tolist()) == list(range(batch.samples))
    for name in ("responses", "trainable", "log_probs"):
        divided = [by_sample(share, getattr(share, name)) for share in shares]
        assert {n: part for share in divided for n, part in share.items()} == by_sample(batch, getattr(batch, name))
    for share in shares:
        assert (share.candidates is None) == (batch.candidates is None)
        if share.candidates is not None and batch.candidates is not None:
            tokens = share.responses - 1000
            assert share.candidates.counts.tolist() == batch.candidates.counts[tokens].tolist()
            assert share.candidates.ids.tolist() == batch.candidates.take(tokens.astype(np.int64)).ids.tolist()
        whole = np.split(batch.prompts, np.cumsum(batch.prompt_lengths)[:-1])
        assert share.prompts.tolist() == [token for n in share.held_samples for token in whole[n].tolist()]


@given(batch=batches(), division=DIVISIONS)
def test_a_share_has_the_samples_of_its_micro_batches_in_every_update(batch, division):
    for number in range(division.shares):
        planned = [part for update in batch.parts for part in division.micro_batches(batch, update)[number]]
        assert division.share(batch, number).held_samples.tolist() == sorted(np.concatenate(planned).tolist())


@given(batch=batches(), division=DIVISIONS)
def test_every_share_plans_and_counts_as_the_whole_batch_does(batch, division):
    for share in division.shares_of(batch):
        assert share.trained.tolist() == batch.trained.tolist()
        assert share.rewards.tolist() == batch.rewards.tolist()
        for update in batch.parts:
            own, whole = division.micro_batches(share, update), division.micro_batches(batch, update)
            assert [[part.tolist() for part in each] for each in own] == [
                [part.tolist() for part in each] for each in whole
            ]


@given(batch=batches(), division=DIVISIONS)
def test_only_an_advantage_function_of_the_user_brings_the_masks_of_all_samples(batch, division):
    for share in division.shares_of(batch):
        sent = share is not batch and division.whole_masks
        assert (share.whole_mask is not None) == sent
        assert not sent or share.whole_mask.tolist() == batch.trainable.tolist()


def three_samples(**fields) -> TrainBatch:
    ones, tokens = np.ones(3, dtype=np.int64), np.arange(3, dtype=np.int32)
    return TrainBatch(tokens, ones, tokens, ones, np.ones(3, dtype=np.bool_), **fields)


def test_pictures_go_with_their_samples():
    picture = PictureArrays(np.zeros((4, 3)), np.array([[1, 2, 2]]), np.empty((0, 0)), np.empty((0, 3)))
    batch = three_samples(pictures=(picture, None, picture))
    first, second = (batch.share(np.array(samples)) for samples in ([0, 1], [2]))
    assert [each is not None for each in first.pictures] == [True, False, False]
    assert [each is not None for each in second.pictures] == [False, False, True]


def test_one_share_is_the_batch_itself():
    batch = three_samples()
    assert ONE_SHARE.share(batch, 0) is batch
    assert list(ONE_SHARE.shares_of(batch)) == [batch]


def test_a_share_of_a_share_is_refused():
    share = three_samples().share(np.array([0, 2]))
    with pytest.raises(AssertionError, match="from a whole batch"):
        share.share(np.array([0]))
    with pytest.raises(AssertionError, match="needs the counts of the whole batch"):
        replace(share, counts=None)
