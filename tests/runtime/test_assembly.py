import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.picture_processor import Patching, PictureProcessor
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import ENVIRONMENT_VERSION, Completed, EndReason, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.assembly import BoundBroken, ScoredGroup, assemble, assemble_supervised


def sequence(*versions: int) -> Completed:
    length = len(versions)
    tokens = GeneratedTokens(
        np.arange(length, dtype=np.int32), np.full(length, -0.5, dtype=np.float32), VersionRuns.of(versions)
    )
    return Completed((0, 0), tokens, EndReason.STOP)


def group(number: int, *sequences: Completed, rewards: tuple[float | None, ...] | None = None) -> ScoredGroup:
    scores = tuple(CombinedScore(reward, {}, {}) for reward in rewards or (1.0,) * len(sequences))
    return ScoredGroup(
        number, EncodedPrompt(Prompt("s/0", "s", "question"), np.array([7, 8], np.int32)), sequences, scores
    )


def test_samples_of_a_group_stand_together_with_their_prompt_before_each():
    batch, _ = assemble(
        [group(4, sequence(0), sequence(0, 0)), group(2, sequence(0))], version=0, max_lag=0, mask_old=False, updates=1
    )
    assert batch.group.tolist() == [4, 4, 2]
    assert batch.prompts.tolist() == [7, 8, 7, 8, 7, 8]
    assert batch.response_lengths.tolist() == [1, 2, 1]


def test_candidates_stand_in_the_order_of_the_tokens_and_there_are_none_without_truncation():
    plain, truncated = sequence(0), sequence(0, 0)
    candidates = Candidates(np.array([1, 2], np.int32), np.array([5, 6, 7], np.int32))
    truncated = replace(truncated, tokens=replace(truncated.tokens, candidates=candidates))
    mixed, _ = assemble([group(0, plain, truncated)], version=0, max_lag=0, mask_old=False, updates=1)
    assert mixed.candidates is not None
    assert mixed.candidates.counts.tolist() == [0, 1, 2]
    assert mixed.candidates.ids.tolist() == [5, 6, 7]
    without, _ = assemble([group(0, plain, plain)], version=0, max_lag=0, mask_old=False, updates=1)
    assert without.candidates is None


def test_lags_are_counted_by_trained_token():
    _, age = assemble([group(0, sequence(1, 2, 3), sequence(3))], version=3, max_lag=2, mask_old=False, updates=1)
    assert age.histogram == {0: 2, 1: 1, 2: 1}
    assert age.masked == 0


def test_a_token_beyond_the_bound_is_never_trained_unless_masked():
    with pytest.raises(BoundBroken, match="lag 3 in a batch of version 4; the bound is 2"):
        assemble([group(0, sequence(1, 4))], version=4, max_lag=2, mask_old=False, updates=1)


def test_masking_leaves_out_the_old_tokens_alone():
    batch, age = assemble([group(0, sequence(1, 3, 4))], version=4, max_lag=2, mask_old=True, updates=1)
    assert batch.trainable.tolist() == [False, True, True]
    assert (age.histogram, age.masked) == ({0: 1, 1: 1}, 1)


def test_truncated_responses_can_be_left_out_and_keep_their_rewards():
    groups = [group(0, replace(sequence(0, 0), reason=EndReason.LENGTH), sequence(0), rewards=(0.25, 1.0))]
    batch, age = assemble(groups, version=0, max_lag=0, mask_old=False, updates=1, mask_truncated=True)
    assert batch.trainable.tolist() == [False, False, True]
    assert (batch.rewards.tolist(), batch.valid.tolist()) == ([0.25, 1.0], [True, True])
    assert age.histogram == {0: 1}
    kept, _ = assemble(groups, version=0, max_lag=0, mask_old=False, updates=1)
    assert kept.trainable.all()


def test_the_greedy_response_of_each_group_is_marked_and_does_not_train():
    groups = [group(0, sequence(0), sequence(0, 0)), group(1, sequence(0), sequence(0), sequence(0))]
    batch, _ = assemble(groups, version=0, max_lag=0, mask_old=False, updates=1, greedy_last=True)
    assert batch.baseline.tolist() == [False, True, False, False, True]
    assert batch.trainable.tolist() == [True, False, False, True, True, False]
    assert batch.valid.all()
    plain, _ = assemble(groups, version=0, max_lag=0, mask_old=False, updates=1)
    assert plain.baseline is None


def test_tokens_of_the_environment_never_train_and_have_no_lag():
    env = ENVIRONMENT_VERSION
    batch, age = assemble([group(0, sequence(3, env, env, 4))], version=4, max_lag=1, mask_old=False, updates=1)
    assert batch.trainable.tolist() == [True, False, False, True]
    assert (age.histogram, age.masked) == ({0: 1, 1: 1}, 0)
    _, age = assemble([group(0, sequence(1, env, 4))], version=4, max_lag=1, mask_old=True, updates=1)
    assert (age.histogram, age.masked) == ({0: 1}, 1)
    with pytest.raises(BoundBroken, match="a token of lag 3"):
        assemble([group(0, sequence(1, env, 4))], version=4, max_lag=1, mask_old=False, updates=1)


def test_a_sample_without_a_score_trains_nothing_and_does_not_count_as_zero():
    batch, age = assemble(
        [group(0, sequence(0, 0), sequence(0), rewards=(None, 0.5))], version=0, max_lag=0, mask_old=False, updates=1
    )
    assert batch.trainable.tolist() == [False, False, True]
    assert batch.valid.tolist() == [False, True]
    assert batch.rewards.tolist() == [0.0, 0.5]
    assert age.histogram == {0: 1}


@given(
    versions=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5).map(sorted), min_size=1, max_size=5),
    bound=st.integers(0, 6),
)
def test_every_token_is_either_trained_within_the_bound_or_counted_as_masked(versions, bound):
    batch, age = assemble(
        [group(0, *(sequence(*born) for born in versions))], version=6, max_lag=bound, mask_old=True, updates=1
    )
    assert sum(age.histogram.values()) == batch.trainable.sum()
    assert sum(age.histogram.values()) + age.masked == batch.responses.size
    assert all(lag <= bound for lag in age.histogram)


def test_a_supervised_example_splits_before_its_first_target():
    prompt = Prompt("s/0", "s", "question", "answer")
    batch = assemble_supervised(
        [
            SupervisedExample.of(prompt, (5, 6, 7, 8), (False, False, True, True)),
            SupervisedExample.of(prompt, (5, 6, 7), (False, True, False)),
        ],
        updates=1,
    )
    assert (batch.prompts.tolist(), batch.responses.tolist()) == ([5, 6, 5], [7, 8, 6, 7])
    assert batch.trainable.tolist() == [True, True, True, False]


def test_a_first_token_that_is_a_target_has_nothing_before_it_and_is_left_to_the_prompt():
    batch = assemble_supervised([SupervisedExample.of(Prompt("s/0", "s", "q"), (5, 6), (True, True))], updates=1)
    assert (batch.prompts.tolist(), batch.responses.tolist(), batch.trainable.tolist()) == ([5], [6], [True])


def seeing(image: bytes) -> SupervisedExample:
    pictures = PictureSet(PictureProcessor(None, Patching(4, 2, 2, (64, 4096))), (image,), (), "prompt s/1")
    return SupervisedExample.of(Prompt("s/1", "s", "q"), (5, 6), (False, True), pictures)


def test_pictures_travel_with_the_batch_and_text_alone_has_none():
    plain = SupervisedExample.of(Prompt("s/0", "s", "q"), (5, 6), (False, True))
    image = io.BytesIO()
    Image.new("RGB", (16, 8)).save(image, "PNG")
    assert assemble_supervised([plain, plain], updates=1).pictures is None
    none, shown = assemble_supervised([plain, seeing(image.getvalue())], updates=1).pictures
    assert none is None
    assert shown.read().grids.tolist() == [[1, 2, 4]]
    assert shown.read().patches.shape == (8, 3 * 2 * 4 * 4)


def test_pictures_of_a_group_travel_with_each_of_its_samples():
    pictures = seeing(b"a picture").pictures
    text, shown = group(0, sequence(0), sequence(0)), group(1, sequence(0), sequence(0))
    shown = replace(shown, prompt=replace(shown.prompt, pictures=pictures))
    batch, _ = assemble([text, shown], version=0, max_lag=0, mask_old=False, updates=1)
    assert batch.pictures == (None, None, pictures, pictures)
    assert assemble([text], version=0, max_lag=0, mask_old=False, updates=1)[0].pictures is None
