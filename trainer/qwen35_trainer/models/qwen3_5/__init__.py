"""The Qwen3.5 family: hybrid decoders of Gated DeltaNet and full-attention layers, dense or mixture-of-experts."""

from typing import Any

type HFModule = Any
"""A module of the transformers library: its parts are attributes, which torch's types cannot express."""

type Context = Any
"""The context of a `torch.autograd.Function`, from forward to backward: torch types neither its attributes nor `apply`."""
