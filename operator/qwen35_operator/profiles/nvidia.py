"""NVIDIA GPUs."""

from qwen35_operator.profiles.base import Profile, Size

NVIDIA = Profile(
    # The device plugin's name (github.com/NVIDIA/k8s-device-plugin); KubeRay maps whatever ends in "gpu" to Ray's GPU.
    resource="nvidia.com/gpu",
    ray_resource="GPU",
    # The driver holds prompts and the groups in flight, no weights.
    head=Size(cpu=8, memory_gib=32, shm_gib=12),
    # Times 8 that is 64 CPUs and 512 GiB: the clouds' 8-GPU machines have more (a2-highgpu-8g: 96 CPUs, 680 GB).
    # Offloaded FP32 state of 35B parameters over two such nodes is 210 GiB on each.
    per_device=Size(cpu=8, memory_gib=64, shm_gib=24),
    grace_seconds=60,
    environment={
        # The pod's own interface, eth0 by custom: left to themselves NCCL and Gloo may pick a secondary network that
        # the other pool has no part in. InfiniBand and RoCE devices are found regardless of it.
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        # NCCL's own default is silence: a failed collective would leave no line behind.
        "NCCL_DEBUG": "WARN",
    },
)
