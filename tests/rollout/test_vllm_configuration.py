"""The config.json with which vLLM builds the trainer's model."""

import copy
import json
from pathlib import Path

import pytest
import torch

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import configuration
from qwen35_trainer.models.qwen3_5.classes import HFConfig, read_config, without_weights
from qwen35_trainer.models.qwen3_5.model_types import CLASSES
from qwen35_trainer.rollout.vllm_core import write_configuration
from qwen35_trainer.rollout.vllm_versions import check_processor, weight_name
from tests.models import qwen3_moe


def configuration_of(shape: dict[str, object]) -> HFConfig:
    spec = ModelSpec.model_validate({"name": "tiny", "source": {"random": shape}})
    return configuration(spec, vocabulary=20, max_length=64, base=Path())


@pytest.mark.parametrize("vision", [True, False], ids=["vision", "text"])
@pytest.mark.parametrize("of_the_text", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_ties_the_output_layer_if_the_trainer_does(
    tmp_path: Path, *, tied: bool, of_the_text: bool, vision: bool
) -> None:
    """Published files have the field twice. The trainer reads the outer one, and vLLM that of the text model."""
    config = configuration_of({"vision": {}} if vision else {})
    config.get_text_config().tie_word_embeddings = of_the_text
    config.tie_word_embeddings = tied
    before = copy.deepcopy(config)
    write_configuration(config, tmp_path, text_models=True)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] is tied
    assert written.get("text_config", written)["tie_word_embeddings"] is tied
    assert config == before


@pytest.mark.parametrize(
    ("shape", "kind"),
    [({"tieEmbeddings": True}, "qwen3_5"), ({"experts": 4, "expertsPerToken": 2}, "qwen3_5_moe")],
    ids=["dense", "experts"],
)
def test_a_vllm_without_text_models_gets_the_same_text_model_inside_a_vision_language_model(
    tmp_path: Path, shape: dict[str, object], kind: str
) -> None:
    config = configuration_of(shape)
    write_configuration(config, tmp_path, text_models=False)
    written = read_config(tmp_path)
    assert (written.model_type, written.architectures) == (kind, [CLASSES[kind]])
    assert written.tie_word_embeddings == written.text_config.tie_word_embeddings == config.tie_word_embeddings
    expected, text = config.to_dict(), written.text_config.to_dict()
    file_only = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    assert {name: text[name] for name in expected.keys() - file_only} == {
        name: expected[name] for name in expected.keys() - file_only
    }


@pytest.mark.parametrize("shape", [{}, {"experts": 4, "expertsPerToken": 2}], ids=["dense", "experts"])
def test_the_tensors_of_a_text_model_get_their_names_in_that_vision_language_model(
    tmp_path: Path, shape: dict[str, object]
) -> None:
    config = configuration_of(shape)
    kind = config.model_type
    write_configuration(config, tmp_path, text_models=False)
    around = {name for name, _ in without_weights(read_config(tmp_path)).named_parameters()}
    names = {weight_name(name, kind) for name, _ in without_weights(config).named_parameters()}
    assert names == {name for name in around if not name.startswith("model.visual.")}
    assert {weight_name(name, kind) for name in around} == around


def test_a_vision_language_model_is_written_as_it_is(tmp_path: Path) -> None:
    config = configuration_of({"vision": {}})
    for text_models in (True, False):
        write_configuration(config, tmp_path / str(text_models), text_models=text_models)
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("True", "False"))
    assert first == second


def test_the_positions_of_pictures_are_written_for_a_replica_that_reads_some(tmp_path: Path) -> None:
    """The library has defaults for them, and vLLM has others."""
    config = configuration_of({"headDim": 32, "vision": {}})
    before = copy.deepcopy(config)
    for pictures in (True, False):
        write_configuration(config, tmp_path / str(pictures), text_models=True, pictures=pictures)
    rope, unchanged = (read_config(tmp_path / name).text_config.rope_parameters for name in ("True", "False"))
    assert rope == unchanged | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert config == before


def test_the_oldest_vllm_refuses_gated_delta_nets_on_cpus_with_amx_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error speaks of an option that nobody has set."""
    utilities = pytest.importorskip("vllm.utils.cpu_triton_utils", reason="vLLM is not installed")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.delattr(utilities, "_batch_memcpy_impl", raising=False)
    check_processor(qwen3_moe.model().config)
    with pytest.raises(RuntimeError, match="on a CPU with AMX; install vLLM"):
        check_processor(configuration_of({}))
