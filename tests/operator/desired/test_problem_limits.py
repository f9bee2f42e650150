"""A spec of the accepted size has few problems with short texts, whatever is wrong with it."""

import pytest

from qwen35_operator.desired import all_objects
from qwen35_operator.desired.problem_limits import MAX_KEY_BYTES, MAX_PROBLEMS, MAX_TEXT_BYTES, first_problems
from qwen35_operator.kube.trainings import MAX_SPEC_BYTES
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.manifest import Problem

HALF = MAX_SPEC_BYTES // 2
LONG = "v" * HALF
MANY = range(HALF // 16)
WRONG = {
    "a long volume and thousands of mounts of others": {
        "volumes": [{"name": LONG}],
        "containers": [{"name": "s", "image": "i", "volumeMounts": [{"mountPath": f"{number:x}"} for number in MANY]}],
    },
    "a long key with thousands of directives": {"dnsConfig": {LONG: {f"${number:x}": 0 for number in MANY}}},
    "a long key with thousands of values": {"dnsConfig": {LONG: [{"$": 0}] * (HALF // 8)}},
    "numbers in place of mappings": {"hostAliases": [0] * HALF},
    "a long label key in each term": {"affinity": {LONG: [{"matchLabels": {"/": ""}}] * (HALF // 32)}},
}


@pytest.mark.parametrize("spec", WRONG.values(), ids=WRONG)
def test_a_large_spec_with_many_problems_has_few_and_short_ones(make_training, spec) -> None:
    training = make_training({"pods.train": {"spec": spec}})
    problems = all_objects.problems(training, OperatorSettings())
    assert 1 <= len(problems) <= MAX_PROBLEMS + 1
    assert (
        max(len(text.encode()) for each in problems for text in (each.path, each.message, each.fix)) <= MAX_TEXT_BYTES
    )
    assert max(len(each.path) for each in problems) < 2 * MAX_KEY_BYTES


@pytest.mark.parametrize("count", [0, 1, MAX_PROBLEMS, MAX_PROBLEMS + 1, 100_000])
def test_all_problems_are_reported_up_to_a_number_and_one_that_says_that_there_are_more(count) -> None:
    numbers = []

    def problems():
        for number in range(count):
            numbers.append(number)
            yield Problem(f"spec.a[{number}]", "is wrong.", "Mend it.")

    shown = list(first_problems(problems()))
    assert len(numbers) <= MAX_PROBLEMS + 1
    if count > MAX_PROBLEMS:
        more = shown.pop()
        assert more.message == f"has more than {MAX_PROBLEMS} problems."
    assert [each.path for each in shown] == [f"spec.a[{number}]" for number in range(min(count, MAX_PROBLEMS))]
