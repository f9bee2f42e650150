"""Every write of a story fails once, and watches are cut or repeat old events; the story ends as it does undisturbed."""

from functools import partial

import pytest

from tests.controlplane.proxy import FAULTS, Line
from tests.controlplane.sweep import Disturbance, Sweep, Tale
from tests.controlplane.tales import LIFE, TALES

DISTURBANCES: dict[str, Disturbance] = {
    **{f"every write is answered by {fault}": partial(Line.arm, fault=fault) for fault in FAULTS},
    "watches are cut": partial(Line.arm, cut_seconds=0.3),
    "watches replay": partial(Line.arm, replay=True),
}


def test_faults_change_nothing_in_the_end(sweep: Sweep):
    assert all(told.suffered for told in sweep.disturbed(LIFE, DISTURBANCES))


@pytest.mark.soak
@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.name)
def test_faults_change_nothing_at_the_end_of_any_act(sweep: Sweep, tale: Tale):
    assert all(told.suffered for told in sweep.disturbed(tale, DISTURBANCES))
