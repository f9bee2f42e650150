"""Every write of a story fails once, and watches are cut or repeat old events; the story ends as it does undisturbed."""

from functools import partial

import pytest

from tests.controlplane.proxy import FAULTS, Line
from tests.controlplane.scenarios import LIFE, SCENARIOS
from tests.controlplane.sweep import Disturbance, Scenario, Sweep

DISTURBANCES: dict[str, Disturbance] = {
    **{f"every write is answered by {fault}": partial(Line.arm, fault=fault) for fault in FAULTS},
    "watches are cut": partial(Line.arm, cut_seconds=0.3),
    "watches replay": partial(Line.arm, replay=True),
}


def test_faults_change_nothing_in_the_end(sweep: Sweep):
    assert all(results.suffered for results in sweep.disturbed(LIFE, DISTURBANCES))


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_faults_change_nothing_at_the_end_of_any_act(sweep: Sweep, scenario: Scenario):
    assert all(results.suffered for results in sweep.disturbed(scenario, DISTURBANCES))
