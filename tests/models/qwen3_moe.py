"""Folders of the shape in which mixtures of experts of Qwen3 are published, shrunk in sizes only.

What config.json says is as in `Qwen/Qwen3-235B-A22B` and `Qwen/Qwen3-30B-A3B`. Weights are random.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.hub_tensors import to_per_expert
from tests.models.published import write_shards

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 16,
    "decoder_sparse_step": 1,
    "eos_token_id": 18,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 23,
}
"""Contents of config.json. Sizes are those of a tiny model."""


ABSENT = object()
"""Value of a field that config.json does not contain."""


def contents(**fields: Any) -> dict[str, Any]:
    """Return the contents of config.json. fields: other values, or ABSENT."""
    return {name: value for name, value in (CONFIG | fields).items() if value is not ABSENT}


def model(**fields: Any) -> Any:
    """Return the library's model with random weights in float32. fields: as for `contents`."""
    return _random(transformers.Qwen3MoeConfig.from_dict(contents(**fields)))


def _random(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = classes.construct(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:  # a norm that multiplies by 1 in every channel would hide a factor 1 + weight
                parameter.uniform_(0.5, 1.5, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return made


def write(folder: Path, **fields: Any) -> Any:
    """Write the folder, with each expert in tensors of its own; returns the library's model of it, in float32, with the values that
    are stored. fields: as for `contents`.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(contents(**fields), indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [18, 16], "do_sample": True}))
    model = _random(classes.read_config(folder))
    stored = {name: tensor.bfloat16().clone() for name, tensor in to_per_expert(model.state_dict().items())}
    write_shards(folder, stored, 2)
    return model
