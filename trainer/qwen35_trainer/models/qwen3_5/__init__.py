"""The Qwen3.5 family: hybrid decoders of Gated DeltaNet and full-attention layers, dense or mixture-of-experts."""

from typing import Any

type HFModule = Any
"""A module of the transformers library. Its parts are attributes, which torch's types cannot express."""

type Context = Any
"""The context that a `torch.autograd.Function` passes from forward to backward. Torch does not type its attributes."""
