"""Huawei Ascend NPUs, with MindCluster's device plugin.

ASCEND_VISIBLE_DEVICES is not set: it is read from an annotation that only Volcano's ascend plugin writes, and an empty
one would hide every device. Where that plugin schedules, spec.pods adds the variable.
"""

from qwen35_operator.profiles.base import HostPath, Profile, Size

ASCEND = Profile(
    # MindCluster's device plugin (Ascend/mind-cluster), for 910A, 910B and A3 alike.
    resource="huawei.com/Ascend910",
    # Ray's own name of it (ray/_private/accelerators/npu.py). KubeRay up to 1.7.0 maps no NPU, and Ray counts devices
    # only when the resource is not given, so it is always given.
    ray_resource="NPU",
    head=Size(cpu=8, memory_gib=32, shm_gib=12),
    # Times 8 that is 128 of the 192 cores of an Atlas 800T A2. Memory as for NVIDIA, for the models are the same.
    per_device=Size(cpu=16, memory_gib=64, shm_gib=24),
    grace_seconds=60,
    environment={
        # As for NCCL: the pod's own interface.
        "HCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        # Ranks load a large model at different speeds; HCCL's own 120 s is too short (verl's Ascend recipes: 1800 and
        # more). The second bounds a collective that never ends.
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "3600",
        # Two processes of one device (a rank and a replica) would bind the same port otherwise (HCCL reference).
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
        "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050",
        # Less fragmentation when batches differ in length (torch_npu; as PYTORCH_CUDA_ALLOC_CONF).
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    },
    # vllm-ascend's installation guide; hccn.conf has the devices' RoCE addresses, for more than one node. The container
    # runtime of MindCluster mounts the first three itself, a second time does no harm.
    host_paths=(
        HostPath("ascend-driver", "/usr/local/Ascend/driver", "Directory"),
        HostPath("ascend-dcmi", "/usr/local/dcmi", "Directory"),
        HostPath("ascend-npu-smi", "/usr/local/bin/npu-smi", "File"),
        HostPath("ascend-install-info", "/etc/ascend_install.info", "File"),
        HostPath("ascend-hccn", "/etc/hccn.conf", "File"),
    ),
)
