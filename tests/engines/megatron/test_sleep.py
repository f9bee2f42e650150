"""What a sleeping engine holds on its device, what an engine that offloads holds, and that both train as others do."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.group import Group
from tests.distributed.samples import batch_of, policy_spec_of
from tests.distributed.test_parity import OFFLOAD, TEXT

pytestmark = pytest.mark.processes
SHARE = 0.1
"""Maximum share of its working set that a sleeping engine may hold."""
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor 2": ("dense", "FP32", {"tensor": 2, "sequence": True}),
    "pipeline 2, virtual 2": ("MoE", "BF16", {"pipeline": 2, "virtual": 2}),
    "expert 2": ("MoE", "BF16", {"expert": 2}),
}


def trained(groups: Callable[[int], Group], name: str, train: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """What each rank returns of two batches of a policy that is compared with a reference model."""
    kind, precision, layout = LAYOUTS[name]
    spec = policy_spec_of(2, "Loss", random=TEXT[kind], **train)
    spec["model"]["precision"] = precision
    samples = [batch_of(8, seed) for seed in (0, 1)]
    return groups(2).run("train", spec=spec, batches=samples, layout=layout, **options)


@pytest.mark.parametrize("name", ["tensor 2", "pipeline 2, virtual 2"])
def test_an_engine_that_offloads_and_sleeps_trains_as_one_that_does_neither(
    groups: Callable[[int], Group], name: str
) -> None:
    plain, away = trained(groups, name, {}), trained(groups, name, OFFLOAD, sleeps=True, group_numbers=3000)
    assert away[0]["metrics"] == plain[0]["metrics"]
    for part, values in plain[0]["published"].items():
        assert away[0]["published"][part].equal(values), part
    for rank in away:
        assert_asleep(rank["changes"])
        scored, computed = ([each for each in rank["passes"] if each["scored"] is kind] for kind in (True, False))
        assert len(computed) == 2
        assert {each["Optimizer"] for each in (*scored, *computed)} == {0}
        assert {each["Gradients"] for each in scored} == {0}
        assert all(each["Gradients"] > 0 and each["Trained"] > 0 and each["Reference"] == 0 for each in computed)
        assert all((each["Trained"] == 0) != (each["Reference"] == 0) for each in scored)
        assert any(each["Reference"] for each in scored)
    for rank, other in zip(away, plain, strict=True):
        assert 0 < max(rank["moments"]) <= max(other["moments"]) / 2, "those of one group at a time"
        assert all(each[part] > 0 for each in other["passes"] for part in ("Trained", "Reference", "Gradients"))


@pytest.mark.parametrize("away", [False, True], ids=["on the device", "offloaded"])
def test_what_is_offloaded_leaves_the_device_before_the_next_part_of_the_engine_is_built(
    groups: Callable[[int], Group], away: bool
) -> None:
    spec = policy_spec_of(1, "Loss", random=TEXT["dense"], **(OFFLOAD if away else {}))
    spec["model"]["precision"] = "BF16"
    [[gradients, optimizer, built]] = groups(1).run("memory_of_start", spec=spec)
    assert [each["Reference"] == 0 for each in (gradients, optimizer, built)] == [away] * 3
    assert [each["Gradients"] == 0 for each in (optimizer, built)] == [away] * 2
    assert (built["Optimizer"] == 0) == away


def test_an_engine_that_only_sleeps_trains_as_one_that_does_not(groups: Callable[[int], Group]) -> None:
    awake, asleep = trained(groups, "expert 2", {}), trained(groups, "expert 2", {}, sleeps=True)
    assert asleep[0]["metrics"] == awake[0]["metrics"]
    assert all(asleep[0]["published"][part].equal(values) for part, values in awake[0]["published"].items())
    for rank in asleep:
        assert_asleep(rank["changes"])


def assert_asleep(changes: list[Any]) -> None:
    assert len(changes) == 2
    for change in changes:
        assert change.before > 0
        assert change.after <= SHARE * change.before, f"{change.after} of {change.before} bytes"
