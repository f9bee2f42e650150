"""Slices: what a rank of a replica reads of a staged version, and that it gets its own values and no others."""

import math
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qwen35_trainer.weights.division import (
    Division,
    ReplicaRank,
    ReplicaShape,
    StagingPlan,
    TensorSection,
    columns_divided,
    rows_divided,
)
from qwen35_trainer.weights.qwen3_5_divisions import divisions
from qwen35_trainer.weights.rank_weights import RankWeights
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.slice_plan import slices_of
from qwen35_trainer.weights.sliced_tensor import SliceMissing
from qwen35_trainer.weights.staging import PART_BYTES, WeightShard, layout_of, pieces, write_pieces
from qwen35_trainer.weights.transfer_plan import held_by_rows, planned_version, row_range, transfers
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightLayout, WeightManifest, WeightsDamaged
from tests.weights import ways
from tests.weights.ways import AVAILABLE, bits, fetch, reader

SHAPES = {
    "model.embed_tokens.weight": (150, 8),
    "lm_head.weight": (150, 8),
    "model.norm.weight": (8,),
    "model.layers.0.linear_attn.in_proj_qkv.weight": (64, 8),
    "model.layers.0.linear_attn.in_proj_z.weight": (32, 8),
    "model.layers.0.linear_attn.out_proj.weight": (8, 32),
    "model.layers.0.linear_attn.A_log": (4,),
    "model.layers.1.self_attn.q_proj.weight": (64, 8),
    "model.layers.1.self_attn.k_proj.weight": (8, 8),
    "model.layers.1.self_attn.v_proj.weight": (8, 8),
    "model.layers.1.self_attn.k_norm.weight": (4,),
    "model.layers.1.self_attn.o_proj.weight": (8, 32),
    "model.layers.1.mlp.gate.weight": (6, 8),
    "model.layers.1.mlp.experts.gate_up_proj": (6, 32, 8),
    "model.layers.1.mlp.experts.down_proj": (6, 8, 16),
    "model.layers.1.mlp.shared_expert.down_proj.weight": (8, 16),
    "unknown.weight": (16, 16),
}
TENSORS = {
    name: torch.arange(math.prod(shape), dtype=torch.int32).view(shape) + 10_000 * number
    for number, (name, shape) in enumerate(SHAPES.items())
}
DIVISIONS = divisions(SHAPES)
REPLICAS = [
    ReplicaShape(1),
    ReplicaShape(2),
    ReplicaShape(4),
    ReplicaShape(8),
    ReplicaShape(2, True),
    ReplicaShape(4, True),
]


class OnlyRead:
    """The bytes of a staged version, of which a rank can get no others than those of the parts that it reads."""

    def __init__(self, manifest: WeightManifest, memory: Memory, parts: tuple[int, ...]) -> None:
        self._layout, self._memory, self._read = (
            manifest.layout,
            memory,
            torch.zeros(manifest.layout.size, dtype=torch.bool),
        )
        for number in parts:
            part = manifest.parts[number]
            begin = manifest.layout.tensors[part.tensor].offset + part.start
            self._read[begin : begin + part.size] = True

    def of(self, tensor: int, start: int, stop: int) -> Memory:
        offset = self._layout.tensors[tensor].offset
        assert bool(self._read[offset + start : offset + stop].all()), "the rank did not read these bytes"
        return self._memory[offset + start : offset + stop]


def staged(tensors: Mapping[str, Tensor], plan: StagingPlan, ranks: int) -> tuple[WeightManifest, Memory]:
    """Stage tensors as `ranks` train ranks do, and return the version in one memory."""
    layout = layout_of(shards(tensors, 1, 0), plan)
    memory = torch.zeros(layout.size, dtype=torch.uint8).numpy()
    parts = []
    for rank in range(ranks):
        for piece in pieces(shards(tensors, ranks, rank), 512, plan):
            begin = layout.tensors[piece.tensor].offset + piece.start
            parts.append(piece.write(memory[begin : begin + piece.size]))
    manifest = WeightManifest(1, layout, tuple(parts))
    manifest.check_complete()
    return manifest, memory


def shards(tensors: Mapping[str, Tensor], ranks: int, rank: int) -> list[WeightShard]:
    of_rank = []
    for name, tensor in tensors.items():
        rows, row = row_range(len(tensor), ranks, rank), math.prod(tensor.shape[1:])
        values = tensor[rows.start : rows.stop]
        of_rank.append(WeightShard(name, tuple(tensor.shape), tensor.dtype, rows.start * row, values))
    return of_rank


def expected(name: str, tensor: Tensor, who: ReplicaRank) -> list[Tensor]:
    """What a rank computes with, written down for each kind of tensor of SHAPES."""
    rank, ranks = who.rank, who.replica.ranks
    each = lambda rows: slice(rank * rows // ranks, (rank + 1) * rows // ranks)  # noqa: E731
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return [tensor[192 // ranks * rank : 192 // ranks * (rank + 1)]]
    if "in_proj_qkv" in name:
        return [section[each(len(section))] for section in tensor.split((16, 16, 32))]
    if "k_proj" in name or "v_proj" in name:
        head = rank * 2 // ranks
        return [tensor[4 * head : 4 * max(head + 1, (rank + 1) * 2 // ranks)]]
    if "experts" in name and who.replica.divides_experts:
        return [tensor[[expert for expert in range(6) if owner(expert, ranks) == rank]]]
    if "gate_up_proj" in name:
        return [half[:, each(16)] for half in tensor.chunk(2, dim=1)]
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
        return [tensor[..., each(tensor.shape[-1])]]
    if name.endswith(("q_proj.weight", "in_proj_z.weight")):
        return [tensor[each(len(tensor))]]
    return [tensor]


def owner(expert: int, ranks: int) -> int:
    return [rank for rank in range(ranks) for _ in range(6 // ranks + (rank < 6 % ranks))][expert]


@pytest.mark.parametrize("reader", REPLICAS, ids=str)
@pytest.mark.parametrize("staged_for", [ReplicaShape(1), ReplicaShape(4), ReplicaShape(4, True)], ids=str)
def test_a_rank_gets_its_values_from_the_parts_that_it_reads_however_they_were_staged(
    reader: ReplicaShape, staged_for: ReplicaShape
) -> None:
    manifest, memory = staged(TENSORS, StagingPlan.of(DIVISIONS, staged_for), 3)
    for rank in range(reader.ranks):
        who = ReplicaRank(rank, reader)
        slices = slices_of(manifest, DIVISIONS, who)
        weights = RankWeights(manifest.layout, slices.held, OnlyRead(manifest, memory, slices.parts))
        assert list(weights) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert weights[name].shape == tensor.shape
            whole = torch.arange(tensor.numel()).view(tensor.shape)
            for indexes, values in zip(expected(name, whole, who), expected(name, tensor, who), strict=True):
                assert torch.equal(_indexed(weights[name], whole, indexes), values), (name, rank)


def _indexed(tensor: Tensor, whole: Tensor, indexes: Tensor) -> Tensor:
    """Take the values of a box, whose places in the whole tensor are `indexes`, as loaders do: dimension after dimension."""
    if not indexes.numel():
        return tensor[:0].clone()
    for dimension in range(tensor.dim()):
        coordinates = torch.unravel_index(indexes.flatten(), whole.shape)[dimension]
        first, last = int(coordinates.min()), int(coordinates.max())
        tensor = tensor.narrow(dimension, first, last - first + 1)
    return tensor.clone()


@pytest.mark.parametrize("replica", REPLICAS, ids=str)
def test_a_rank_reads_its_share_and_what_is_not_divided(replica: ReplicaShape) -> None:
    plan = StagingPlan.of(DIVISIONS, replica)
    manifest, _ = staged(TENSORS, plan, 3)
    for rank in range(replica.ranks):
        who = ReplicaRank(rank, replica)
        held = sum(4 * values.numel() for name, tensor in TENSORS.items() for values in expected(name, tensor, who))
        slices = slices_of(manifest, DIVISIONS, who)
        assert sum(manifest.parts[number].size for number in slices.parts) == held


def test_values_outside_of_the_slice_are_refused_by_name() -> None:
    replica = ReplicaShape(2)
    manifest, memory = staged(TENSORS, StagingPlan.of(DIVISIONS, replica), 3)
    who = ReplicaRank(1, replica)
    slices = slices_of(manifest, DIVISIONS, who)
    weights = RankWeights(manifest.layout, slices.held, OnlyRead(manifest, memory, slices.parts))
    for name, take in {
        "model.layers.1.self_attn.q_proj.weight": lambda w: w.narrow(0, 31, 2),
        "model.layers.1.self_attn.o_proj.weight": lambda w: w[:, :16],
        "model.layers.1.mlp.experts.gate_up_proj": lambda w: w.chunk(2, dim=1)[1][3].narrow(0, 0, 8),
        "model.layers.1.mlp.experts.down_proj": lambda w: w.view(-1)[:8],
        "model.layers.0.linear_attn.in_proj_qkv.weight": lambda w: w[8:32],
        "lm_head.weight": lambda w: w,
    }.items():
        with pytest.raises(SliceMissing, match=rf"{name} that are not in this rank's slice"):
            take(weights[name]).clone()


def test_one_value_after_the_slice_is_refused() -> None:
    replica = ReplicaShape(2)
    manifest, memory = staged(TENSORS, StagingPlan.of(DIVISIONS, replica), 3)
    slices = slices_of(manifest, DIVISIONS, ReplicaRank(0, replica))
    weights = RankWeights(manifest.layout, slices.held, OnlyRead(manifest, memory, slices.parts))
    queries, output = (
        weights["model.layers.1.self_attn.q_proj.weight"],
        weights["model.layers.1.self_attn.o_proj.weight"],
    )
    assert queries.view(-1)[255:256].item() == 70255
    for view in (queries.view(-1)[255:257], output[7:, 15:17]):
        with pytest.raises(SliceMissing):
            view.clone()


@given(
    data=st.data(),
    sections=st.lists(
        st.builds(TensorSection, st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 3)),
        min_size=1,
        max_size=3,
    ),
    train=st.integers(1, 4),
)
def test_any_division_of_any_shard_can_be_read_in_slices(data, sections: list[TensorSection], train: int) -> None:
    division = Division(tuple(sections))
    rows = sections[0].outer if len(sections) == 1 else sum(section.size for section in sections)
    tensor = torch.arange(sum(section.size for section in sections)).view(rows, -1)
    shapes = st.builds(ReplicaShape, st.sampled_from((1, 2, 3, 4, 8)))
    plan, reader = StagingPlan.of({"w": division}, data.draw(shapes)), data.draw(shapes)
    manifest, memory = staged({"w": tensor}, plan, train)
    for rank in range(reader.ranks):
        who = ReplicaRank(rank, reader)
        slices = slices_of(manifest, {"w": division}, who)
        view = RankWeights(manifest.layout, slices.held, OnlyRead(manifest, memory, slices.parts))["w"].view(-1)
        for held in division.held(who):
            width = held.section.units * held.section.unit
            for outer in held.outer:
                first = held.start + outer * width + held.units.start * held.section.unit
                values = view[first : first + len(held.units) * held.section.unit].clone()
                assert values.tolist() == list(range(first, first + len(values)))


def test_a_shard_that_divides_a_row_cannot_be_staged_in_blocks() -> None:
    plan = StagingPlan.of({"w": columns_divided((4, 8))}, ReplicaShape(2))
    shard = WeightShard("w", (4, 8), torch.float32, 4, torch.zeros(8))
    with pytest.raises(ValueError, match="w: a shard of values 4 to 12 does not consist of rows of 8 values"):
        list(pieces([shard], plan=plan))


@pytest.mark.parametrize(
    ("division", "expected_bytes"),
    [
        (rows_divided((8, 4)), {(0, 0): 48, (1, 0): 16, (1, 1): 32, (2, 1): 32}),  # 8 rows on 3 ranks: 3, 3, 2
        (columns_divided((8, 4)), {(0, 0): 24, (0, 1): 24, (1, 0): 24, (1, 1): 24, (2, 0): 16, (2, 1): 16}),
        (None, {(0, 0): 48, (0, 1): 48, (1, 0): 48, (1, 1): 48, (2, 0): 32, (2, 1): 32}),
    ],
    ids=["rows", "columns", "whole"],
)
def test_who_sends_how_much_to_whom(division: Division | None, expected_bytes: dict[tuple[int, int], int]) -> None:
    divided = {} if division is None else {"w": division}
    plan = StagingPlan.of(divided, ReplicaShape(2))
    layout = WeightLayout.of([("w", (8, 4), "float32")], plan)
    version = planned_version(layout, plan, held_by_rows(layout, 3), PART_BYTES)
    assert transfers(version, divided, ReplicaShape(2)) == expected_bytes


def test_the_planned_parts_are_those_that_train_ranks_stage() -> None:
    plan = StagingPlan.of(DIVISIONS, ReplicaShape(4))
    layout = layout_of(shards(TENSORS, 1, 0), plan)
    planned = planned_version(layout, plan, held_by_rows(layout, 3), PART_BYTES)
    memory = torch.zeros(layout.size, dtype=torch.uint8).numpy()
    written = [
        (rank, piece.write(memory[: piece.size]))
        for rank in range(3)
        for piece in pieces(shards(TENSORS, 3, rank), plan=plan)
    ]
    assert [(rank, part.tensor, part.start, part.size) for rank, part in written] == [
        (rank, part.tensor, part.start, part.size)
        for rank, part in zip(planned.writers, planned.manifest.parts, strict=True)
    ]


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_transport_brings_a_staged_version_whole_and_in_slices(name: str, open_way, monkeypatch) -> None:
    """Three train ranks stage for replicas of four ranks. A replica of any shape reads that, and a lane's of two ranks, too."""
    monkeypatch.setattr(ways, "BUCKET_BYTES", 10_000)
    way, arriving = open_way(name, ReplicaShape(4)), reader()
    for version in (1, 2):
        tensors = {name: tensor + version for name, tensor in TENSORS.items()}
        published = way.publish(tensors, version, frozenset({1}))
        weights = fetch(arriving, published)
        assert bits(weights) == bits(tensors)
        for replica in (ReplicaShape(4), ReplicaShape(2), ReplicaShape(4, divides_experts=True)):
            for rank in range(replica.ranks):
                who = ReplicaRank(rank, replica)
                sliced = weights.sliced(DIVISIONS, who)
                for each, tensor in tensors.items():
                    whole = torch.arange(tensor.numel()).view(tensor.shape)
                    for indexes, values in zip(expected(each, whole, who), expected(each, tensor, who), strict=True):
                        assert torch.equal(_indexed(sliced[each], whole, indexes), values)
    damaged = way.damage(published)  # of whichever rank's slice it is a part, the whole version is refused
    with pytest.raises(WeightsDamaged, match=rf"version 2: checksum of {re.escape(damaged)} differs"):
        fetch(reader(), published)
    way.close()


class DevicePiece:
    """A piece whose values are on a device. Its checksum is its size."""

    values = SimpleNamespace(device=torch.device("cuda"))

    def __init__(self, size: int) -> None:
        self.size, self.thread = size, ""

    def write(self, memory: Memory) -> TensorPart:
        self.thread = threading.current_thread().name
        return TensorPart(0, 0, len(memory), self.size)


def test_pieces_on_a_device_are_written_on_several_threads_and_stay_in_order() -> None:
    memory = torch.zeros(100, dtype=torch.uint8).numpy()
    shard = WeightShard("w", (3,), torch.uint8, 0, torch.tensor([1, 2, 3], dtype=torch.uint8))
    [on_host], on_device = pieces([shard]), [DevicePiece(size) for size in (5, 6, 7)]
    contents = [(piece, memory[: piece.size]) for piece in (*on_device[:2], on_host, on_device[2])]
    with ThreadPoolExecutor(2, "staging") as threads:
        parts = write_pieces(contents, threads)
    assert [part.size for part in parts] == [5, 6, 3, 7]
    assert all(piece.thread.startswith("staging") for piece in on_device)
    assert memory[:3].tolist() == [1, 2, 3]
