"""The division of a model and its batches over ranks, and the ranks that compute the same share of a batch.

    dense layers   rank = tensor + T × (data + D × pipeline)            neighbouring ranks share matrix products
    experts        rank = expertTensor + ET × (expert + E × (copy + C × pipeline))

tensor, data, … are a rank's indices in its groups. The capitals are sizes of groups: T tensor, D data, ET expertTensor,
E expert, and C copies of the experts. Both lines number the same ranks, in megatron-core's order "tp-cp-ep-dp-pp".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen35_trainer.manifest import ParallelismSpec
from qwen35_trainer.models.qwen3_5.classes import HFConfig

PLACE = "spec.train.parallelism"


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    """Number of virtual stages of each pipeline stage, each of which has consecutive layers."""
    sequence: bool = False
    """Whether tensor-parallel ranks divide the positions of a sequence between matrix products."""

    @classmethod
    def of(cls, degrees: ParallelismSpec) -> Layout:
        """Return the layout of a manifest.

        Sequence parallelism is used whenever tensor parallelism is used, because it costs nothing extra.
        """
        return cls(
            degrees.tensor,
            degrees.pipeline,
            degrees.expert,
            degrees.expertTensor,
            degrees.virtualPipeline,
            sequence=degrees.tensor > 1,
        )


def stage_sizes(layers: int, stages: int, virtual: int = 1) -> tuple[int | None, int | None]:
    """Return the numbers of layers of the first and the last pipeline stage, or None for both if all stages are equal.

    All stages between the first and the last have the same number of layers, as megatron-core requires. This number is the
    mean over all stages. It is rounded up if at least two layers then remain for the first and the last stage together, and
    otherwise rounded down. The last stage never has more layers than the first, because the last also has the output layer.

    virtual: number of virtual stages per pipeline stage, which must divide `layers`. The rules above then apply to
    virtual stages, because all virtual stages of one pipeline stage have equal numbers of layers.
    """
    if virtual > 1:
        first, last = stage_sizes(layers // virtual, stages)
        return (None, None) if first is None or last is None else (first * virtual, last * virtual)
    if layers % stages == 0:
        return None, None
    if stages == 2:
        return layers - layers // 2, layers // 2
    middle = -(-layers // stages)
    rest = layers - middle * (stages - 2)
    if rest < 2:
        middle -= 1
        rest = layers - middle * (stages - 2)
    return rest - rest // 2, rest // 2


def problems(layout: Layout, model: HFConfig, ranks: int) -> Iterator[str]:
    """Yield a text for each setting of the layout that does not fit the model or the number of ranks.

    A text names the field, the value and the fix.
    """
    yield from _dense_problems(layout, model, ranks)
    if hasattr(model, "num_experts"):
        yield from _expert_problems(layout, model, ranks)
        return
    for name, degree in (("expert", layout.expert), ("expertTensor", layout.expert_tensor)):
        if degree > 1:
            yield f"{PLACE}.{name}: {degree}, but the model has no experts; set it to 1"
    yield from _indivisible(model, "tensor", layout.tensor, "intermediate_size")


def _dense_problems(layout: Layout, model: HFConfig, ranks: int) -> Iterator[str]:
    if layout.pipeline > model.num_hidden_layers:
        yield f"{PLACE}.pipeline: {layout.pipeline} is above the model's {model.num_hidden_layers} layers; lower it"
    elif layout.virtual > 1:
        yield from _virtual_problems(layout, model.num_hidden_layers)
    if model.tie_word_embeddings and layout.pipeline > 1:
        yield f"{PLACE}.pipeline: {layout.pipeline}, but the model's output layer is its embedding; set it to 1"
    if ranks % (layout.tensor * layout.pipeline):
        yield (
            f"{PLACE}: tensor {layout.tensor} × pipeline {layout.pipeline} does not divide {ranks} ranks; use degrees that do"
        )
    heads = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    yield from _indivisible(model, "tensor", layout.tensor, *heads)


def _virtual_problems(layout: Layout, layers: int) -> Iterator[str]:
    place = f"{PLACE}.virtualPipeline: {layout.virtual}"
    if layout.pipeline == 1:
        yield f"{place}, but pipeline is 1: virtual stages are parts of pipeline stages; set it to 1"
    elif layers % layout.virtual:
        yield f"{place} does not divide the model's {layers} layers; use a divisor"
    elif layers < layout.virtual * layout.pipeline:
        yield f"{place} × pipeline {layout.pipeline} is above the model's {layers} layers; lower one of them"


def _expert_problems(layout: Layout, model: HFConfig, ranks: int) -> Iterator[str]:
    if model.num_experts % layout.expert:
        yield f"{PLACE}.expert: {layout.expert} does not divide the model's {model.num_experts} experts; use a divisor"
    if ranks % (layout.expert * layout.expert_tensor * layout.pipeline):
        yield (
            f"{PLACE}: expertTensor {layout.expert_tensor} × expert {layout.expert} × pipeline {layout.pipeline} does not "
            f"divide {ranks} ranks; use degrees that do"
        )
    yield from _indivisible(model, "expertTensor", layout.expert_tensor, "moe_intermediate_size")
    yield from _indivisible(model, "tensor", layout.tensor, "shared_expert_intermediate_size")


def _indivisible(model: HFConfig, field: str, degree: int, *sizes: str) -> Iterator[str]:
    for name in (size for size in sizes if hasattr(model, size)):
        if getattr(model, name) % degree:
            yield f"{PLACE}.{field}: {degree} does not divide {name} {getattr(model, name)} of the model; use a divisor"
