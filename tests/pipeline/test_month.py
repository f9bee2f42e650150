"""A run of 300,000 updates with losses, other sizes of the pool, a lane, evaluations and checkpoints, in virtual time.

`make test` plays 1,500 updates of it, `make soak` all.
"""

import resource

import pytest

from qwen35_trainer.pipeline.journal import recover
from tests.pipeline.month import LANES, PROMPTS, REPLICAS, UPDATES_PER_LOSS, Month, reachable_bytes
from tests.profiles import SOAK

UPDATES = 300_000 if SOAK else 1_500
MAX_JOURNAL_BYTES = 100_000
"""About twice what is recorded between two checkpoints."""
MAX_GROWTH = 1.2


def memory(month: Month) -> int:
    """Peak of the coordinator's memory over some updates with the whole pool: what it holds differs from tick to tick."""
    month.resizes = False
    month.resize(REPLICAS)
    month.run(until=month.trained + 50)
    sizes = []
    for _ in range(20):
        month.run(until=month.trained + 5)
        sizes.append(reachable_bytes(month.coordinator))
    month.resizes = True
    return max(sizes)


@pytest.mark.timeout(1200)
def test_a_month_needs_no_more_memory_at_its_end_and_every_prompt_has_one_turn():
    month = Month(UPDATES, seed=1)
    month.run(until=max(UPDATES // 100, 300))
    early, resident = memory(month), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    month.run(until=UPDATES - 300)
    late = memory(month)
    month.run()
    assert len(month.replicas) <= REPLICAS + LANES
    assert late <= MAX_GROWTH * early
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= MAX_GROWTH * resident
    assert month.peak_journal <= MAX_JOURNAL_BYTES
    assert month.lost >= UPDATES // UPDATES_PER_LOSS
    end = month.coordinator.snapshot
    assert end.batch == UPDATES
    pending = set(end.pending)
    assert all(turns == (position not in pending) for position, turns in enumerate(month.turns)), "one turn each"
    assert len(month.turns) >= UPDATES * PROMPTS
    assert recover(month.journal, UPDATES) == end
    assert month.evaluations["asked"] == UPDATES // 97
    assert month.evaluations["VersionEvaluated"] + month.evaluations["EvaluationSkipped"] == month.evaluations["asked"]
    assert month.evaluations["VersionEvaluated"] > 0
    assert month.coordinator.running == month.coordinator.waiting == 0
