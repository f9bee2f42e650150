"""Functions that run in the processes of vLLM's workers, between two steps.

    build_core      ─► join_replica                                          a worker that is a process of its own
    fall_asleep     ─► memory_in_use                                         before and after
    wake_up         ─► restore_expert_layout
    replace_weights ─► begin_replacement ─► load_shared       ─► finish_replacement      weights in shared memory
                                         └► load_portion …   ─┘                          all other weights

With one device, the worker is an object in the rollout worker's process. With several devices, vLLM starts a process for each
device, and calls these functions there. Such a process reads weights from shared memory without a copy. The first argument of
each function is the worker.
"""

from __future__ import annotations

import ctypes
import glob
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor, exported
from qwen35_trainer.rollout.vllm_environment import reuse_freed_tensors
from qwen35_trainer.rollout.vllm_expert_loading import PackedExperts
from qwen35_trainer.rollout.vllm_versions import add_cpu_functions, in_adapted_layers, weight_name
from qwen35_trainer.weights.division import Division, ReplicaRank, ReplicaShape
from qwen35_trainer.weights.host_weights import SharedVersion
from qwen35_trainer.weights.qwen3_5_divisions import divisions
from qwen35_trainer.weights.segment import MappedSegments
from qwen35_trainer.weights.sliced_tensor import SlicedTensor
from qwen35_trainer.weights.staging import tensor_checksum

type Worker = Any
"""vLLM's worker. mypy does not follow its types (pyproject.toml)."""

LOADED = "_qwen35_loaded"
"""Name of a worker's attribute: names of the parameters that got tensors since `begin_replacement`."""
HEAD = "lm_head.weight"
"""End of the name of the output layer's parameter."""
SEGMENTS = "_qwen35_segments"
"""Name of a worker's attribute: segments of shared memory that its process keeps mapped."""
FLOAT32_PARAMETER = ".A_log"
"""Suffix of the parameter that vLLM keeps in float32. All others are bfloat16."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # nothing is created there
"""Folder of the names of POSIX shared memory (shm_overview(7))."""
_PR_SET_PDEATHSIG = 1
"""Number of the process setting PR_SET_PDEATHSIG, from Linux's prctl.h."""


def join_replica(_: Worker, on_cpu: bool) -> None:
    """Apply the settings of the process that started this one, and make this one end when that one ends.

    That is the rollout worker, or on a further node of a replica the process that called `start_workers`. on_cpu: whether
    the model is on the CPU. Linux kills this process when the thread that started it ends, so `build_core` must be called
    on a thread that lives as long as the engine. vLLM itself notices the end of the other process only after seconds, by a
    thread that waits for the end of a pipe.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it ended before the line above
        os._exit(1)
    if on_cpu:
        _forget_names_of_shared_memory()
        reuse_freed_tensors()
        add_cpu_functions()
        torch.compiler.set_stance("force_eager")  # `stepping` says why


def _forget_names_of_shared_memory() -> None:
    """Remove the names of the memory that the replica's processes share, which all of them have mapped by now.

    vLLM removes a name only when a process ends without being killed. A killed one would leave 4 MiB under its name, and with vLLM
    0.23 another replica that got the same port could not start: "create shm in SHMManager failed. errno: 17".
    """
    for file in _SHARED_MEMORY.glob(f"{glob.escape(os.environ['VLLM_DIST_IDENT'])}-*-cpushm_*"):
        file.unlink(missing_ok=True)


def begin_replacement(worker: Worker) -> None:
    """Prepare the model for new weights, which `load_portion` or `load_shared` then loads.

    Afterwards, `finish_replacement` completes the replacement. Together, these functions do what vLLM's
    `reload_weights` does. But `finish_replacement` returns the names of the parameters that got no tensor, which vLLM
    only logs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = worker.model_runner.get_model()
    setattr(worker, LOADED, set())
    if worker.model_runner.device.type == "cpu":
        _forget_expert_kernels(model)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)


def load_portion(worker: Worker, weights: Iterable[NamedTensor]) -> None:
    """Load tensors into the model. weights: tensors by vLLM's names. The worker takes its part of each tensor."""
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        experts = PackedExperts(model, model_type(worker))
        loaded = model.load_weights(in_adapted_layers(model, experts.others(weights)))
        getattr(worker, LOADED).update(loaded, experts.loaded)


def load_shared(worker: Worker, nodes: Sequence[SharedVersion], tied: bool) -> None:
    """Load a version from shared memory into the model. The worker reads only its slice of each tensor.

    nodes: the version in the memory of each node of the replica. tied: whether the output layer is the input embedding.
    Raises SegmentUnavailable if the version is not in the shared memory any more.
    """
    version = nodes[worker.vllm_config.parallel_config.node_rank]
    if not hasattr(worker, SEGMENTS):
        setattr(worker, SEGMENTS, MappedSegments())
    shapes = {entry.name: entry.shape for entry in version.manifest.layout.tensors}
    weights = version.open(getattr(worker, SEGMENTS)).sliced(_divisions(worker, shapes), _rank(worker))
    load_portion(worker, for_vllm(weights, model_type(worker), tied=tied))


def model_type(worker: Worker) -> str:
    """Return the `model_type` of the worker's model. A core has it at the same place."""
    kind: str = worker.vllm_config.model_config.hf_config.model_type
    return kind


def _rank(worker: Worker) -> ReplicaRank:
    parallel = worker.vllm_config.parallel_config
    return ReplicaRank(worker.rank, ReplicaShape(parallel.tensor_parallel_size, parallel.enable_expert_parallel))


def _divisions(worker: Worker, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Division]:
    """Return the divisions of the published tensors among the replica's ranks. shapes: shape of each tensor, by name.

    If the experts of a rank are not consecutive, each rank reads all experts.
    """
    parallel = worker.vllm_config.parallel_config
    has_consecutive = parallel.expert_placement_strategy == "linear"
    return {name: each for name, each in divisions(shapes).items() if has_consecutive or not each.experts}


def for_vllm(weights: Mapping[str, Tensor], kind: str, *, tied: bool) -> Iterator[NamedTensor]:
    """Yield weights of a publication with the names and types with which vLLM loads them.

    kind: `model_type` of vLLM's model. tied: whether the output layer is the input embedding.
    """
    for name, tensor in exported(weights.items(), tied=tied):
        # vLLM converts a slice when it copies it. Converting it here would read the whole tensor.
        is_kept = name.endswith(FLOAT32_PARAMETER) or isinstance(tensor, SlicedTensor)
        yield weight_name(name, kind), tensor if is_kept else tensor.to(torch.bfloat16)


def finish_replacement(worker: Worker) -> list[str]:
    """Convert the new weights to the layout of vLLM's kernels.

    Returns the names of the parameters that got no tensor since `begin_replacement`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    model = runner.get_model()
    parameters = {name for name, _ in model.named_parameters() if not (_is_tied(model) and name.endswith(HEAD))}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        finalize_layerwise_reload(model, runner.model_config)
        _repack_tied_head(model)
    # A layer with adapters contains the layer that is loaded, under this name.
    expected, loaded = (
        {name.replace(".base_layer.", ".") for name in names} for names in (parameters, getattr(worker, LOADED))
    )
    return sorted(expected - loaded)


def restore_expert_layout(worker: Worker) -> None:
    """Undo the transposition of expert weights by vllm-ascend's `wake_up`. Other builds of vLLM do not transpose them.

    vllm-ascend transposes these weights so that tensors of a checkpoint can be copied into them. Here vLLM replaces
    weights layer by layer, and needs them in the contiguous layout of the kernels.
    """
    for layer in worker.model_runner.get_model().modules():
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name, None)
            if weight is not None and not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous():
                setattr(layer, name, torch.nn.Parameter(weight.data.transpose(1, 2), requires_grad=False))


def parameter_checksums(worker: Worker) -> dict[str, int]:
    """Return the checksum of each parameter and adapter matrix in this worker's part of the model, by vLLM's names.

    vLLM's CPU kernels hide the matrices of linear layers in a layout that cannot be read. The checksum of such a matrix
    is computed from its product with a fixed vector.
    """
    model = worker.model_runner.get_model()
    checksums = {
        name: tensor_checksum(tensor)
        for name, tensor in model.named_parameters()
        if tensor.numel() and not tensor.is_meta  # vLLM leaves a vision tower that it does not use on the meta device
    }
    for path, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and not layer.weight.numel():
            checksums[f"{path}.weight"] = tensor_checksum(_product(layer))
        for adapter in ("lora_a_stacked", "lora_b_stacked"):  # not among the parameters
            for number, tensor in enumerate(getattr(layer, adapter, ())):
                checksums[f"{path}.{adapter}.{number}"] = tensor_checksum(tensor)
    return checksums


@torch.no_grad()
def memory_in_use(_: Worker) -> int:
    """Return the bytes of memory that all processes together use on the worker's device."""
    # The device's own module: torch.accelerator is not known to count the memory of NPUs, and vllm-ascend does not use it for this.
    free, total = torch.get_device_module().mem_get_info()
    return int(total - free)


def _product(layer: Any) -> Tensor:  # noqa: ANN401  # vLLM's layer
    # A layer that every worker has whole, such as the gate of experts, has no partition.
    size = getattr(layer, "input_size_per_partition", layer.input_size)
    vector = torch.linspace(-1, 1, size, dtype=torch.bfloat16)
    product: Tensor = layer.cpu_linear(vector.unsqueeze(0), layer.weight, None)
    return product


def _forget_expert_kernels(model: Any) -> None:  # noqa: ANN401  # vLLM's model
    """Remove the CPU kernels of the experts, so that vLLM converts the new weights to the kernels' layout.

    vLLM 0.32 converts weights only in layers that have no kernel yet; otherwise it would compute with the wrong layout.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:  # noqa: ANN401  # vLLM's model
    """Convert the weight of a tied output layer again for vLLM's CPU kernels, which compute with a converted copy.

    vLLM 0.32 converts only the embedding again.
    """
    if _is_tied(model):
        head = _text_model(model).lm_head
        head.quant_method.process_weights_after_loading(head)


def _is_tied(model: Any) -> bool:  # noqa: ANN401  # vLLM's model
    """Return whether the output layer uses the weights of the embedding.

    While weights are replaced, vLLM gives the output layer a separate parameter.
    """
    return bool(_text_model(model).config.tie_word_embeddings)


def _text_model(model: Any) -> Any:  # noqa: ANN401  # vLLM's model
    return getattr(model, "language_model", model)
