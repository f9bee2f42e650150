"""One process with one NVIDIA GPU; every test is skipped where there is none."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def gpu() -> Iterator[torch.device]:
    """The first device; this process is the whole group."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()
