"""Find settings in a model's config.json that have values which the Megatron engine does not compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from qwen35_trainer.manifest.megatron import FIELD, SettingValue
from qwen35_trainer.manifest.train import RouterSpec
from qwen35_trainer.models.qwen3_5 import prediction_head
from qwen35_trainer.models.qwen3_5.classes import HFConfig

TEXT_MODELS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe")
"""Values of `model_type` in config.json that this engine trains."""

CHUNKS: Final = "mlp_chunks_for_training"
"""Setting of megatron-core: into how many parts it divides the tokens of a layer."""

COMPUTED = {"hidden_act": "silu", "rope_parameters.rope_type": "default"}
"""Fields of config.json that may have several values → the only value that this engine computes."""


def problems(model: HFConfig) -> Iterator[str]:
    """Yield a message for each setting of a model that the Megatron engine does not support.

    A message names the field, the value and the fix. If the model is of another kind, only this problem is reported.
    model: the configuration of the text model in transformers, also of the one inside a vision-language model.
    """
    if model.model_type not in TEXT_MODELS:
        yield (
            f"spec.train.engine: Megatron trains models of the types {', '.join(TEXT_MODELS)}, and the model's type is "
            f"{model.model_type}; set the engine to FSDP"
        )
        return
    values = {
        "hidden_act": model.hidden_act,
        "rope_parameters.rope_type": model.rope_parameters.get("rope_type", "default"),
    }
    for name, computed in COMPUTED.items():
        if values[name] != computed:
            yield (
                f"spec.train.engine: {name} of the model's config.json is {values[name]}, and Megatron computes {computed} only; "
                "set the engine to FSDP"
            )
    if getattr(model, "num_experts_per_tok", None) == 1:
        yield (
            "spec.train.engine: num_experts_per_tok of the model's config.json is 1, and Megatron routes each token to at least 2 experts; "
            "set the engine to FSDP"
        )


def router_problems(model: HFConfig, router: RouterSpec, settings: Mapping[str, SettingValue]) -> Iterator[str]:
    """Yield a text for each setting with which routers cannot have losses or replay, where the manifest sets one of these.

    model: as in `problems`. settings: `overrideTransformerConfig` of the manifest.
    """
    if router == RouterSpec():
        return
    if not hasattr(model, "num_experts"):
        fields = "replay" if router.replay else "its losses"
        yield f"spec.train.router: the model's type is {model.model_type}, which has no router; remove {fields}"
    elif (chunks := settings.get(CHUNKS, 1)) != 1:
        yield (
            f"{FIELD}.{CHUNKS}: {chunks}, but routers with losses or replay need all tokens of a micro-batch together; remove it, or "
            "spec.train.router"
        )


def head_problems(model: HFConfig, *, pictures: bool) -> Iterator[str]:
    """Yield a text for each setting with which the head for multi-token prediction cannot train.

    model: as in `problems`. pictures: whether the data have pictures, which the model reads.
    """
    if pictures:
        yield (
            "spec.train.multiTokenPrediction: the data have pictures, and the head trains on text only; remove the field, or the "
            "pictures"
        )
    for problem, fix in prediction_head.problems(model.to_dict()):
        yield f"spec.train.multiTokenPrediction: {problem} {fix}"
