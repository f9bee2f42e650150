"""The slices of the ranks of a replica, against vLLM's own loaders: each rank's parameters, from its slices and from whole tensors.

Experts are loaded one by one, as vLLM does, and all together (`vllm_expert_loading.py`).

A rank of vLLM is a model of this process that takes itself for that rank: its process groups only have numbers.
"""

import contextlib
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import qwen3_moe
from qwen35_trainer.models.qwen3_5.hub_tensors import to_per_expert
from qwen35_trainer.rollout.vllm_core import CoreSettings, core_arguments, write_configuration
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.rollout.vllm_expert_loading import PackedExperts
from qwen35_trainer.rollout.vllm_versions import builds_text_models
from qwen35_trainer.rollout.vllm_worker import for_vllm
from qwen35_trainer.weights.division import ReplicaRank, ReplicaShape
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.published import joined
from qwen35_trainer.weights.qwen3_5_divisions import divisions
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.slice_plan import slices_of
from qwen35_trainer.weights.sliced_tensor import SlicedTensor, SliceMissing
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transports import RankContext
from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender
from tests.rollout.test_vllm import MAX_LENGTH, library_model, process_restored

HEADS = {"attentionHeads": 8, "keyValueHeads": 2, "linearKeyHeads": 8, "linearValueHeads": 8}
SHAPE = HEADS | {"hiddenSize": 128, "headDim": 32, "linearHeadDim": 64, "intermediateSize": 256}
DENSE, EXPERTS, AS_PUBLISHED = SHAPE, SHAPE | {"experts": 6}, SHAPE | {"tieEmbeddings": True, "vision": {}}
CASES = {
    "dense, 1 rank": (DENSE, ReplicaShape(1), 1.0),
    "dense, 2 ranks": (DENSE, ReplicaShape(2), 0.51),
    "dense, 4 ranks": (DENSE, ReplicaShape(4), 0.27),
    "dense, 8 ranks": (DENSE, ReplicaShape(8), 0.15),  # four ranks have the same head of keys and values
    "experts, 2 ranks": (EXPERTS, ReplicaShape(2), 0.51),
    "experts, 4 ranks": (EXPERTS, ReplicaShape(4), 0.27),
    "divided experts, 2 ranks": (EXPERTS, ReplicaShape(2, divides_experts=True), 0.51),
    "divided experts, 4 ranks": (EXPERTS, ReplicaShape(4, divides_experts=True), 0.31),  # two ranks have two of six
    "tied, with a vision tower, 2 ranks": (AS_PUBLISHED, ReplicaShape(2), 0.7),
}


@dataclass(frozen=True)
class Group:
    """A process group of vLLM without processes: it only has numbers."""

    rank_in_group: int
    world_size: int

    @property
    def rank(self) -> int:
        return self.rank_in_group

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> "Group":
        return self

    def size(self) -> int:
        return self.world_size


@pytest.mark.parametrize("case", CASES)
def test_a_rank_loads_the_same_parameters_from_its_slices_as_from_whole_tensors(case: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    shape, replica, share = CASES[case]
    assert_same_parameters(library_model(0, shape), replica, share)


def assert_same_parameters(model: Any, replica: ReplicaShape, share: float) -> None:
    """Each rank of a replica loads the same parameters from its slices as from whole tensors.

    share: the part of all bytes that a rank reads, at most.
    """
    weights = published(model, replica)
    tied, kind = bool(model.config.tie_word_embeddings), model.config.model_type
    divided = divisions({name: kind.shape for name, kind in weights.kinds.items()})
    parts = weights.manifest.parts
    with process_restored():
        set_variables()
        for rank in range(replica.ranks):
            who = ReplicaRank(rank, replica)
            read = sum(parts[number].size for number in slices_of(weights.manifest, divided, who).parts)
            assert read <= share * sum(part.size for part in parts)
            with vllm_rank(model.config, who) as load:
                whole = load(for_vllm(weights, kind, tied=tied))
                others = {
                    "whole tensors, all experts together": load(for_vllm(weights, kind, tied=tied), together=True),
                    "slices": load(for_vllm(weights.sliced(divided, who), kind, tied=tied)),
                    "slices, all experts together": load(
                        for_vllm(weights.sliced(divided, who), kind, tied=tied), together=True
                    ),
                }
            for source, parameters in others.items():
                assert whole.keys() == parameters.keys()
                different = [name for name in whole if not torch.equal(_bits(whole[name]), _bits(parameters[name]))]
                assert different == [], source
            assert not any(bool(tensor.isnan().any()) for tensor in whole.values())


def test_a_loader_that_reads_more_than_the_table_says_is_refused() -> None:
    """A table that is wrong for the installed vLLM ends the replica. It never loads other values."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    replica = ReplicaShape(2)
    model = library_model(0, DENSE)
    weights = published(model, replica)
    divided = divisions({name: kind.shape for name, kind in weights.kinds.items()})
    with process_restored():
        set_variables()
        # The rank 0 of vLLM with the slices of rank 1.
        with (
            vllm_rank(model.config, ReplicaRank(0, replica)) as load,
            pytest.raises(SliceMissing, match=r"not in this rank's slice"),
        ):
            load(for_vllm(weights.sliced(divided, ReplicaRank(1, replica)), model.config.model_type, tied=False))


def published(model: Any, replica: ReplicaShape) -> HostWeights:
    """The parameters of a model, staged for the ranks of a replica as one train rank stages them."""
    shards = [
        WeightShard(name, tuple(each.shape), torch.float32 if name.endswith("A_log") else torch.bfloat16, 0, each)
        for name, each in model.named_parameters()
    ]
    sender = SharedMemorySender(RankContext(0, 1, None, replica=replica))
    version = joined([sender.stage(shards, 1, frozenset())], 1)
    assert isinstance(version.source, SegmentHandle)
    weights = HostWeights.open(version.manifest, version.source)
    weights.verify()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.to(weights[name].dtype))
    return weights


@contextlib.contextmanager
def vllm_rank(config: Any, who: ReplicaRank) -> Iterator[Any]:
    """A function that loads weights into vLLM's model of one rank, and returns its parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    ranks = who.replica.ranks
    settings = CoreSettings(slots=4, max_length=MAX_LENGTH, seed=5, memory_fraction=0.1, on_cpu=True, devices=ranks)
    experts = {"enable_expert_parallel": True} if who.replica.divides_experts else {}
    with tempfile.TemporaryDirectory() as name, groups(who):
        write_configuration(config, Path(name), text_models=builds_text_models())
        configured = EngineArgs(**core_arguments(Path(name), config, settings) | experts).create_engine_config()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(configured):
                model = initialize_model(vllm_config=configured)
        finally:
            torch.set_default_dtype(torch.float32)

        def load(weights: Iterable[tuple[str, Tensor]], *, together: bool = False) -> dict[str, Tensor]:
            for parameter in model.parameters():
                parameter.data.fill_(math.nan)
            with set_current_vllm_config(configured), torch.no_grad():
                if together:
                    weights = PackedExperts(model, config.model_type).others(weights)
                elif config.model_type == qwen3_moe.MODEL_TYPE:
                    weights = to_per_expert(weights)  # vLLM 0.23 skips packed tensors of Qwen3
                model.load_weights(weights)
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        yield load


@contextlib.contextmanager
def groups(who: ReplicaRank) -> Iterator[None]:
    """Let vLLM take this process for one rank of a replica."""
    from vllm.distributed import parallel_state

    own, alone = Group(who.rank, who.replica.ranks), Group(0, 1)
    numbers = {"_TP": own, "_EP": own, "_WORLD": own, "_PP": alone, "_DP": alone, "_PCP": alone, "_DCP": alone}
    with pytest.MonkeyPatch.context() as patch:
        for name, group in numbers.items():
            patch.setattr(parallel_state, name, group)
        yield


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_no_slice_is_a_tensor_that_a_rank_reads_whole() -> None:
    weights = published(library_model(0, EXPERTS), ReplicaShape(2))
    divided = divisions({name: kind.shape for name, kind in weights.kinds.items()})
    sliced = weights.sliced(divided, ReplicaRank(1, ReplicaShape(2)))
    read_whole = [name for name, tensor in sliced.items() if not isinstance(tensor, SlicedTensor)]
    whole = {name.split("layers.")[1].partition(".")[2] if "layers." in name else name for name in read_whole}
    assert whole == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "linear_attn.A_log",
        "linear_attn.dt_bias",
        "linear_attn.conv1d.weight",
        "linear_attn.norm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate.weight",
        "mlp.shared_expert_gate.weight",
        "model.norm.weight",
    }
