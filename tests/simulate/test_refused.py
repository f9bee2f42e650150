"""Loads that would never end, or mean nothing, are refused with every inequality that fails."""

from typing import Any

import pytest

from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.workload import (
    BatchPolicy,
    BoundedPareto,
    Faults,
    LaneSpeed,
    Lognormal,
    MissedDeadlinePolicy,
    PrefillCost,
    PublicationCost,
    Replayed,
    ReplicaGroup,
    ReplicaSpeed,
    TrainSpeed,
    Turns,
    Workload,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"staleness_threshold": 5}, "staleness_threshold 5 > max_version_lag 4"),
        ({"prompts_per_batch": 0}, "prompts_per_batch 0 < 1"),
        ({"group_size": 0}, "group_size 0 < 1"),
        ({"batches_per_version": 0}, "batches_per_version 0 < 1"),
        ({"batches": 12}, "batches 12 <= warm_up 12"),
        ({"pools": ()}, "pools have 0 replicas < 1"),
        ({"pools": (ReplicaGroup(0),)}, "pools have 0 replicas < 1"),
        ({"signal": 0.0, "dynamic_sampling": True}, "every group is filtered"),
        ({"group_size": 1, "dynamic_sampling": True}, "group_size 1 < 2 with dynamic_sampling"),
        ({"signal": 1.5}, "signal 1.5"),
        ({"correlation": -0.1}, "correlation -0.1"),
        ({"correlation": 0.5, "lengths": Replayed(((5,),))}, "correlation > 0 with replayed lengths"),
        ({"drift": 0}, "drift 0 <= 0"),
        ({"window_fraction": 0}, "window_fraction 0"),
        ({"elastic": ((10, 2), (5, 3))}, "ascend"),
        ({"elastic": ((10, 0),)}, "the last size 0 < 1"),
        ({"elastic": ((10, -1), (20, 1))}, "replicas < 0"),
        ({"adaptive": True, "policy": BatchPolicy.FIFO}, "adaptive with policy fifo"),
        ({"on_missed_deadline": MissedDeadlinePolicy.DISCARD, "policy": BatchPolicy.COMPLETION}, "only deadline-first"),
        ({"faults": Faults(mtbf=100, keep=False)}, "it would never finish"),
    ],
)
def test_a_workload_that_cannot_end_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        Workload(**fields)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (ReplicaSpeed, {"slots": 0}, "slots 0 < 1"),
        (ReplicaSpeed, {"base": -1}, "base -1 < 0"),
        (ReplicaSpeed, {"base": 0, "per_sequence": 0}, "a step takes no time"),
        (ReplicaSpeed, {"speed": 0}, "speed 0 <= 0"),
        (ReplicaGroup, {"count": -1}, "count -1 < 0"),
        (LaneSpeed, {"replicas": 0, "after_tokens": 0}, "lane.replicas 0 < 1; lane.after_tokens 0 < 1"),
        (LaneSpeed, {"slots": 0}, "slots 0 < 1"),
        (TrainSpeed, {"units": 0}, "trainer.units 0 < 1"),
        (TrainSpeed, {"seconds_per_token": 0}, "trainer.seconds_per_token 0 <= 0"),
        (PublicationCost, {"pause": -1, "transfer": -2}, "publication.transfer -2 < 0; publication.pause -1 < 0"),
        (PrefillCost, {"tokens_per_second": 0}, "prefill.tokens_per_second 0 <= 0"),
        (Turns, {"count": 0, "latency": -1}, "turns.count 0 < 1; turns.latency -1 < 0"),
        (Lognormal, {"cv": -1, "floor": 5, "cap": 4}, "lengths.cv -1 < 0; lengths.cap 4 < lengths.floor 5"),
        (BoundedPareto, {"alpha": 0}, "lengths.alpha 0 <= 0"),
        (Replayed, {"prompts": ()}, "lengths.prompts is empty"),
        (Replayed, {"prompts": ((5, 0),)}, "lengths.prompts has 0 < 1"),
        (Faults, {"mtbf": 0, "mttr": -1}, "faults.mtbf 0 <= 0; faults.mttr -1 < 0"),
        (Faults, {"times": ((-1.0, 0),)}, "faults.times -1.0 < 0"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(make: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        make(**fields)
    assert message in str(refused.value)


def test_all_problems_are_listed_together() -> None:
    with pytest.raises(ValueError, match=r"staleness_threshold 9 > .*batches 5 <= warm_up 12.*drift -1 <= 0"):
        Workload(staleness_threshold=9, batches=5, drift=-1)


def test_signal_that_is_too_rare_ends_the_run_with_the_reason() -> None:
    workload = Workload(
        lengths=Lognormal(10, 0),
        prompts_per_batch=1,
        group_size=2,
        signal=1e-9,
        dynamic_sampling=True,
        batches=1,
        warm_up=0,
    )
    with pytest.raises(ValueError, match="too rare for dynamic_sampling"):
        simulate(workload)
