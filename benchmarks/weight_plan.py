"""The transfers of a publication, by sender and receiver, and their time at stated bandwidths: prints one JSON object.

    python benchmarks/weight_plan.py [--devices 64]

One row for each example with replicas and a published model, and for the largest models on `--devices` for training with FSDP and as many for
rollouts; the largest also with expert parallelism, and with eight times as many for rollouts. A rank of FSDP publishes rows of every tensor; with
Megatron, the ranks of a pipeline stage publish whole parameters by turns (`engines/megatron/published_model.py`).
Names and shapes are those of the model's class for the published dimensions; the total of parameters is printed, to compare with the
model's name. `weights/slice_plan.py` computes the bytes of each rank of a replica, from the parts that train ranks stage, and `weights/relay.py`
the waves of the transport RDMA, as in a run: in the first one replicas read from the train ranks, in the others from replicas. Nothing is
measured here: a time is bytes divided by bandwidth, without latency. A replica reads a whole version to its host, through the network
interfaces of all of its devices together.

    trainer blocked   a rank's shard to the host                        at HOST_BYTES_PER_SECOND, in bfloat16
    waves             one after another                                 at NETWORK_BYTES_PER_SECOND: the busiest sender, or the busiest receiver
    without relay     all replicas read from the train ranks            the same
    to devices        a replica rank's part from the host               at HOST_BYTES_PER_SECOND
    checksums         of a train rank's shard on STAGING_THREADS cores, while the trainer is blocked; of a version on a replica's cores, during the transfer
    until in service  trainer blocked, checksums of a train rank, waves, to devices: one after another. Generation stops only for the last
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from qwen35_trainer.catalog.links import LINKS
from qwen35_trainer.catalog.models import MODELS
from qwen35_trainer.engines.megatron.published_model import LAYER_NUMBER, publishers
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.models.qwen3_5.classes import without_weights
from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from qwen35_trainer.planning.megatron_memory import stages
from qwen35_trainer.weights.division import ReplicaShape, StagingPlan
from qwen35_trainer.weights.host_weights import verifiers
from qwen35_trainer.weights.qwen3_5_divisions import divisions
from qwen35_trainer.weights.relay import trainer_readers, waves
from qwen35_trainer.weights.staging import PART_BYTES, STAGING_THREADS
from qwen35_trainer.weights.transfer_plan import HeldValues, held_by_rows, planned_version, transfers
from qwen35_trainer.weights.weight_manifest import WeightLayout

NETWORK_BYTES_PER_SECOND = LINKS["IB-400G"].bandwidth
HOST_BYTES_PER_SECOND = LINKS["PCIe5"].bandwidth
CHECKSUM_BYTES_PER_SECOND = 31.5e9
"""XXH3 on one core of an i7-9700K (README of github.com/Cyan4973/xxHash)."""
HOST_CORES = 112
"""A host of 8 GPUs has two processors of 56 cores (NVIDIA DGX H100 datasheet)."""
EXAMPLES = Path(__file__).parents[1] / "examples"
LARGE = ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B")
"""Models that are divided over `--devices`, in the order of their size."""


def tensors_of(name: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and type of each tensor of a published model."""
    shape = MODELS[name]
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        sizes |= {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        sizes |= {"moe_intermediate_size": shape.expert_intermediate}
    if not shape.linear_layers:
        config: Any = Qwen3MoeConfig(**sizes)
    elif shape.experts:
        config = Qwen3_5MoeTextConfig(**sizes, shared_expert_intermediate_size=shape.shared_intermediate)
    else:
        config = Qwen3_5TextConfig(**sizes, intermediate_size=shape.intermediate)
    return [
        (each, tuple(parameter.shape), "float32" if keeps_float32(each) else "bfloat16")
        for each, parameter in without_weights(config).named_parameters()
    ]


def held_by_parameters(layout: WeightLayout, degrees: ParallelismSpec, ranks: int) -> Iterator[HeldValues]:
    """Yield the values of each tensor that each of `ranks` ranks with Megatron publishes."""
    numbers = {entry.name: number for number, entry in enumerate(layout.tensors)}
    layers = 1 + max(int(match[1]) for name in numbers if (match := LAYER_NUMBER.match(name)))
    divided = [tuple(chain(*stage.parts)) for stage in stages(layers, degrees.pipeline, degrees.virtualPipeline)]
    shapes = {entry.name: entry.shape for entry in layout.tensors}
    for rank, name, values in publishers(shapes, divided, degrees, ranks):
        yield HeldValues(rank, numbers[name], values)


def plan(
    name: str, train_ranks: int, replicas: int, replica: ReplicaShape, megatron: ParallelismSpec | None = None
) -> dict[str, Any]:
    """Return the bytes and times of one publication. megatron: the parallelism with Megatron; None: FSDP."""
    tensors, replica_ranks = tensors_of(name), replica.ranks
    divided = divisions({each: shape for each, shape, _ in tensors})
    staging = StagingPlan.of(divided, replica)
    layout = WeightLayout.of(tensors, staging)
    ranks_hold = held_by_parameters(layout, megatron, train_ranks) if megatron else held_by_rows(layout, train_ranks)
    staged = planned_version(layout, staging, ranks_hold, PART_BYTES)
    needed = transfers(staged, divided, replica)
    received, held_by = Counter[int](), Counter[int]()
    for (_, receiver), size in needed.items():
        received[receiver] += size
    for part, writer in zip(staged.manifest.parts, staged.writers, strict=True):
        held_by[writer] += part.size
    held, version = max(held_by.values()), held_by.total()
    first, *others = waves(replicas, trainer_readers(train_ranks, replica_ranks))
    of_interface = version / replica_ranks

    def seconds(readers_of_trainer: int) -> float:
        return max(held * readers_of_trainer, of_interface) / NETWORK_BYTES_PER_SECOND

    blocked, checksums = held / HOST_BYTES_PER_SECOND, held / CHECKSUM_BYTES_PER_SECOND / STAGING_THREADS
    in_waves = seconds(len(first)) + len(others) * of_interface / NETWORK_BYTES_PER_SECOND
    to_devices = max(received.values()) / HOST_BYTES_PER_SECOND
    return {
        "model": name,
        "billion parameters": round(sum(math.prod(shape) for _, shape, _ in tensors) / 1e9, 1),
        "GB": round(version / 1e9, 1),
        "engine": "Megatron" if megatron else "FSDP",
        "train ranks": train_ranks,
        "parts": len(staged.writers),
        "replicas": f"{replicas} of {replica_ranks}" + (", experts divided" if replica.divides_experts else ""),
        "senders of a replica rank": round(len(needed) / replica_ranks, 1),
        "GB held by a train rank": round(held / 1e9, 2),
        "of them more than its share, of the train ranks, %": round(100 * (held * train_ranks / version - 1), 1),
        "GB sent by a train rank, at most": round(held * len(first) / 1e9, 2),
        "GB sent by a train rank without relay": round(held * replicas / 1e9, 2),
        "GB through each interface of a replica": round(of_interface / 1e9, 2),
        "GB read by a replica rank, at most": round(max(received.values()) / 1e9, 2),
        "of them more than its share, %": round(100 * (max(received.values()) * replica_ranks / version - 1), 1),
        "GB through the busiest link, train rank to replica rank": round(max(needed.values()) / 1e9, 3),
        "readers in each wave": [len(wave) for wave in (first, *others)],
        "seconds": {
            "trainer blocked": round(blocked, 3),
            "waves": round(in_waves, 3),
            "without relay": round(seconds(replicas), 3),
            "to devices": round(to_devices, 3),
            "until in service": round(blocked + checksums + in_waves + to_devices, 3),
            "checksums of a train rank": round(checksums, 3),
            "checksums of a replica": round(version / CHECKSUM_BYTES_PER_SECOND / verifiers(HOST_CORES), 3),
        },
    }


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file of each example with replicas and a published model, and the arguments of `plan` for it."""
    for file in sorted(EXAMPLES.glob("qwen*.yaml")):
        spec = load_manifest(file).spec
        if spec.rollout is None:
            continue
        devices, replica = spec.accelerator.devicesPerNode, ReplicaShape(spec.rollout.tensorParallel)
        nodes = spec.train.nodes if spec.mode == "Colocated" else spec.rollout.nodes
        yield (
            file.name,
            {
                "name": spec.model.name,
                "train_ranks": spec.train.nodes * devices,
                "replicas": nodes * devices // replica.ranks,
                "replica": replica,
                "megatron": spec.train.parallelism if spec.train.engine == "Megatron" else None,
            },
        )


def main() -> None:
    """Compute all plans, and print them."""
    parser = argparse.ArgumentParser(description="The transfers of a publication, and their time at stated bandwidths.")
    parser.add_argument("--devices", type=int, default=64, help="of each pool, for 35B, 122B and 397B [default: 64]")
    devices = parser.parse_args().devices
    rows = [{"recipe": file} | plan(**recipe) for file, recipe in examples()]
    largest, more = LARGE[-1], 8 * devices
    shapes = [(name, devices, ReplicaShape(8)) for name in LARGE]
    for name, rollouts, shape in [
        *shapes,
        (largest, devices, ReplicaShape(8, divides_experts=True)),
        (largest, more, ReplicaShape(8)),
    ]:
        rows.append({"recipe": f"{devices} + {rollouts} devices"} | plan(name, devices, rollouts // 8, shape))
    print(json.dumps({"plans": rows}, indent=2))


if __name__ == "__main__":
    main()
