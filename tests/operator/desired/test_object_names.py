"""Names that fit their limits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator.desired import object_names
from qwen35_trainer.contract.shared_names import config_name, control_name, history_name, progress_name

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
ATTEMPTS = st.integers(1, 999_999)


@given(name=NAMES, attempt=ATTEMPTS)
def test_a_job_has_a_name_that_kuberay_takes(name, attempt):
    job = object_names.job_name(name, attempt)
    assert len(job) <= 47
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job)


@given(training=NAMES, other=NAMES, attempts=st.tuples(ATTEMPTS, ATTEMPTS))
def test_no_two_attempts_share_a_name(training, other, attempts):
    first, second = (training, attempts[0]), (other, attempts[1])
    assert (object_names.job_name(*first) == object_names.job_name(*second)) == (first == second)


@given(first=NAMES, other=NAMES)
def test_no_two_trainings_share_a_config_map(first, other):
    def maps(name: str) -> set[str]:
        return {config_name(name), progress_name(name), control_name(name), history_name(name)}

    assert len(maps(first)) == 4
    assert first == other or not maps(first) & maps(other)


@given(name=NAMES)
def test_every_such_name_is_accepted(name, make_training):
    assert list(object_names.problems(make_training(name=name))) == []


@pytest.mark.parametrize("name", ["9b-grpo", "a.b", "a" * 41, "9." + "a" * 41])
def test_a_name_that_no_job_could_have_is_a_problem(name, make_training):
    problems = list(object_names.problems(make_training(name=name)))
    assert problems
    assert {problem.path for problem in problems} == {"metadata.name"}
    assert all(name in problem.message for problem in problems)


def test_the_rollout_pool_is_selected_by_training_and_pool():
    assert object_names.rollout_selector("demo") == "rl.qwen35.io/training=demo,rl.qwen35.io/pool=rollout"
