"""What leaves a run: a Hugging Face folder with the trained values, and all else as the source has it."""

import asyncio
import copy
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.exits import FAILED, REFUSED
from qwen35_trainer.models.qwen3_5 import classes, hub_folder, model_types
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore
from qwen35_trainer.runtime.export_command import ExportRefused, export
from tests.distributed.samples import batch_of, scenes_of, spec_of
from tests.models import published
from tests.models.published import tensors_of

API = {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": {"name": "tiny"}}
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def run_of(
    groups, room: Path, batches: list[Any], *, source: Path | None, ranks: int = 2, precision: str = "BF16", **train
):
    """A run's folder with a checkpoint after the batches, and the answers of its ranks."""
    spec = spec_of(ranks, **train)
    spec["model"]["precision"] = precision
    if source is not None:
        spec["model"]["source"] = {"path": str(source)}
    run = room / "run"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(yaml.safe_dump(API | {"spec": spec}))
    answers = []

    async def write(folder: Path) -> None:
        answers.extend(
            groups(ranks).run(
                "train",
                spec=spec,
                batches=batches,
                rates=[1e-2] * len(batches),
                folder=None if source is None else Path(),
                save=folder,
            )
        )

    progress = CheckpointMeta(update=len(batches), batch=0, position=0, pending=(), elapsed=0.0)
    asyncio.run(CheckpointStore(run / "checkpoints", 3).save(progress, write))
    return run, answers[0]


@pytest.mark.parametrize(
    ("shape", "per_expert"),
    [("0.8B, tied", False), ("35B-A3B", True), ("35B-A3B, vision dtype named", False), ("text only", False)],
)
def test_what_was_not_trained_leaves_as_it_came(groups, tmp_path: Path, shape: str, per_expert: bool) -> None:
    source = tmp_path / "source"
    published.write(source, shape, per_expert=per_expert)
    run, _ = run_of(groups, tmp_path, [], source=source)
    done = export(run, tmp_path / "out")
    assert (done.update, done.folder) == (0, tmp_path / "out")
    assert {path.name for path in done.folder.iterdir()} == {path.name for path in source.iterdir()} | {"SHA256SUMS"}
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (done.folder / path.name).read_bytes() == path.read_bytes()
    before, after = tensors_of(source), tensors_of(done.folder)
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(after[name], tensor), name
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=done.folder, check=True)


@pytest.mark.parametrize(
    ("shape", "train"),
    [("0.8B, tied", {"freeze": ["Vision"]}), ("35B-A3B", {}), ("27B, untied", LORA)],
    ids=["tied, frozen vision", "experts", "LoRA"],
)
def test_the_library_loads_the_trained_weights(
    groups, tmp_path: Path, monkeypatch, shape: str, train: dict[str, Any]
) -> None:
    monkeypatch.setattr(hub_folder, "_VALUES_PER_BLOCK", 160)  # some rows of a tensor, whose number they do not divide
    source = tmp_path / "source"
    original = published.write(source, shape, per_expert=True)
    run, answers = run_of(groups, tmp_path, [scenes_of(0), scenes_of(1)], source=source, **train)
    folder = export(run, tmp_path / "out").folder
    loaded = type(original).from_pretrained(folder, dtype=torch.float32)
    stored = tensors_of(folder)
    assert stored.keys() == tensors_of(source).keys()
    assert {stored[name].dtype for name in stored if name.endswith(published.FLOAT32)} == {torch.float32}
    changed = 0
    for name, parameter in loaded.named_parameters():
        trained = answers["weights"][name]
        if not name.endswith(published.FLOAT32):
            trained = trained.bfloat16().float()
        assert torch.equal(parameter, trained.float()), name
        changed += not torch.equal(parameter, dict(original.named_parameters())[name])
    assert changed > 5
    mtp = [name for name in stored if name.startswith("mtp.")]
    assert len(mtp) == 2
    assert all(torch.equal(stored[name], tensors_of(source)[name]) for name in mtp)


def test_adapters_leave_under_the_names_that_peft_has(groups, tmp_path: Path) -> None:
    source = tmp_path / "source"
    published.write(source, "text only")
    run, answers = run_of(groups, tmp_path, [batch_of(8, 0, supervised=True)], source=source, **LORA)
    folder = export(run, tmp_path / "out", adapter=True).folder
    tensors = tensors_of(folder)
    assert tensors.keys() == {f"base_model.model.{name}.weight" for name in answers["trained adapters"]}
    for name, tensor in answers["trained adapters"].items():
        assert torch.equal(tensors[f"base_model.model.{name}.weight"], tensor), name
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["base_model_name_or_path"] == str(source)
    assert len(config["target_modules"]) * 2 == len(tensors)


def test_a_model_of_random_weights_leaves_with_its_tokenizer(groups, tmp_path: Path) -> None:
    run, answers = run_of(groups, tmp_path, [batch_of(8, 0, supervised=True)], source=None, precision="FP32")
    manifest = yaml.safe_load((run / "run.yaml").read_text())
    # 23 tokens, as the ranks of these tests have.
    manifest["spec"]["model"]["source"]["random"]["characters"] = "abcdefghijklmnopqrst"
    (run / "run.yaml").write_text(yaml.safe_dump(manifest))
    result = CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'out'}: update 1 of {run / 'checkpoints' / 'update-000001'}, ")
    from transformers import AutoTokenizer

    loaded = getattr(__import__("transformers"), model_types.CLASSES["qwen3_5_text"]).from_pretrained(tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, answers["weights"][name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([3, 4, 5]) == "abc"


@pytest.mark.soak
@pytest.mark.parametrize("shape", [{}, {"experts": 4, "expertsPerToken": 2}, {"tieEmbeddings": True}], ids=str)
def test_vllm_loads_the_folder_and_decodes_what_the_library_does(groups, tmp_path: Path, shape: dict[str, Any]) -> None:
    random = {"linearHeadDim": 64, "headDim": 32, "hiddenSize": 64} | shape
    run, _ = run_of(
        groups, tmp_path, [batch_of(8, seed, supervised=True) for seed in range(3)], source=None, random=random
    )
    manifest = yaml.safe_load((run / "run.yaml").read_text())
    manifest["spec"]["model"]["source"]["random"]["characters"] = "abcdefghijklmnopqrst"
    manifest["spec"]["data"]["maxPromptTokens"] = 100
    (run / "run.yaml").write_text(yaml.safe_dump(manifest))
    folder, chance = export(run, tmp_path / "out").folder, torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 23, (length,), generator=chance).tolist() for length in (1, 5, 17, 70)]
    completed = subprocess.run(
        [sys.executable, "-m", "tests.models.vllm_greedy", str(folder), "24"],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    config = classes.read_config(folder)
    model = getattr(transformers, model_types.CLASSES[config.model_type]).from_pretrained(folder, dtype=torch.float32)
    in_bfloat16, decided = copy.deepcopy(model).bfloat16(), 0
    for prompt, (tokens, log_probs) in zip(prompts, json.loads(completed.stdout.splitlines()[-1]), strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits, rounded = (
                each(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                for each in (model, in_bfloat16)
            )
        best, second = logits.topk(2).values.T
        # Two logits are apart where bfloat16 costs the library itself a quarter of their distance at most.
        apart = best - second > 4 * (rounded - logits).abs().amax(-1)
        decided += int(apart.sum())
        assert torch.equal(logits.argmax(-1)[apart], torch.tensor(tokens)[apart])
        chosen = torch.tensor(tokens)[:, None]
        exact, theirs = (each.log_softmax(-1).gather(1, chosen).squeeze(1) for each in (logits, rounded))
        apart_by, noise = (torch.tensor(log_probs) - exact).abs(), (theirs - exact).abs()
        print(
            f"{shape}: {apart_by.mean():.3f} nats from float32 in the mean, the library in bfloat16 {noise.mean():.3f}"
        )
        # Where bfloat16 rounds a router's logits, other experts may be chosen, in the library as in vLLM.
        assert apart_by.mean() <= max(0.1, noise.mean())
    assert decided > 0.25 * 24 * len(prompts)


@pytest.fixture
def run(groups, tmp_path: Path) -> Path:
    published.write(tmp_path / "source", "text only")
    return run_of(groups, tmp_path, [], source=tmp_path / "source", ranks=1)[0]


def test_what_cannot_be_exported_is_refused_with_the_fix(run: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        result = CliRunner().invoke(app, ["export", *map(str, words)])
        assert result.exit_code == REFUSED, result.output
        return result.stderr

    out, checkpoint = tmp_path / "out", run / "checkpoints" / "update-000000"
    assert "--adapter: " in refused(run, "--output", out, "--adapter")
    assert f"--output {run} exists and is not an empty folder" in refused(run, "--output", run)
    owner = checkpoint.parent / "owner.json"
    owner.write_text("{")
    assert f"{owner} does not say whose folder this is" in refused(run, "--output", out)
    owner.unlink()
    assert f"{tmp_path / 'nowhere'} does not exist" in refused(tmp_path / "nowhere", "--output", out)
    for wrong in (run / "checkpoints", tmp_path / "source"):
        assert f"{wrong} is neither a run's folder" in refused(wrong, "--output", out)
    assert f"the run's source {tmp_path / 'gone'} is not a folder here; name it with --source" in refused(
        run, "--output", out, "--source", tmp_path / "gone"
    )
    (tmp_path / "source" / "config.json").rename(tmp_path / "config.json")
    assert "no config.json" in refused(run, "--output", out)
    (tmp_path / "elsewhere").mkdir()
    checkpoint.rename(tmp_path / "elsewhere" / "update-000000")
    assert f"{run}: no checkpoint in {run / 'checkpoints'}" in refused(run, "--output", out)
    assert "is missing, which names its model" in refused(tmp_path / "elsewhere" / "update-000000", "--output", out)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_command_prints_where_to_copy_the_chat_template_of_the_manifest(run: Path, tmp_path: Path) -> None:
    manifest = yaml.safe_load((run / "run.yaml").read_text())
    manifest["spec"]["data"]["chatTemplate"] = {"file": "mine.jinja"}
    (run / "run.yaml").write_text(yaml.safe_dump(manifest))
    result = CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == (
        "The run's chat template is not part of this folder: copy data.chatTemplate.file mine.jinja to "
        f"{tmp_path / 'out' / 'chat_template.jinja'}"
    )


def test_a_checkpoint_of_an_abandoned_attempt_is_not_the_newest(run: Path, tmp_path: Path) -> None:
    """The run was resumed from update 0 and has not saved since: `--resume auto` continues from there, too."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "update-000000", checkpoints / "update-000005")
    assert export(run, tmp_path / "before").checkpoint == checkpoints / "update-000005"
    owner = {"run": "default/tiny", "attempt": "second", "host": "", "output": str(run), "start": "update-000000"}
    (checkpoints / "owner.json").write_text(json.dumps(owner))
    assert export(run, tmp_path / "after").checkpoint == checkpoints / "update-000000"


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path, file: str) -> None:
    damaged = run / "checkpoints" / "update-000000" / "state" / file
    content = bytearray(damaged.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)  # of the same size, as a disk may return it
    damaged.write_bytes(content)
    result = CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path / "out")])
    assert result.exit_code == REFUSED
    assert result.stderr.startswith(f"checkpoint {damaged.parent.parent} cannot be read (")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_an_empty_folder_and_a_moved_source_are_fine(run: Path, tmp_path: Path) -> None:
    (tmp_path / "source").rename(tmp_path / "moved")
    (tmp_path / "out").mkdir()
    checkpoint = run / "checkpoints" / "update-000000"
    assert export(checkpoint, tmp_path / "out", source=tmp_path / "moved").checkpoint == checkpoint
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "moved").keys()


def test_a_full_disk_is_reported_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in (tmp_path / "source").iterdir() if path.suffix != ".safetensors")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        result = CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == FAILED
    assert f"{tmp_path / 'out'} was not written: " in result.stderr
    assert "File too large" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_checkpoint_of_another_model_is_refused(groups, run: Path, tmp_path: Path) -> None:
    published.write(tmp_path / "other", "0.8B, tied")
    with pytest.raises(
        ExportRefused,
        match=r"is not of the model in .*other: it holds model\.embed_tokens\.weight, the source does not",
    ):
        export(run, tmp_path / "out", source=tmp_path / "other")
    manifest = yaml.safe_load((run / "run.yaml").read_text())
    manifest["spec"]["train"] |= LORA
    (run / "run.yaml").write_text(yaml.safe_dump(manifest))
    with pytest.raises(ExportRefused, match="which is not an adapter"):
        export(run, tmp_path / "out")
    with pytest.raises(ExportRefused, match="holds no adapters"):
        export(run, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_adapters_of_another_rank_are_refused(groups, tmp_path: Path) -> None:
    published.write(tmp_path / "source", "text only")
    run, _ = run_of(groups, tmp_path, [], source=tmp_path / "source", ranks=1, **LORA)
    manifest = yaml.safe_load((run / "run.yaml").read_text())
    manifest["spec"]["train"]["lora"]["rank"] = 8
    (run / "run.yaml").write_text(yaml.safe_dump(manifest))
    with pytest.raises(ExportRefused, match=r"the adapter of model\.layers\.0\..* is \(4, 32\) and "):
        export(run, tmp_path / "out")


def test_others_may_read_the_folder_and_two_exports_do_not_meet(run: Path, tmp_path: Path) -> None:
    for other in (".out.partial", ".out.other.partial"):
        (tmp_path / other).mkdir()
    folder = export(run, tmp_path / "out").folder
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in tmp_path.glob(".out*")) == [".out.other.partial", ".out.partial"]
