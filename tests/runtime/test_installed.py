"""Extra arguments of vLLM are compared with those of the installed version, without importing it."""

import sys
from importlib.util import find_spec

import pytest

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.manifest.vllm import RESERVED_ARGUMENTS
from qwen35_trainer.runtime.machine import engine_arguments, unknown_arguments

KNOWN = frozenset({"block_size", "enable_chunked_prefill", "max_num_seqs", "long_prefill_token_threshold"})


def spec_with(**arguments: object) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "model": {"name": "tiny", "source": {"random": {}}},
            "data": {"train": [{"name": "one", "files": {"paths": ["one.jsonl"]}}]},
            "rewards": [{"name": "right", "type": "ExactMatch"}],
            "rollout": {"engine": "VLLM", "vllm": {"extraArguments": arguments}},
            "train": {"updates": 1},
        }
    )


def test_an_argument_of_the_installed_version_is_accepted() -> None:
    assert list(unknown_arguments(spec_with(block_size=256), "0.32.0", KNOWN)) == []


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    [problem] = unknown_arguments(spec_with(enable_chunk_prefill=True), "0.32.0", KNOWN)
    assert problem.path == "spec.rollout.vllm.extraArguments.enable_chunk_prefill"
    assert problem.message == "vLLM 0.32.0 has no such argument."
    assert problem.fix == "Did you mean enable_chunked_prefill?"


def test_names_that_a_manifest_cannot_set_are_not_suggested() -> None:
    [problem] = unknown_arguments(spec_with(max_num_seq=8), "0.32.0", KNOWN)
    assert "max_num_seqs" not in problem.fix


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_refused_argument_exists_in_the_installed_version() -> None:
    """A renamed argument would otherwise be accepted under its new name."""
    was_imported = "vllm" in sys.modules
    assert RESERVED_ARGUMENTS.keys() <= engine_arguments()
    assert ("vllm" in sys.modules) == was_imported
