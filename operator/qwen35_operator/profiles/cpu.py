"""No devices: tests, and tiny models. accelerator.perNode is the number of worker processes of a node."""

from qwen35_operator.profiles.base import Profile, Size

CPU = Profile(
    resource=None,
    ray_resource=None,
    # Ray's own processes and two that have torch loaded, with a tiny model.
    head=Size(cpu=1, memory_gib=3, shm_gib=1),
    per_device=Size(cpu=1, memory_gib=3, shm_gib=1),
    grace_seconds=30,
    environment={"GLOO_SOCKET_IFNAME": "eth0"},
)
