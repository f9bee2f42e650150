"""Versions of tokens, stored as runs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.rollout.version_runs import VersionRuns

VERSIONS = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), max_size=8).map(
    lambda runs: [version for version, count in runs for _ in range(count)]
)


@given(VERSIONS)
def test_runs_contain_the_version_of_each_token(versions):
    runs = VersionRuns.of(versions)
    assert runs.tolist() == np.asarray(runs).tolist() == versions
    assert np.asarray(runs).dtype == np.int32
    assert len(runs) == len(versions)


@given(VERSIONS)
def test_no_run_is_empty_and_neighbours_differ(versions):
    runs = VersionRuns.of(versions).runs
    assert all(count > 0 for _, count in runs)
    assert all(left[0] != right[0] for left, right in itertools.pairwise(runs))


@given(st.lists(VERSIONS, max_size=5))
def test_parts_join_to_the_versions_of_the_whole(parts):
    whole = [version for part in parts for version in part]
    assert VersionRuns.join(map(VersionRuns.of, parts)) == VersionRuns.of(whole)


@given(VERSIONS, st.integers(-50, 50) | st.none(), st.integers(-50, 50) | st.none())
def test_a_part_has_the_versions_of_its_tokens(versions, start, end):
    assert VersionRuns.of(versions)[start:end] == VersionRuns.of(versions[start:end])


def test_a_part_with_gaps_is_refused():
    with pytest.raises(ValueError, match="has step 1, not 2"):
        VersionRuns.of([0, 0, 1])[::2]


def test_the_memory_of_an_array_cannot_be_shared():
    with pytest.raises(ValueError, match="no array that could be shared"):
        np.array(VersionRuns.of([0, 1]), copy=False)
