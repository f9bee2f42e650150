"""Time-outs of the process groups of device meshes."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def limit(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set the time-out of the mesh's process groups. PyTorch creates them with its default.
    TorchTitan does the same.
    """
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timeout, group)
