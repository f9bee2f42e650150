"""What a job leaves in a process that trains with megatron-core."""

from collections.abc import Callable

import pytest

from tests.distributed.group import Group
from tests.distributed.samples import batch_of, spec_of

pytestmark = pytest.mark.processes
THREADS = 8
"""Maximum number of threads for connections, of which the group of a job that makes no engine has 3."""


def test_the_connections_of_an_engine_end_with_its_job(groups: Callable[[int], Group]) -> None:
    for _ in range(2):
        groups(2).run("train", spec=spec_of(2, engine="Megatron"), batches=[batch_of(8, 0, supervised=True)])
    assert max(groups(2).run("threads_of_connections")) <= THREADS
