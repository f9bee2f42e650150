"""Check the config.json of a mixture of experts of Qwen3 (`qwen3_moe`). Values that are not computed here would give another model.

This module needs no torch, so that a manifest can be checked quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MODEL_TYPE = "qwen3_moe"
COMPUTED = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "use_sliding_window": False,
}
"""Field of config.json → the value that this trainer computes. The published models have it."""
DEFAULTS = COMPUTED | {"norm_topk_prob": False}
"""Field of config.json → the value that transformers takes where the field is absent."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies depend on config.json alone. Those of other kinds depend on the longest sequence
of a forward pass, which differs between micro-batches, and between the trainer and the rollout engine."""


def problem(config: Mapping[str, Any]) -> str | None:
    """Return why the model that config.json describes is not supported, or None if it is.

    config: the contents of config.json.
    """
    others = [*_layers(config), *_rotary(config)]
    return f"config.json: {', '.join(others)}, is not supported for {MODEL_TYPE}." if others else None


def experts(config: Mapping[str, Any]) -> Any:  # noqa: ANN401  # any value of JSON
    """Return the number of experts of a layer; None if config.json does not contain it.

    Published folders name it num_experts, and transformers writes it as num_local_experts.
    """
    return config.get("num_local_experts", config.get("num_experts"))


def _layers(config: Mapping[str, Any]) -> Iterator[str]:
    for name, computed in COMPUTED.items():
        # transformers takes null for an empty list.
        absent = name not in config or (name == "mlp_only_layers" and config[name] is None)
        value = DEFAULTS[name] if absent else config[name]
        if value != computed:
            yield f"{name} {value}{' (the default of transformers)' if absent else ''}, not {computed}"
    if experts(config) == 0:
        yield "num_experts 0, not at least 1"
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        yield f"layer_types {kinds}, not full_attention in every layer"


def _rotary(config: Mapping[str, Any]) -> Iterator[str]:
    rotary = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rotary, Mapping):
        yield f"rope_parameters {rotary}, not a mapping"
        return
    if (kind := rotary.get("rope_type", rotary.get("type", "default"))) not in ROPE_TYPES:
        yield f"rope_type {kind}, not {' or '.join(ROPE_TYPES)}"
    factor = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor not in (None, 1):  # transformers' class ignores it, and vLLM's does not
        yield f"partial_rotary_factor {factor}, not 1"
