"""A checkpoint folder on several ranks: each reads its own rows, and together they have the model."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen35_trainer.manifest import parse_spec
from tests.distributed.rank import remembering
from tests.distributed.samples import batch_of, spec_of

SHAPES = {
    "dense": {},
    "tied embeddings": {"tieEmbeddings": True},
    "experts": {"experts": 3},
}


def saved_model(folder: Path, shape: dict[str, object]):
    spec, problems = parse_spec(spec_of(1, random=shape))
    assert spec is not None, problems
    model = remembering(spec, 3)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def folder_spec(ranks: int, **train):
    spec = spec_of(ranks, **train)
    spec["model"]["source"] = {"path": "model"}
    return spec


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_read_their_shares_of_a_folder(groups, tmp_path: Path, shape, offload) -> None:
    ranks_read_their_shares(groups, tmp_path, shape, offload={"parameters": offload})


def test_ranks_of_an_expert_mesh_read_their_experts_of_a_folder(groups, tmp_path: Path) -> None:
    ranks_read_their_shares(groups, tmp_path, {"experts": 4}, parallelism={"expert": 2})


def ranks_read_their_shares(groups, tmp_path: Path, shape, **train) -> None:
    model = saved_model(tmp_path / "model", shape)
    spec = folder_spec(2, **train)
    results = groups(2).run("train", spec=spec, batches=[], rates=[], folder=tmp_path)
    read = results[0]["weights"]
    expected = model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    size = sum(parameter.numel() for parameter in model.parameters())
    held = [result["held"] for result in results]
    assert sum(held) == size
    assert max(held) < 0.65 * size  # two of three experts, at most


def test_a_model_from_a_folder_trains_as_the_same_model_built_whole(groups, tmp_path: Path) -> None:
    """Buffers stand in no file: positions would be wrong without them."""
    saved_model(tmp_path / "model", {})
    batches = [batch_of(8, 0, supervised=True)]
    read = groups(2).run("train", spec=folder_spec(2), batches=batches, rates=[1e-3], folder=tmp_path)[0]
    built = groups(2).run("train", spec=spec_of(2), batches=batches, rates=[1e-3], seed=3)[0]
    assert read["metrics"] == built["metrics"]


def test_a_tensor_with_a_nan_is_named(groups, tmp_path: Path) -> None:
    saved_model(tmp_path / "model", {})
    file = next(iter(sorted((tmp_path / "model").glob("*.safetensors"))))
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=f"{name}: 1 of"):
        groups(1).run("train", spec=folder_spec(1), batches=[], rates=[], folder=tmp_path)


def test_a_missing_file_is_named(groups, tmp_path: Path) -> None:
    saved_model(tmp_path / "model", {})
    first = next(iter(sorted((tmp_path / "model").glob("*.safetensors"))))
    shutil.move(first, tmp_path / "elsewhere")
    with pytest.raises(AssertionError, match=f"{first.name}: missing"):
        groups(1).run("train", spec=folder_spec(1), batches=[], rates=[], folder=tmp_path)
