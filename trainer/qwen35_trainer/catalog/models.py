"""The published models: sizes from the config.json of each, by the model's name on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from qwen35_trainer.catalog.model_sizes import ModelSizes, VisionShape

_SMALL_TOWER = VisionShape(depth=12, hidden=768, intermediate=3072)
_MEDIUM_TOWER = VisionShape(depth=24, hidden=1024, intermediate=4096)
_TOWER = VisionShape(depth=27, hidden=1152, intermediate=4304)


def _qwen3_5(hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, value_heads: int) -> ModelSizes:
    return ModelSizes(
        *(hidden, layers, heads, kv_heads, 256, 248_320, intermediate),
        linear_value_heads=value_heads,
        vision=_TOWER,
        positions=262_144,
    )


def _qwen3_5_experts(
    hidden: int, layers: int, heads: int, value_heads: int, experts: int, per_token: int, intermediate: int
) -> ModelSizes:
    return ModelSizes(
        hidden,
        layers,
        heads,
        2,
        256,
        248_320,
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate=intermediate,
        shared_intermediate=intermediate,
        linear_value_heads=value_heads,
        vision=_TOWER,
        positions=262_144,
    )


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, **feed_forward: int) -> ModelSizes:
    shape = ModelSizes(hidden, layers, heads, kv_heads, 128, 151_936, full_attention_interval=1, output_gate=False)
    return replace(shape, positions=40_960, **feed_forward)  # type: ignore[arg-type]  # only integer fields


MODELS: Final[dict[str, ModelSizes]] = {
    "Qwen/Qwen3.5-0.8B": replace(_qwen3_5(1024, 24, 3584, 8, 2, 16), tied=True, vision=_SMALL_TOWER),
    "Qwen/Qwen3.5-2B": replace(_qwen3_5(2048, 24, 6144, 8, 2, 16), tied=True, vision=_MEDIUM_TOWER),
    "Qwen/Qwen3.5-4B": replace(_qwen3_5(2560, 32, 9216, 16, 4, 32), tied=True, vision=_MEDIUM_TOWER),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 32, 12_288, 16, 4, 32),
    "Qwen/Qwen3.5-27B": _qwen3_5(5120, 64, 17_408, 24, 4, 48),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5_experts(2048, 40, 16, 32, 256, 8, 512),
    "Qwen/Qwen3.5-122B-A10B": _qwen3_5_experts(3072, 48, 32, 64, 256, 8, 1024),
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5_experts(4096, 60, 32, 64, 512, 10, 1024),
    "Qwen/Qwen3-30B-A3B": _qwen3(2048, 48, 32, 4, experts=128, experts_per_token=8, expert_intermediate=768),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, intermediate=25_600),
    "Qwen/Qwen3-235B-A22B": _qwen3(4096, 94, 64, 4, experts=128, experts_per_token=8, expert_intermediate=1536),
}
"""Name of a model → its sizes. Sources: config.json of each repository, and THUDM/slime,
scripts/models, which has the same numbers. 2B and 4B: the model cards, and for the vision tower Qwen3-VL-2B and 4B.

A test builds the transformers class of each Qwen3.5 model and compares its number of
parameters with `planning/parameters.py`.
"""


def find(name: str) -> ModelSizes | None:
    """Return the sizes of a published model; None if the catalog does not have it.

    name: such as Qwen/Qwen3.5-9B-Base. The owner, upper and lower case, and a suffix such as -Base make no difference, except that
    `positions` of a model with a suffix is not known: Qwen3-30B-A3B-Instruct-2507 has more than Qwen3-30B-A3B.
    """
    last = name.rsplit("/", 1)[-1].lower()
    matches = [key for key in MODELS if last.startswith(key.rsplit("/", 1)[-1].lower())]
    if not matches:
        return None
    key = max(matches, key=len)
    return MODELS[key] if last == key.rsplit("/", 1)[-1].lower() else replace(MODELS[key], positions=None)
