"""Move tensors between the published model and this rank's parameters: loading, publication, checkpoints.

    load       published tensors ─► merge, cut (`weight_table`) ─► this rank's part
    publish    this rank's part ─► all parts of the tensor-parallel group ─► join, divide ─► published tensors

Loading and publication handle one parameter at a time. A rank holds at most one whole parameter, in addition to the
tensors that it publishes. Of the ranks that have the same parameter or parts of it, one publishes the whole parameter; these
ranks alternate by parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qwen35_trainer.engines.megatron.model import StageModel
from qwen35_trainer.engines.megatron.weight_table import (
    EXPERT_ROWS,
    HEAD_LAYER,
    LAYER_ROWS,
    OUTER_ROWS,
    TEXT,
    TOWER,
    ModelShape,
    Row,
    text_prefix,
    tower_rows,
)
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.models.qwen3_5 import prediction_head

LAYER_NUMBER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
"""Matches the number of a decoder layer in the name of a published tensor."""
FIRST_STAGE = ("embedding.", "visual.")
"""Prefixes of the parameters outside decoder layers that the first pipeline stage has, in megatron-core's names."""
type Read = Callable[..., Tensor]
"""A function read(name, *slices) that returns a published tensor, or the part that slices of its
leading dimensions select."""


@dataclass(frozen=True)
class PublishedPart:
    """Consecutive values of a published tensor that this rank publishes."""

    name: str
    start: int
    """Index of the first value in the flattened tensor."""
    values: Tensor | None
    """The values; None if this rank publishes nothing of the tensor."""


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model, or the same parameter of all experts of a layer."""

    row: Row
    published: tuple[str, ...]
    own: tuple[nn.Parameter, ...]
    """This rank's parameter, or the parameters of this rank's experts in their order. Empty if another
    pipeline stage has them."""
    of_experts: bool

    @property
    def published_here(self) -> bool:
        """Whether ranks of this pipeline stage publish the parameter.

        The last of several stages has a copy of the embedding for multi-token prediction. megatron-core marks the copy as shared.
        """
        return bool(self.own) and not any(getattr(parameter, "shared", False) for parameter in self.own)


class PublishedModel:
    """The parameters of this rank, as parts of published tensors.

    shapes: name of a published tensor → its shape. layers: number of layers of the whole model. only_trained: whether parameters
    that do not train are left out; `shapes` must lack them, too.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        shape: ModelShape,
        shapes: Mapping[str, tuple[int, ...]],
        layers: int,
        *,
        only_trained: bool = False,
    ) -> None:
        self._shape, self._shapes = shape, shapes
        named = {name: each for name, each in _named(stages).items() if each.requires_grad or not only_trained}
        self._entries = entries_of(named, shapes, layers)

    @torch.no_grad()
    def load(
        self,
        read: Read,
        put: Callable[[nn.Parameter, Tensor], object] = Tensor.copy_,
        wanted: Callable[[nn.Parameter], bool] = lambda _: True,
    ) -> None:
        """Call `put` for each of this rank's wanted parameters, with the parameter and its new values.

        By default, `put` sets the parameter. The new values are this rank's part of the published tensors that `read`
        returns. `read` is called only for tensors of which this rank has a part. wanted: returns whether a parameter
        gets new values; the tensors of others are not read. By default, all do.
        """
        for entry in self._entries:
            for number, parameter in enumerate(entry.own):
                if wanted(parameter):
                    put(parameter, self._part(entry, number, read))

    def _part(self, entry: Entry, number: int, read: Read) -> Tensor:
        """Return this rank's part of one parameter of an entry. number: its position in `entry.own`."""
        group = _group(entry)
        if entry.of_experts:
            expert = parallel_state.get_expert_model_parallel_rank() * len(entry.own) + number
            tensors = [read(name, slice(expert, expert + 1))[0] for name in entry.published]
        else:
            tensors = [read(name) for name in entry.published]
        whole = entry.row.arrangement.merge(tensors, self._shape)
        return entry.row.arrangement.cut(whole, group.size(), self._shape)[group.rank()]

    @torch.no_grad()
    def publish(self, value: Callable[[nn.Parameter], Tensor], window: range | None = None) -> Iterator[PublishedPart]:
        """Yield this rank's part of every published tensor, in the same order on every rank. Collective.

        value: returns the tensor to publish for a parameter, in the parameter's shape: the parameter itself, its
        gradient, or one of AdamW's moments. window: one of `windows`, if only its tensors are published.
        """
        for number in range(len(self._entries)) if window is None else window:
            entry = self._entries[number]
            if not entry.published_here:
                yield from (PublishedPart(name, 0, None) for name in entry.published)
                continue
            group, (copy, copies) = _group(entry), _copy(entry)
            publishes = number % copies == copy
            wholes = []
            for parameter in entry.own:
                parts = _gathered(value(parameter), group)
                if publishes:
                    wholes.append(self._divided(entry, parts))
            first = parallel_state.get_expert_model_parallel_rank() if entry.of_experts else 0
            for position, name in enumerate(entry.published):
                if not publishes:
                    yield PublishedPart(name, 0, None)
                    continue
                tensors = [whole[position] for whole in wholes]
                values = torch.stack(tensors) if entry.of_experts else tensors[0]
                yield PublishedPart(name, first * values.numel(), values.contiguous())

    @property
    def published_here(self) -> dict[str, tuple[int, ...]]:
        """Name of a published tensor → shape of the part that this rank publishes, in the order of `publish`.

        Tensors of which this rank publishes nothing are left out.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for number, entry in enumerate(self._entries):
            copy, copies = _copy(entry)
            if entry.published_here and number % copies == copy:
                shapes |= {name: self._shape_of_part(entry, name) for name in entry.published}
        return shapes

    def windows(self, numbers: int) -> Iterator[range]:
        """Divide the published tensors into consecutive windows for `publish`, the same ones on all ranks of a pipeline stage.

        numbers: maximum number of values of a window that a rank publishes. A larger parameter is a window of its own.
        """
        first, held = 0, dict[tuple[bool, int], int]()
        for number, entry in enumerate(self._entries):
            if not entry.published_here:
                continue
            _, copies = _copy(entry)
            publisher = entry.of_experts, number % copies
            size = sum(math.prod(self._shape_of_part(entry, name)) for name in entry.published)
            with_entry = held | {publisher: held.get(publisher, 0) + size}
            if held and _largest(with_entry) > numbers:
                yield range(first, number)
                first, with_entry = number, {publisher: size}
            held = with_entry
        yield range(first, len(self._entries))

    def _shape_of_part(self, entry: Entry, name: str) -> tuple[int, ...]:
        """Return the shape of the part of a published tensor that one rank publishes."""
        shape = self._shapes[name]
        return (len(entry.own), *shape[1:]) if entry.of_experts else shape

    def _divided(self, entry: Entry, parts: Sequence[Tensor]) -> list[Tensor]:
        shapes = [self._shapes[name][1:] if entry.of_experts else self._shapes[name] for name in entry.published]
        arrangement = entry.row.arrangement
        if entry.of_experts:
            return [arrangement.join(parts, self._shape)]
        return arrangement.divide(arrangement.join(parts, self._shape), self._shape, shapes)


def _named(stages: Sequence[StageModel]) -> dict[str, nn.Parameter]:
    """Return the parameters of a rank's virtual stages by name, with the numbers of layers counted over the whole model."""
    named = {}
    for stage in stages:
        numbers = {str(index): str(layer.layer_number - 1) for index, layer in enumerate(stage.decoder.layers)}
        for name, parameter in stage.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = numbers[parts[2]]
            named[".".join(parts)] = parameter
    return named


def entries_of(own: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], layers: int) -> list[Entry]:
    """Return the entries of the whole model, in the same order on every rank.

    own: this rank's parameters by name. shapes: name of a published tensor → its shape. layers: number of layers.
    Raises ValueError naming parameters that no row of the table describes, and published tensors that no row lists.
    """
    used: set[str] = set()
    listed: set[str] = set()

    def entry(row: Row, published: tuple[str, ...], names: list[str], *, of_experts: bool) -> Entry:
        used.update(names)
        listed.update(published)
        return Entry(row, published, tuple(own[name] for name in names if name in own), of_experts)

    text = text_prefix(shapes)
    entries = []
    for row in (*OUTER_ROWS, *tower_rows(shapes)):
        published = tuple(_in_model(name, text) for name in row.published)
        if set(published) <= shapes.keys():
            entries.append(entry(row, published, [row.megatron], of_experts=False))
    prefixes = [(f"decoder.layers.{layer}.", f"{text}layers.{layer}.") for layer in range(layers)]
    for prefix, published_prefix in (*prefixes, (HEAD_LAYER, prediction_head.LAYER)):
        for row in LAYER_ROWS:
            published = tuple(published_prefix + name for name in row.published)
            if set(published) <= shapes.keys():
                entries.append(entry(row, published, [prefix + row.megatron], of_experts=False))
        for row in EXPERT_ROWS:
            published = tuple(published_prefix + name for name in row.published)
            if set(published) <= shapes.keys():
                of_experts = prefix + "mlp.experts.local_experts."
                names = [name for name in own if name.startswith(of_experts) and name.endswith("." + row.megatron)]
                entries.append(entry(row, published, names, of_experts=True))
    unknown = sorted(own.keys() - used)
    if tied := "lm_head.weight" not in shapes:
        unknown = [name for name in unknown if name != "output_layer.weight"]
    missing = sorted(shapes.keys() - listed)
    if unknown or missing:
        raise ValueError(
            f"no row of weight_table has the parameters {', '.join(unknown) or 'none'}, or the published tensors "
            f"{', '.join(missing) or 'none'}: the model is of another kind (tied output layer: {tied})"
        )
    return entries


def publishers(
    shapes: Mapping[str, tuple[int, ...]], stages: Sequence[Collection[int]], degrees: ParallelismSpec, ranks: int
) -> Iterator[tuple[int, str, range]]:
    """Yield rank, name of a published tensor, and the values of it that the rank publishes, as `PublishedModel.publish` does.

    Pure: needs neither a model nor process groups. shapes: name of a published tensor → its shape. stages: numbers of the
    decoder layers of each pipeline stage. degrees: the parallelism of the `ranks` train ranks.
    """
    in_stage, last = ranks // len(stages), len(stages) - 1
    stage_of = {layer: number for number, layers in enumerate(stages) for layer in layers}
    for number, entry in enumerate(entries_of({}, shapes, len(stage_of))):
        layer, of_first = LAYER_NUMBER.match(entry.published[0]), entry.row.megatron.startswith(FIRST_STAGE)
        stage = stage_of[int(layer[1])] if layer else 0 if of_first else last
        blocks, parts = (degrees.expert, degrees.expertTensor) if entry.of_experts else (1, degrees.tensor)
        copy, part = divmod(number % (in_stage // blocks), parts)  # the rank whose turn it is
        for name, block in product(entry.published, range(blocks)):
            size = math.prod(shapes[name]) // blocks
            rank = stage * in_stage + part + parts * (block + blocks * copy)
            yield rank, name, range(block * size, (block + 1) * size)


def _in_model(name: str, text: str) -> str:
    """Return the published name of a tensor of the table. text: prefix of the text model's tensors in the published model."""
    return text + name.removeprefix(TEXT) if name.startswith(TEXT) and not name.startswith(TOWER) else name


def _group(entry: Entry) -> ProcessGroup:
    """Return the ranks over which the parameter of an entry is divided."""
    if entry.of_experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _copy(entry: Entry) -> tuple[int, int]:
    """Return this rank's index among the ranks that can publish an entry, and the number of these ranks."""
    group = _group(entry)
    if entry.of_experts:
        copies = parallel_state.get_expert_data_parallel_group()
    else:
        copies = parallel_state.get_data_parallel_group()
    return group.rank() + group.size() * copies.rank(), group.size() * copies.size()


def _largest(held: Mapping[tuple[bool, int], int]) -> int:
    """Return the maximum number of values that a rank publishes: it is one publisher of dense parameters, and one of experts.

    held: (whether of experts, index of the publisher) → values that it publishes.
    """
    return sum(max((held[each] for each in held if each[0] is kind), default=0) for kind in (False, True))


def _gathered(part: Tensor, group: ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
