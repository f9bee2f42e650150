"""Device profiles, by name in spec.accelerator.profile: everything about pods that depends on the kind of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from qwen35_trainer.manifest.accelerator import ProfileName


@dataclass(frozen=True)
class PodSize:
    """The CPUs and memory of a whole pod, or the CPUs and memory that a pod gets for each of its devices.

    cpu: number of CPUs. memory_gib: all memory, in GiB. shm_gib: the part of this memory that shared memory (/dev/shm)
    may take. Ray's object store is in shared memory, and takes 30% of all memory.
    """

    cpu: float
    memory_gib: int
    shm_gib: int


@dataclass(frozen=True)
class HostPath:
    """A file or folder of the Kubernetes node, which pods with devices mount read-only at the same path.

    name: name of the volume in the pod.
    """

    name: str
    path: str
    type: Literal["Directory", "File"]


@dataclass(frozen=True)
class DeviceProfile:
    """The resources, environment variables and host paths of pods with one kind of device.

    A profile contains no scheduler hints. These depend on the hardware's generation and on the cluster, so users set
    them in spec.pods.
    """

    resource: str | None
    """The device's resource name in Kubernetes; None if there are no devices."""
    ray_resource: str | None
    """The device's resource name in Ray, which actors request; None if there are no devices."""
    head: PodSize
    per_device: PodSize
    grace_seconds: int
    """Seconds between SIGTERM and SIGKILL of a pod, for `ray stop` and the release of device memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the pods with devices.

    The variables must be set before `ray start`; a runtime environment of Ray would set them too late.
    """
    host_paths: tuple[HostPath, ...] = ()


NVIDIA: Final = DeviceProfile(
    # The device plugin's name (github.com/NVIDIA/k8s-device-plugin); KubeRay maps names that end in "gpu" to Ray's GPU.
    resource="nvidia.com/gpu",
    ray_resource="GPU",
    # The driver holds prompts and the groups in flight, but no weights.
    head=PodSize(cpu=8, memory_gib=32, shm_gib=12),
    # Eight devices take 64 CPUs and 512 GiB: the clouds' 8-GPU machines have more (a2-highgpu-8g: 96 CPUs, 680 GB).
    # desired/pod_size.py adds memory where the plan of a training needs more.
    per_device=PodSize(cpu=8, memory_gib=64, shm_gib=24),
    grace_seconds=60,
    environment={
        # The pod's own interface, conventionally eth0. By default NCCL and Gloo may choose a secondary network that
        # the other pool is not connected to. InfiniBand and RoCE devices are found regardless of this setting.
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        # By default NCCL logs nothing, not even a failed collective.
        "NCCL_DEBUG": "WARN",
    },
)

ASCEND: Final = DeviceProfile(
    # Huawei Ascend NPUs with MindCluster's device plugin (Ascend/mind-cluster), for 910A, 910B and A3 alike.
    # ASCEND_VISIBLE_DEVICES is not set: it is read from an annotation that only Volcano's ascend plugin writes, and an
    # empty one would hide every device. With that plugin as scheduler, users add the variable in spec.pods.
    resource="huawei.com/Ascend910",
    # Ray's own name (ray/_private/accelerators/npu.py). KubeRay up to 1.7.0 maps no NPU, and Ray counts devices only if
    # the resource is not set explicitly, so the operator always sets it.
    ray_resource="NPU",
    head=PodSize(cpu=8, memory_gib=32, shm_gib=12),
    # Eight devices take 128 of the 192 cores of an Atlas 800T A2. Memory as for NVIDIA: the models are the same.
    per_device=PodSize(cpu=16, memory_gib=64, shm_gib=24),
    grace_seconds=60,
    environment={
        # The pod's own interface, as for NCCL.
        "HCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        # Ranks load a large model at different speeds; HCCL's default of 120 s is too short (verl's Ascend recipes use
        # 1800 and more). The second limits a collective that never ends.
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "3600",
        # Otherwise two processes on one device (a rank and a replica) would bind the same port (HCCL reference).
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
        "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050",
        # Reduces fragmentation when batches differ in length (torch_npu; like PYTORCH_CUDA_ALLOC_CONF).
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    },
    # From vllm-ascend's installation guide. hccn.conf lists the devices' RoCE addresses, for more than one node.
    # MindCluster's container runtime mounts the first three itself; mounting them twice is harmless.
    host_paths=(
        HostPath("ascend-driver", "/usr/local/Ascend/driver", "Directory"),
        HostPath("ascend-dcmi", "/usr/local/dcmi", "Directory"),
        HostPath("ascend-npu-smi", "/usr/local/bin/npu-smi", "File"),
        HostPath("ascend-install-info", "/etc/ascend_install.info", "File"),
        HostPath("ascend-hccn", "/etc/hccn.conf", "File"),
    ),
)

CPU: Final = DeviceProfile(
    # No devices, for tests and tiny models: accelerator.devicesPerNode is the number of worker processes per node.
    resource=None,
    ray_resource=None,
    # Memory for Ray's own processes and two that have imported torch, with a tiny model. The CPU request is small, so
    # that a whole training fits a node of two cores; pods may use what is free.
    head=PodSize(cpu=0.25, memory_gib=3, shm_gib=1),
    per_device=PodSize(cpu=0.5, memory_gib=3, shm_gib=1),
    grace_seconds=30,
    environment={"GLOO_SOCKET_IFNAME": "eth0"},
)

PROFILES: Final[Mapping[ProfileName, DeviceProfile]] = {"NVIDIA": NVIDIA, "Ascend": ASCEND, "CPU": CPU}
