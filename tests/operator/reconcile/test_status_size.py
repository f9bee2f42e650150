"""A status fits into a request and into etcd, whatever tenants write into it, and in every language."""

import json

import pytest

from qwen35_operator.api.v1alpha1 import Attempt, Fault, TrainingStatus
from qwen35_operator.reconcile.attempts import FULL_MESSAGES, MAX_ATTEMPTS, MAX_MESSAGE_BYTES, MAX_OLD_MESSAGE_BYTES
from tests.operator.reconcile.world import World

ETCD_LIMIT_BYTES = 1536 * 1024
"""etcd's default for a request. The API server accepts requests of twice this size."""
LETTERS = {"ASCII": "x", "Chinese": "训", "emoji": "🙂", "control characters": "\x01", "markup": "<"}


def failed(number: int, letter: str) -> Attempt:
    """A failed attempt as earlier releases recorded it, with as many characters as the definition permits."""
    time = "2026-01-01T00:00:00Z"
    fault = Fault(pool="head", pod="p" * 253, reason="R" * 128, message=letter * 1024, time=time)
    return Attempt(
        number=number,
        job=f"{'j' * 40}-{number}",
        outcome="Failed",
        counted=True,
        reason="R" * 128,
        message=letter * 4096,
        startTime=time,
        endTime=time,
        update=number,
        fault=fault,
    )


@pytest.mark.parametrize("letter", LETTERS.values(), ids=LETTERS)
def test_the_status_with_all_attempts_fits(letter):
    world = World()
    world.edit(failurePolicy={"maxRestarts": 100})
    attempts = tuple(failed(number, letter) for number in range(1, MAX_ATTEMPTS + 1))
    world.status = TrainingStatus(attempts=attempts, restarts=64)
    world.wait(4000)  # the longest backoff is an hour
    world.settle(4)
    number = max(job.attempt for job in world.jobs.values())
    assert number == MAX_ATTEMPTS + 1
    world.report("Failed", update=number, reason="DataError", message=letter * 4096, phase=letter * 200)
    world.fault("train", "Error", 1)
    world.reconcile()

    written = world.status.model_dump(mode="json", exclude_none=True)
    assert len(written["attempts"]) == MAX_ATTEMPTS
    # Go's encoder writes & < > and control characters as six bytes each, Python's every character beyond ASCII.
    stored = json.dumps(written, ensure_ascii=False).replace("<", "\\u003c").encode()
    assert max(len(stored), len(json.dumps(written))) < ETCD_LIMIT_BYTES / 2
    newest = world.status.attempts[-1]
    assert (newest.number, newest.outcome) == (number, "Failed")
    for attempt in world.status.attempts:
        limit = MAX_MESSAGE_BYTES if attempt.number > number - FULL_MESSAGES else MAX_OLD_MESSAGE_BYTES
        assert limit - 8 < len(attempt.message.encode()) <= limit
