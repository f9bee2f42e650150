"""The config.json with which vLLM builds the trainer's model."""

import copy
import json
from pathlib import Path

import pytest

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import configuration
from qwen35_trainer.rollout.vllm_core import write_configuration


@pytest.mark.parametrize("vision", [True, False], ids=["vision", "text"])
@pytest.mark.parametrize("of_the_text", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_ties_the_output_layer_if_the_trainer_does(
    tmp_path: Path, *, tied: bool, of_the_text: bool, vision: bool
) -> None:
    """Published files have the field twice. The trainer reads the outer one, and vLLM that of the text model."""
    shape = {"vision": {}} if vision else {}
    spec = ModelSpec.model_validate({"name": "tiny", "source": {"random": shape}})
    config = configuration(spec, vocabulary=20, max_length=64, base=Path())
    config.get_text_config().tie_word_embeddings = of_the_text
    config.tie_word_embeddings = tied
    before = copy.deepcopy(config)
    write_configuration(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] is tied
    assert written.get("text_config", written)["tie_word_embeddings"] is tied
    assert config == before
