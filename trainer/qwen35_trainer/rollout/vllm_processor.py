"""Replaces vLLM's processor of pictures, in each process of a replica that reads pictures.

Requests have patches and expanded placeholders (`vllm_pictures.py`), so nothing is left to process. vLLM's own processor would read
a tokenizer and further files from the checkpoint's folder, which a replica does not have. vLLM still gets two things from its
processor. The first is the number of tokens of the largest picture, from which vLLM computes the size of its cache of features.
The second is a picture of that size, with which vLLM measures how much device memory the vision tower needs.

This module imports vLLM. vLLM in turn imports this module before it builds a worker, because vLLM's argument
`worker_extension_cls` contains the name of `PictureWorker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.model_executor.models import qwen3_5, qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.rollout.vllm_pictures import PlacedPictures, prompt_input

MODELS = (qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5MoeForConditionalGeneration)


class PictureSizes(qwen3_vl.Qwen3VLProcessingInfo):  # type: ignore[misc]  # vLLM's, untyped
    """Gives vLLM the size of the largest picture, which decides the size of vLLM's cache of picture features."""

    def get_hf_config(self) -> HFConfig:
        """Return the configuration of the model, dense or with experts."""
        return self.ctx.get_hf_config()

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
        """Return the number of tokens of the largest picture. The arguments are those of vLLM's method, and have no effect."""
        rows, columns = self.largest_grid
        return {"image": rows * columns // self.get_hf_config().vision_config.spatial_merge_size ** 2}

    @property
    def largest_grid(self) -> tuple[int, int]:
        """Rows and columns of the largest picture in patches, from the argument `limit_mm_per_prompt`."""
        limit, patch = self.ctx.get_mm_config().limit_per_prompt["image"], self.get_hf_config().vision_config.patch_size
        return limit.height // patch, limit.width // patch


class LargestPicture(qwen3_vl.Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    """Makes a blank picture of the maximum size, with which vLLM measures how much memory pictures need."""

    requires_tokenizer = False  # where vLLM checks this

    def apply(self, *_: object, **__: object) -> Any:  # noqa: ANN401  # vLLM's MultiModalInput
        config = self.info.get_hf_config()
        vision = config.vision_config
        rows, columns = self.info.largest_grid
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        tokens = rows * columns // vision.spatial_merge_size**2
        patches, grids = np.zeros((rows * columns, values), np.float32), np.array([[1, rows, columns]])
        largest = PlacedPictures(patches, grids, (0,), (tokens,), "largest")
        return prompt_input([config.image_token_id] * tokens, [largest], salt="")

    def get_dummy_mm_inputs(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        """Return the largest picture, as `apply` does. Some versions of vLLM call this method instead of `apply`."""
        return self.apply()


class NoPixels(qwen3_vl.Qwen3VLDummyInputsBuilder):  # type: ignore[misc]
    """A builder of test inputs that builds nothing, because `LargestPicture` makes the test picture itself.

    vLLM requires a builder of test inputs for each processor of pictures.
    """

    def get_dummy_processor_inputs(self, *_: object, **__: object) -> None:
        return None


class PictureWorker:
    """An empty class that makes each worker process of vLLM import this module, and so call `register`.

    The arguments of vLLM contain the name of this class as a base class for its workers. vLLM imports the module to
    find the class.
    """


def register() -> None:
    """Replace vLLM's processor of pictures by the classes of this module, in this process. May be called again."""
    for model in MODELS:
        if "_processor_factory" in model.__dict__:
            del model._processor_factory  # vLLM warns if it replaces one
        MULTIMODAL_REGISTRY.register_processor(LargestPicture, info=PictureSizes, dummy_inputs=NoPixels)(model)


register()  # in the processes of vLLM's workers, which import this module
