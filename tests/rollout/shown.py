"""Prompts with pictures for rollout engines, and the log-probs that the library gives to their responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens, SequenceRequest
from tests.models.scenes import START, Grid, as_the_library_wants, show

LIMIT = 9
SCENES: list[list[int | Grid | tuple[str, Grid]]] = [
    [2, (1, 4, 6), 1],
    [3],
    [1, (1, 2, 2), 2, (1, 6, 4), 1],
    [3, ("video", (2, 4, 2)), (1, 2, 4), 2],
]
"""An image, a text, two images, a video and an image."""


@dataclass(frozen=True)
class Shown:
    """A prompt with its pictures; None: text."""

    tokens: Tensor
    pictures: PictureArrays | None

    def request(self, group: int, index: int = 0, kept: GeneratedTokens = NO_TOKENS, **changes: Any) -> SequenceRequest:
        prompt = self.tokens.numpy().astype(np.int32)
        changes = {"max_tokens": LIMIT, "kept": kept, "pictures": self.pictures} | changes
        return SequenceRequest((group, index), prompt, **changes)


def shown_scenes() -> list[Shown]:
    scenes = [show(scene, seed) for seed, scene in enumerate(SCENES)]
    return [
        Shown(tokens, pictures if len(scene) > 1 else None)
        for scene, (tokens, pictures) in zip(SCENES, scenes, strict=True)
    ]


def scored_by_the_library(model: Any, shown: Shown, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response in one forward pass of the library's own model.

    A placeholder in the response is text: the library gets its embedding, and positions from the kinds of the tokens.
    """
    ids = torch.cat((shown.tokens, torch.from_numpy(response.astype(np.int64))))
    without = ids.clone()
    without[len(shown.tokens) :][without[len(shown.tokens) :] >= START] = 0
    arguments = {"input_ids": ids[None], "use_cache": False}
    if shown.pictures is not None:
        arguments = as_the_library_wants(without, shown.pictures)
    with torch.no_grad(), response_embedded(model, ids):
        logits = model(**arguments).logits[0, len(shown.tokens) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[len(shown.tokens) :, None]).squeeze(1).numpy()


@contextmanager
def response_embedded(model: Any, ids: Tensor) -> Iterator[None]:
    """The embedding of every token is that of `ids`, whatever ids the library is called with."""
    table = model.model.language_model.embed_tokens
    hook = table.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.embedding(ids[None], module.weight)
    )
    try:
        yield
    finally:
        hook.remove()
