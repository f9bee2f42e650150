"""A Qwen3.5 model, from random weights or from a folder, ready for this trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.spec import Model, RandomModel


def build(model: Model, *, seed: int, vocabulary: int, max_length: int, base: Path) -> HFModule:
    """The model that `spec.model` names, in float32 on the CPU, adapted.

    vocabulary: tokens of its tokenizer.  max_length: prompt and response together, in tokens.  base: folder that a
    relative `source.path` starts from.  The same seed gives the same random weights in every process.
    """
    if model.source.random is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return adapt(_random(model.source.random, vocabulary, max_length))
    assert model.source.path is not None, "volumes are mounted to a path before the trainer starts"
    from transformers import AutoModelForCausalLM

    return adapt(
        AutoModelForCausalLM.from_pretrained(base / model.source.path, dtype=torch.float32, local_files_only=True)
    )


def _random(shape: RandomModel, vocabulary: int, max_length: int) -> HFModule:
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hiddenSize,
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.fullAttentionInterval,
        "num_attention_heads": shape.attentionHeads,
        "num_key_value_heads": shape.keyValueHeads,
        "head_dim": shape.headDim,
        "linear_num_key_heads": shape.linearKeyHeads,
        "linear_num_value_heads": shape.linearValueHeads,
        "linear_key_head_dim": shape.linearHeadDim,
        "linear_value_head_dim": shape.linearHeadDim,
        "initializer_range": shape.initializerRange,
        "tie_word_embeddings": shape.tieEmbeddings,
        "max_position_embeddings": max_length,
        "use_cache": False,
    }
    if shape.experts == 0:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=shape.intermediateSize, **common))
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(
            num_experts=shape.experts,
            num_experts_per_tok=shape.expertsPerToken,
            moe_intermediate_size=shape.intermediateSize,
            shared_expert_intermediate_size=shape.intermediateSize,
            **common,
        )
    )
