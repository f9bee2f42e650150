"""Rows with shared prompts on a GPU, by the check that engines make at start. On a GPU, bfloat16 runs the kernels, float32 does not."""

import pytest
import torch

from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.packing import check_packing
from tests.distributed.rank import remembering
from tests.distributed.samples import spec_of
from tests.gpu.test_engine import SHAPE


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "MoE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_responses_that_share_a_prompt_are_scored_like_those_with_copies(
    device: torch.device, dtype: torch.dtype, experts: int
) -> None:
    spec, problems = parse_spec(spec_of(1, random=SHAPE | {"experts": experts}))
    assert spec is not None, problems
    check_packing(adapt(remembering(spec, 0).to(device, dtype)), share_prompts=True)
