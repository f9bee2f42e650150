"""Folders of the shape in which Qwen3.5 is published, shrunk in sizes only.

What config.json says is as quoted in public repositories in 2026: `Qwen/Qwen3.5-0.8B`, Qwen3.5-27B, Qwen3.5-35B-A3B and
Qwen3.6-35B-A3B, which has the same classes. Weights are random.
"""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from qwen35_trainer.data.tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.hub_tensors import to_per_expert
from tests.models.scenes import END, IMAGE, START, VIDEO

TEMPLATE = Path(__file__).parents[2] / "examples" / "tiny" / "chat.jinja"
"""The chat template of these folders."""
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of what is published in float32; all else is bfloat16."""

_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 18,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 48,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 256,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 23,
}
_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.2,
    "intermediate_size": 48,
    "model_type": "qwen3_5",
    "num_heads": 2,
    "num_position_embeddings": 25,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": IMAGE,
    "model_type": "qwen3_5",
    "text_config": _TEXT,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": VIDEO,
    "vision_config": _VISION,
    "vision_end_token_id": END,
    "vision_start_token_id": START,
}
_EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "shared_expert_intermediate_size": 24,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 4,
    "bos_token_id": 18,
    "pad_token_id": None,
}


def _untied() -> dict[str, Any]:
    config = copy.deepcopy(_DENSE) | {"tie_word_embeddings": False, "language_model_only": False}
    config["text_config"] |= {"tie_word_embeddings": False, "linear_num_value_heads": 6, "output_gate_type": "swish"}
    return config


def _experts() -> dict[str, Any]:
    config = _untied() | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    text = config["text_config"] | _EXPERTS
    del text["intermediate_size"], text["mlp_only_layers"], text["output_gate_type"]
    config["text_config"] = text
    config["vision_config"]["model_type"] = "qwen3_5_moe"
    return config


def _later_experts() -> dict[str, Any]:
    """As Qwen3.6 names more types."""
    config = _experts() | {"dtype": "bfloat16"}
    config["vision_config"] |= {"dtype": "bfloat16", "model_type": "qwen3_5_moe_vision"}
    config["text_config"] |= {"partial_rotary_factor": 0.25, "router_aux_loss_coef": 0.001}
    return config


def _text_only() -> dict[str, Any]:
    return copy.deepcopy(_DENSE) | {"architectures": ["Qwen3_5ForCausalLM"]}


SHAPES = {
    "0.8B, tied": _DENSE,
    "27B, untied": _untied(),
    "35B-A3B": _experts(),
    "35B-A3B, vision dtype named": _later_experts(),
    "text only": _text_only(),
}
"""config.json by what is published so."""


def write(
    folder: Path,
    shape: str,
    *,
    per_expert: bool = False,
    spread: float | None = None,
    text: dict[str, Any] | None = None,
    whole_head: bool = False,
) -> Any:
    """Write the folder; returns the library's model of it, in float32, with the values that are stored.

    spread: standard deviation of the weights; None: that of the shape, at which every part shows in the results. text: other
    values of fields of the text model. whole_head: whether the folder has all tensors of the prediction head, and not only two of them.
    """
    config = copy.deepcopy(SHAPES[shape])
    config["text_config"] |= text or {}
    if spread is not None:
        for part in (config["text_config"], config["vision_config"]):
            part["initializer_range"] = spread
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": [18], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = classes.construct(classes.read_config(folder)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)  # states that last: fresh ones forget within a few positions
            if not name.endswith(FLOAT32):
                parameter.copy_(parameter.bfloat16())
    stored = {name: tensor.clone() for name, tensor in _stored(model, shape, per_expert=per_expert)}
    if whole_head:
        stored |= _head(model, per_expert=per_expert)
    write_shards(folder, stored, 3)
    return model


def write_shards(folder: Path, stored: dict[str, Tensor], shards: int) -> None:
    """Write tensors by name to this number of weight files, and their index."""
    names = list(stored)
    files = {
        name: f"model-{1 + i * shards // len(names):05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        save_file(
            {name: stored[name] for name in names if files[name] == file}, folder / file, metadata={"format": "pt"}
        )
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Write a tokenizer with a token for each of at most 16 words, its chat template, and the settings of the processor of pictures.

    A picture of 16 × 16 pixels is as large as the processor allows, and has four tokens.
    """
    from transformers import PreTrainedTokenizerFast

    special = {"<|endoftext|>": 16, "<|im_start|>": 17, "<|im_end|>": 18, VISION_START: START, VISION_END: END}
    special |= {IMAGE_PAD: IMAGE, VIDEO_PAD: VIDEO}
    vocabulary = {word: index for index, word in enumerate(words)} | special
    longer = [re.escape(word) for word in sorted(words, key=len, reverse=True) if len(word) > 1]
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longer, r"[\s\S]"])), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(special),
        chat_template=TEMPLATE.read_text(),
    )
    tokenizer.save_pretrained(folder)
    processor = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    processor |= {
        "size": {"shortest_edge": 64, "longest_edge": 256},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All that a folder's weight files hold, by name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def _stored(model: Any, shape: str, *, per_expert: bool) -> Iterator[tuple[str, Tensor]]:
    """Names and values as in published files: with prediction heads, without a tied output layer."""
    tied = model.config.tie_word_embeddings
    parameters = (
        (name, parameter.detach())
        for name, parameter in model.named_parameters()
        if not (tied and name == "lm_head.weight")
    )
    for name, tensor in to_per_expert(parameters) if per_expert else parameters:
        published = name.replace("model.", "model.language_model.", 1) if shape == "text only" else name
        yield published, tensor if name.endswith(FLOAT32) else tensor.bfloat16()
    size = model.get_input_embeddings().weight.shape[1]
    yield "mtp.fc.weight", torch.full((size, 2 * size), 0.5, dtype=torch.bfloat16)
    yield "mtp.norm.weight", torch.ones(size, dtype=torch.bfloat16)


def _head(model: Any, *, per_expert: bool) -> dict[str, Tensor]:
    """All tensors of the prediction head, whose layer is one of full attention."""
    random, size = torch.Generator().manual_seed(7), model.get_input_embeddings().weight.shape[1]
    prefix = next(
        name.removesuffix("self_attn.q_proj.weight")
        for name, _ in model.named_parameters()
        if "self_attn.q_proj" in name
    )
    shapes = {
        name.replace(prefix, "mtp.layers.0."): parameter.shape
        for name, parameter in model.named_parameters()
        if name.startswith(prefix)
    }
    shapes |= {
        f"mtp.{name}.weight": torch.Size([size]) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    shapes["mtp.fc.weight"] = torch.Size([size, 2 * size])
    values = ((name, 0.2 * torch.randn(shape, generator=random)) for name, shape in shapes.items())
    return {name: tensor.bfloat16() for name, tensor in (to_per_expert(values) if per_expert else values)}
