"""A run that trains a mixture of experts of Qwen3 from a folder of published form, and leaves such a folder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qwen35_trainer.data.tokenizer import character_tokenizer
from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
from qwen35_trainer.progress.records import ExportRecord, UpdateRecord
from tests.models import qwen3_moe
from tests.models.published import tensors_of


@pytest.mark.usefixtures("forked_export")
@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"train.router": {"loadBalancingLoss": 0.01, "zLoss": 0.001}}, id="all weights"),
        pytest.param({"train.lora": {"rank": 2}}, id="adapters", marks=pytest.mark.soak),
    ],
)
def test_a_run_trains_it_and_the_library_loads_what_it_exports(local, write, tmp_path: Path, train) -> None:
    source = tmp_path / "model"
    qwen3_moe.write(source)
    tokenizer = character_tokenizer("0123456789>=")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(source)
    changes = {
        "model": {"name": "qwen", "precision": "BF16", "source": {"path": "model"}},
        "train.updates": 2,
        "train.optimizer": {"learningRate": 1e-2},
        "checkpoint": {"everyUpdates": 1, "keep": 2, "export": "AtEnd"},
    } | train
    reward = "def score(prompt, response, answer, metadata): return len(set(response))"
    ended = local.run(write(tmp_path, changes, reward=reward))
    assert ended.code == 0, ended.err
    assert [record.update for record in ended.of(UpdateRecord)] == [1, 2]
    [exported] = ended.of(ExportRecord)
    before, after = tensors_of(source), tensors_of(Path(exported.path))
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = {
        name for name in before if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    }
    assert changed <= (adapted if "train.lora" in train else before.keys())
    assert len(changed) > 10
    library = AutoModelForCausalLM.from_pretrained(exported.path, dtype=torch.float32)
    saved = SavedWeights(ended.folder / "checkpoints" / "update-000002")
    if "train.lora" not in train:
        for name, parameter in library.named_parameters():
            assert torch.equal(parameter, saved.read(name).bfloat16().float()), name
