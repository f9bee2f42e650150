"""Every write of every story fails once, and watches are cut or tell old news again; in the end all is as it should be."""

from functools import partial

import pytest

from tests.controlplane.proxy import FAULTS, Line
from tests.controlplane.sweep import Disturbance, Sweep, Tale
from tests.controlplane.tales import TALES

DISTURBANCES: dict[str, Disturbance] = {
    **{f"every write is answered by {fault}": partial(Line.arm, fault=fault) for fault in FAULTS},
    "watches are cut": partial(Line.arm, cut_seconds=0.3),
    "watches replay": partial(Line.arm, replay=True),
}


@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.name)
def test_faults_change_nothing_in_the_end(sweep: Sweep, tale: Tale):
    assert all(sweep.disturbed(tale, DISTURBANCES))
