"""The experts that the library's routers choose, and a comparison of recorded experts with them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5.family import text_model
from tests.rollout.laws import Replay

CLEAR_GAP = 0.05
"""The k-th and the next logit of a router are this far apart where rounding to bfloat16 does not decide between them."""


@contextmanager
def collected_logits(model: Any) -> Iterator[list[Tensor]]:
    """Collect the logits of a model's routers, (inputs, experts) for each layer of each forward pass."""
    logits: list[Tensor] = []

    def collect(gate: Any, inputs: tuple[Tensor, ...], _: object) -> None:
        logits.append(F.linear(inputs[0].detach().flatten(0, -2).float(), gate.weight.detach().float()))

    hooks = [layer.mlp.gate.register_forward_hook(collect) for layer in text_model(model).layers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def library_logits(model: Any, inputs: Sequence[int]) -> Tensor:
    """(inputs, layers, experts) logits of the routers in one forward pass of the library."""
    with collected_logits(model) as logits, torch.no_grad():
        model(input_ids=torch.tensor(inputs)[None], use_cache=False)
    return torch.stack(logits, 1)


def replayed_logits(
    models: Mapping[int, Any], max_length: int, seeds: Sequence[int], prompt: Sequence[int], response: Sequence[int]
) -> Tensor:
    """(inputs, layers, experts) logits of the routers where token i of a response is computed with the weights of `seeds[i]`."""
    replay = Replay(models, max_length)
    with collected_logits(replay._model) as logits:
        replay.logits(seeds, prompt, response)
    layers = len(text_model(replay._model).layers)
    calls = [torch.stack(logits[first : first + layers], 1) for first in range(0, len(logits), layers)]
    return torch.cat(calls)


@dataclass
class Compared:
    """How many recorded choices are those of the library."""

    choices: int = 0
    clear: int = 0
    """Choices that rounding does not decide."""
    equal: int = 0
    """Clear choices that are the library's."""

    def add(self, recorded: np.ndarray, logits: Tensor) -> None:
        """recorded: (inputs, layers, k). logits: (inputs, layers, experts) of the library."""
        count = recorded.shape[-1]
        assert recorded.shape == (*logits.shape[:2], count)
        values, experts = logits.sort(-1, descending=True)
        clear = values[..., count - 1] - values[..., count] > CLEAR_GAP
        expected = experts[..., :count].sort(-1).values
        equal = (torch.from_numpy(np.sort(recorded.astype(np.int64), -1)) == expected).all(-1)
        self.choices += clear.numel()
        self.clear += int(clear.sum())
        self.equal += int((clear & equal).sum())

    @property
    def clear_share(self) -> float:
        return self.clear / self.choices

    @property
    def equal_share(self) -> float:
        """Of the clear ones."""
        return self.equal / self.clear
