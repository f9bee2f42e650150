"""Chosen experts on their way to the train ranks: in a real Ray, where replica, driver and rank are processes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, OwnerDiedError

from qwen35_trainer.runtime import stored_choices
from qwen35_trainer.runtime.stored_choices import StoredChoices, StoredPart
from tests.patience import PATIENCE

SCRIPT = """
import json
import time
import numpy as np
import ray
from qwen35_trainer.runtime.local_node import only_needed_services
from qwen35_trainer.runtime.stored_choices import StoredChoices, StoredPart, fetched
from tests.patience import PATIENCE

with only_needed_services(1):
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1, object_store_memory=100_000_000)

@ray.remote(num_cpus=0)
class Replica:
    async def stored_choices(self, number):
        return [ray.put(np.full((rows, 2, 2), number, np.uint8)) for rows in (3, 4)]

@ray.remote(num_cpus=0)
class Rank:
    def read(self, choices):
        return [None if each is None else [(rows.tolist(), end) for rows, end in each.read()] for each in fetched(choices, 20)]

first, second, rank = Replica.remote(), Replica.remote(), Rank.remote()
calls = [first.stored_choices.remote(3), second.stored_choices.remote(5)]
assert all(isinstance(table, ray.ObjectRef) for table in ray.get(calls[0])), "tables do not come to the driver"
both = StoredChoices((StoredPart(calls[0], 0, 0, 2), StoredPart(calls[1], 1, 2, 5, dropped=1)))
of_second = StoredChoices((StoredPart(calls[1], 0, 0, 1),))
sent = [both, None, StoredChoices(), of_second]
answers = [ray.get(rank.read.remote(ray.put(sent)))]
ray.kill(first)
# Until Ray has noticed, a table that is in the store of the rank's node can still be read.
deadline = time.monotonic() + PATIENCE
while len(answers) == 1 or (answers[-1][0] is not None and time.monotonic() < deadline):
    answers[1:] = [ray.get(rank.read.remote(ray.put(sent)))]
print(json.dumps(answers), flush=True)
"""


def test_a_rank_reads_the_rows_of_its_samples_and_none_of_a_sequence_whose_replica_is_lost() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    before, after = json.loads(ran.stdout.splitlines()[-1])
    threes, fives = ([[[number] * 2] * 2] for number in (3, 5))
    assert before == [[[threes * 3, 2], [fives * 3, 5]], None, None, [[fives * 3, 1]]]
    assert after == [None, None, None, [[fives * 3, 1]]]


class Reference:
    """Ray's reference to a value, to an error, or to what never arrives (LATE)."""

    def __init__(self, value: Any) -> None:
        self.value = value


LATE = object()


@pytest.fixture
def objects(monkeypatch) -> SimpleNamespace:
    """Plays Ray's object store, and records for how long each call waited for what never arrives, in seconds."""
    waits: list[float] = []

    def value(reference: Reference, timeout: float) -> Any:
        if reference.value is LATE:
            waits.append(timeout)
            raise GetTimeoutError("late")
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def get(references: Any, timeout: float) -> Any:
        if isinstance(references, list):
            return [value(each, timeout) for each in references]
        return value(references, timeout)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    return SimpleNamespace(waits=waits)


@pytest.mark.parametrize("value", [OwnerDiedError("00" * 28, b"", ""), LATE], ids=["lost", "late"])
@pytest.mark.parametrize("what", ["the answer", "the table"])
def test_what_does_not_arrive_costs_its_own_sequence_and_a_part_of_the_time(objects, value, what, caplog) -> None:
    good = Reference([Reference(np.arange(6)), Reference(np.arange(4))])
    bad = Reference(value) if what == "the answer" else Reference([Reference(value)])
    calls = [(good, 0), (bad, 0), (good, 1)]
    choices = [StoredChoices((StoredPart(call, index, 0, 2, dropped=1),)) for call, index in calls]
    read = stored_choices.fetched(choices, 8.0)
    assert [None if each is None else [(rows.tolist(), end) for rows, end in each.read()] for each in read] == [
        [([0, 1, 2, 3, 4], 2)],
        None,
        [([0, 1, 2], 2)],
    ]
    assert "1 of 3 tables of chosen experts are lost or late" in caplog.text
    if value is LATE and what == "the answer":
        assert max(objects.waits) <= 4.0, "tables of other replicas still have to arrive"


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), share=st.floats(0.0, 1.0))
def test_choices_are_cut_with_their_tokens(lengths: list[int], share: float) -> None:
    choices, ends = StoredChoices(), np.cumsum(lengths).tolist()
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        choices = choices.with_part(StoredPart(None, number, end - length, end))
    kept = round(share * ends[-1])
    once = choices.up_to(kept)
    assert once.up_to(kept) == once
    assert choices.up_to(min(kept + 1, ends[-1])).up_to(kept) == once
    positions = [each for part in once.parts for each in range(part.first, part.end)]
    assert positions == list(range(kept))
    for part in once.parts:
        assert part.end + part.dropped == ends[part.index]
