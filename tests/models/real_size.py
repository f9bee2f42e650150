"""A folder of Qwen3.5-0.8B as it is published, with random weights: python -m tests.models.real_size FOLDER text|published.

The configuration is that of `Qwen/Qwen3.5-0.8B` in a published log of 2026-05-25; `text` names the class of its text model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import classes
from tests.data import qwen
from tests.models.published import FLOAT32

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3584,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 12,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "model_type": "qwen3_5",
        "num_heads": 12,
        "num_position_embeddings": 2304,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def write(folder: Path, kind: str) -> None:
    """kind: `published` for the vision-language class, `text` for the class of the text model."""
    config = CONFIG | ({"architectures": ["Qwen3_5ForCausalLM"]} if kind == "text" else {})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    model = classes.construct(classes.read_config(folder))
    for name, parameter in model.named_parameters():
        if not name.endswith(FLOAT32):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="400MB")
    (folder / "config.json").write_text(
        json.dumps(config, indent=2)
    )  # save_pretrained adds fields that are not published
    tokenizer = qwen.tokenizer()
    tokenizer.chat_template = qwen.template("qwen3_5_think")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
