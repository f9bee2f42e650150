"""Router replay in whole runs: every token trains with the experts that the rollout chose, and a lost replica costs only those."""

from typing import Any

import pytest

from qwen35_trainer.progress.records import UpdateRecord

from .threads import Fault

MOE = {
    "model.source.random": {"hiddenSize": 32, "intermediateSize": 32, "fullAttentionInterval": 2, "layers": 2}
    | {"characters": "0123456789>=", "experts": 4},
    "train.router": {"replay": True},
    "train.updates": 4,
}


def shares(ended: Any) -> list[float | None]:
    return [record.replayed_token_share for record in ended.of(UpdateRecord)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="asynchronous"),
        pytest.param(
            {
                "train.batch": {
                    "promptsPerUpdate": 4,
                    "microBatchSequences": 16,
                    "removePadding": True,
                    "sharePrompts": True,
                }
            },
            id="shared prompts",
        ),
    ],
)
def test_every_input_token_of_a_run_is_computed_with_the_experts_of_the_rollout(
    local, write, tmp_path, changes
) -> None:
    ended = local.run(write(tmp_path, MOE | changes))
    assert ended.code == 0, ended.err
    assert shares(ended) == [1.0] * 4


def test_without_router_replay_records_say_nothing_about_it(local, write, tmp_path) -> None:
    ended = local.run(write(tmp_path, MOE | {"train.router": {}, "train.updates": 2}))
    assert ended.code == 0, ended.err
    assert shares(ended) == [None] * 2


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault.lose("RolloutWorker", "exchange", at=9), id="lost"),
        pytest.param(Fault.lose("RolloutWorker", "stored_choices", at=2), id="lost when its choices are claimed"),
    ],
)
def test_a_run_that_loses_a_replica_trains_with_the_experts_that_remain(local, write, tmp_path, fault) -> None:
    """Those of sequences that had finished are lost with it; the trainer's routers choose for them."""
    running = local.start("run", write(tmp_path, MOE | {"train.updates": 8}), output=tmp_path / "out", faults=(fault,))
    ended = running.end()
    assert fault.fired.is_set()
    assert ended.code == 0, ended.err
    assert len(shares(ended)) == 8
    assert shares(ended)[-1] == 1.0
    assert all(share is not None and 0.0 <= share <= 1.0 for share in shares(ended))
