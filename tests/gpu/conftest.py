"""One process, with one NVIDIA GPU and without. Where there is none, the same tests run on the host, as far as they can.

On the host they only check the test code itself, so `make test` runs every second combination, which includes each value of each
parameter, and `make soak` runs all. tests/distributed/test_parity.py compares what the engine computes on the host.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.profiles import SOAK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not SOAK and _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    if call is None or Path(__file__).parent not in item.path.parents or call.params.get("device") != "cpu":
        return False
    if len(list(item.iter_markers("parametrize"))) < 2:
        return False
    # pytest numbers the combinations: 0 and 1 pair the first value of one parameter with both of the other, 2 and 3 the second.
    return next(number for name, number in call.indices.items() if name != "device") % 4 in (1, 2)


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first device of the kind; this process is the whole group, for no longer than a module."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    backend = "cpu:gloo,cuda:nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(request.param, 0)
    dist.destroy_process_group()
    gc.collect()
