"""Equal strings are one object, and strings that tenants make up are not kept."""

import tracemalloc

from qwen35_operator.kube.kinds import RAY_CLUSTER, RAY_JOB
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.shared_strings import MAX_CHARACTERS, MAX_STRINGS, shared
from tests.operator.kube import raw_objects


def test_equal_strings_are_the_same_object() -> None:
    assert shared("-".join(["node", "7"])) is shared("-".join(["node", "7"]))


def test_a_long_string_is_returned_and_not_kept() -> None:
    long = "x" * (MAX_CHARACTERS + 1)
    assert shared(long) is long
    assert shared(long[:-1] + "x") is not long


def test_any_number_of_different_strings_takes_bounded_memory() -> None:
    tracemalloc.start()
    try:
        for number in range(3 * MAX_STRINGS):
            shared(f"{number:0100}")
        assert tracemalloc.get_traced_memory()[0] < 2 * MAX_STRINGS * 300
    finally:
        tracemalloc.stop()


def test_objects_with_new_texts_in_every_version_leave_nothing_behind() -> None:
    """A tenant can change the objects of a training in a loop."""
    tracemalloc.start()
    try:
        for number in range(100):
            text = f"{number:0100000}"
            record(RAY_CLUSTER, raw_objects.ray_cluster(groups=[{"groupName": text}], status={"state": text}))
            record(RAY_JOB, raw_objects.ray_job(status={"jobStatus": text, "jobDeploymentStatus": text}))
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
