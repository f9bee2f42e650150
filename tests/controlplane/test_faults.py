"""Every write of a story fails once, and watches are cut or repeat old events; the story ends as it does undisturbed.

In memory every story meets every disturbance. On the real control plane one story with all acts meets a lost answer and cut
watches, and in `make soak` everything.
"""

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
REAL = ("every write is answered by lost", "watches are cut")


@pytest.mark.parametrize("scenario", [LIFE, *SCENARIOS], ids=lambda scenario: scenario.name)
def test_faults_change_nothing_at_the_end_of_any_act(memory_sweep: Sweep, scenario: Scenario):
    memory_sweep.calm([scenario])
    assert all(results.suffered for results in memory_sweep.disturbed(scenario, DISTURBANCES))


def test_faults_change_nothing_in_the_end(sweep: Sweep):
    chosen = {name: DISTURBANCES[name] for name in REAL}
    assert all(results.suffered for results in sweep.disturbed(LIFE, chosen))


@pytest.mark.soak
@pytest.mark.parametrize("scenario", [LIFE, *SCENARIOS], ids=lambda scenario: scenario.name)
def test_faults_change_nothing_at_the_end_of_any_act_on_the_real_control_plane(sweep: Sweep, scenario: Scenario):
    assert all(results.suffered for results in sweep.disturbed(scenario, DISTURBANCES))
