"""No devices: tests, and tiny models. accelerator.perNode is the number of worker processes of a node."""

from qwen35_operator.profiles.base import Profile, Size

CPU = Profile(
    resource=None,
    ray_resource=None,
    # Memory for Ray's own processes and two that have torch loaded, with a tiny model. Little is asked of the CPU, so that
    # a whole training fits a node of two cores; it may take what is free.
    head=Size(cpu=0.25, memory_gib=3, shm_gib=1),
    per_device=Size(cpu=0.5, memory_gib=3, shm_gib=1),
    grace_seconds=30,
    environment={"GLOO_SOCKET_IFNAME": "eth0"},
)
