"""Training of the head for multi-token prediction, in every layout, against float32 torch with the published names.

The reference takes one sequence after another: no padding, no packing, no shifted tables. Its layer is the library's decoder layer;
projection, norms and the two shifts are written here, after vLLM's `qwen3_5_mtp.py` and DeepSeek-V3 (arXiv:2412.19437, eq. 21-25).
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.manifest.train import MultiTokenPredictionSpec
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
from qwen35_trainer.models.qwen3_5.hub_folder import write_hub_folder
from qwen35_trainer.runtime import export_command, preflight
from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, batch_of_lengths
from tests.engines.megatron.test_folders import folder_of
from tests.engines.megatron.test_parity import GRADIENTS, SCORES, TOTAL, joined
from tests.models import published
from tests.models.published import tensors_of
from tests.models.rounding import allowed, in_float64

pytestmark = pytest.mark.processes

WEIGHT = 0.5
"""Weight of the head's loss, large enough to move the gradients."""
TENSOR, MICRO = {"tensor": 2, "sequence": True}, {"batch": {"microBatchSequences": 4}}
RECOMPUTED = {"activationCheckpointing": True}
DENSE, TIED, EXPERTS = "27B, untied", "0.8B, tied", "35B-A3B"
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], bool]] = {
    "1 process, dense": (1, DENSE, {}, {}, False),
    "1 process, dense, detached, recomputed": (1, DENSE, {}, RECOMPUTED, True),
    "1 process, tied, micro-batch 4": (1, TIED, {}, MICRO, False),
    "1 process, MoE, recomputed": (1, EXPERTS, {}, RECOMPUTED | MICRO, False),
    "tensor 2, dense": (2, DENSE, {"tensor": 2}, MICRO, False),
    "tensor 2, tied, detached": (2, TIED, TENSOR, {}, True),
    "tensor 2, expert 2, MoE": (2, EXPERTS, TENSOR | {"expert": 2}, MICRO, False),
    "expert 2, data 2, MoE": (2, EXPERTS, {"expert": 2}, {}, False),
    "pipeline 2, dense": (2, DENSE, {"pipeline": 2}, MICRO, False),
    "pipeline 2, virtual 2, MoE, detached": (2, EXPERTS, {"pipeline": 2, "virtual": 2}, MICRO, True),
    "pipeline 2, data 2, dense": (4, DENSE, {}, {"parallelism": {"pipeline": 2}}, False),
    "tensor 2, pipeline 2, expert 2, MoE": (4, EXPERTS, TENSOR | {"pipeline": 2, "expert": 2}, MICRO, False),
}


@dataclass(frozen=True)
class Reference:
    """Of one batch: the whole loss, the head's loss, its log-probs of each sample's response, and the gradients."""

    loss: float
    head: float
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]


class Model(nn.Module):
    """A text model of the library, and the tensors of its head under their published names without `mtp.`"""

    def __init__(self, library: Any, head: dict[str, Tensor]) -> None:
        super().__init__()
        text = library.model
        self.text = getattr(text, "language_model", text)
        self.output = library.lm_head
        full = self.text.config.layer_types.index("full_attention")
        self.layer = copy.deepcopy(self.text.layers[full])
        prefix = "layers.0."
        layer = {name.removeprefix(prefix): each for name, each in head.items() if name.startswith(prefix)}
        self.layer.load_state_dict(layer, strict=True)
        rest = {name.removesuffix(".weight"): each for name, each in head.items() if not name.startswith(prefix)}
        assert rest.keys() == {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
        self.rest = nn.ParameterDict(rest)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        named = {f"model.{name}": each for name, each in self.text.named_parameters()}
        if self.output.weight is not self.text.embed_tokens.weight:
            named["lm_head.weight"] = self.output.weight
        named |= {f"mtp.layers.0.{name}": each for name, each in self.layer.named_parameters()}
        return named | {f"mtp.{name}.weight": each for name, each in self.rest.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.text.config.rms_norm_eps)
        return x * (1 + self.rest[name])

    def forward(self, tokens: Tensor, *, detached: bool) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens of one sequence, (n,): by the model, and by the head. The first has none, and by the head the second."""
        hidden = self.text(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state
        of_model = self.output(hidden)[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        if (count := len(tokens) - 2) < 1:
            return F.pad(of_model, (1, 0)), of_model.new_zeros(len(tokens))
        hidden, embedded = hidden[:, :count], self.text.embed_tokens(tokens[None, 1:-1])
        weight = self.output.weight
        if detached:
            hidden, embedded, weight = hidden.detach(), embedded.detach(), weight.detach()
        both = torch.cat((self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")), -1)
        positions = torch.arange(count).expand(3, 1, -1)
        before = torch.zeros(count, count, dtype=hidden.dtype).masked_fill(
            torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf")
        )
        mixed = both @ self.rest["fc"].T
        result = self.layer(
            mixed, position_embeddings=self.text.rotary_emb(mixed, positions), attention_mask=before[None, None]
        )
        logits = (self.norm(result, "norm") @ weight.T)[0]
        return F.pad(of_model, (1, 0)), F.pad(logits.log_softmax(-1).gather(1, tokens[2:, None])[:, 0], (2, 0))


def sequences(batch: TrainBatch) -> list[tuple[Tensor, Tensor]]:
    """Of each sample: its tokens, and which of them train."""
    prompt = response = 0
    pairs = []
    for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        ids = np.concatenate([batch.prompts[prompt : prompt + p], batch.responses[response : response + r]])
        trains = np.concatenate([np.zeros(p, dtype=np.bool_), batch.trainable[response : response + r]])
        pairs.append((torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(trains)))
        prompt, response = prompt + p, response + r
    return pairs


@cache
def reference(
    shape: str,
    *,
    detached: bool = False,
    weight: float = WEIGHT,
    float64: bool = False,
    prepare: Callable[[Model], None] | None = None,
) -> Reference:
    """prepare: changes how the model computes."""
    with TemporaryDirectory() as folder:
        library = published.write(Path(folder) / "model", shape, whole_head=True)
        stored = tensors_of(Path(folder) / "model")
    head = {name.removeprefix("mtp."): each.float() for name, each in stored.items() if name.startswith("mtp.")}
    model = Model(in_float64(library) if float64 else library, head)
    if float64:
        model = model.double()
    if prepare is not None:
        prepare(model)
    batch = samples()
    tokens, of_model, of_head, log_probs = int(batch.trainable.sum()), [], [], []
    for (ids, trains), prompt in zip(sequences(batch), batch.prompt_lengths, strict=True):
        by_model, by_head = model(ids, detached=detached)
        of_model.append(by_model[trains].sum())
        of_head.append(by_head[trains].sum())
        log_probs.append(by_head.detach().where(trains, 0.0)[prompt:])
    objective, ahead = -torch.stack(of_model).sum() / tokens, -torch.stack(of_head).sum() / tokens
    (objective + weight * ahead).backward()
    gradients = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named.items()}
    return Reference((objective + weight * ahead).item(), ahead.item(), log_probs, gradients)


def samples() -> TrainBatch:
    """Of different lengths. The head does not predict the token after a prompt of one token, which trains here."""
    batch = batch_of_lengths([(1, 7), (3, 5), (1, 1), (5, 11), (2, 4), (4, 1), (6, 12), (1, 3)])
    assert batch.trainable[0]
    return batch


def spec_in(
    place: Path,
    shape: str,
    ranks: int,
    *,
    detached: bool = False,
    per_expert: bool = False,
    text: bool = True,
    **train: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The spec of a training with the head, and the tensors of the folder under the names of the module, with its head."""
    spec, tensors = folder_of(place, shape, text=text, per_expert=per_expert, whole_head=True)
    spec["accelerator"]["devicesPerNode"] = ranks
    spec["train"] |= {"engine": "Megatron", "multiTokenPrediction": {"lossWeight": WEIGHT, "detached": detached}}
    spec["train"]["batch"] |= train.pop("batch", {})
    spec["train"] |= train
    files = CheckpointFiles.open(place / "model")
    return spec, tensors | {name: files.read(name).float() for name in files.head}


def test_the_heads_loss_matters() -> None:
    """Otherwise the other tests would pass without it: it moves gradients outside the head, unless it is detached."""
    without, attached, detached = (
        reference(EXPERTS, **options) for options in ({"weight": 1e-9}, {}, {"detached": True})
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        plain = without.gradients[name]
        assert float((attached.gradients[name] - plain).norm()) > 0.1 * float(plain.norm())
        torch.testing.assert_close(detached.gradients[name], plain)
    assert all(float(each.norm()) > 1e-4 for name, each in detached.gradients.items() if name.startswith("mtp.")), (
        "every tensor of the head trains"
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_the_reference(
    groups: Callable[[int], Group], tmp_path: Path, name: str
) -> None:
    ranks, shape, layout, train, detached = LAYOUTS[name]
    spec, tensors = spec_in(tmp_path, shape, ranks, detached=detached, **train)
    results = groups(ranks).run("train", spec=spec, batches=[samples()], layout=layout or None, folder=tmp_path)
    expected, exact = reference(shape, detached=detached), reference(shape, detached=detached, float64=True)
    assert results[0]["first"].keys() == tensors.keys() == expected.gradients.keys()
    assert all(torch.equal(results[0]["first"][key], each) for key, each in tensors.items()), "load, then export"
    assert all(each["metrics"] == results[0]["metrics"] for each in results), "any rank can report"
    [metrics] = results[0]["metrics"]
    gradients = joined([part for each in results for part in each["gradients"]], expected.gradients)
    norm = float(torch.stack([each.norm() for each in expected.gradients.values()]).norm())
    scale = allowed(expected.gradients, exact.gradients, GRADIENTS)
    worst = distance(gradients, expected.gradients, scale)
    print(f"\n| {name} | {abs(metrics.loss / expected.loss - 1):.0e} | {worst:.0e} |", end="")
    assert metrics.loss == pytest.approx(expected.loss, rel=TOTAL)
    assert metrics.means["mtp_nll"] == pytest.approx(expected.head, rel=TOTAL)
    assert metrics.gradient_norm == pytest.approx(norm, rel=TOTAL)
    assert worst <= GRADIENTS


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_log_probs_of_every_token_are_those_of_the_reference(
    groups: Callable[[int], Group], tmp_path: Path, shape: str
) -> None:
    spec, _ = spec_in(tmp_path, shape, 1, **MICRO)
    ours = groups(1).run("predictions", spec=spec, batch=samples(), folder=tmp_path)[0]
    expected = reference(shape).log_probs
    assert max(float((own - other).abs().max()) for own, other in zip(ours, expected, strict=True)) <= SCORES
    assert any(float(each[0]) == 0.0 for each in expected)


def test_a_neighbour_in_the_micro_batch_changes_no_prediction(groups: Callable[[int], Group], tmp_path: Path) -> None:
    """Neither a token of another sequence nor padding is an input or a label."""
    spec, _ = spec_in(tmp_path, DENSE, 1, **MICRO)
    batch = samples()
    changed = copy.deepcopy(batch)
    own = slice(int(batch.response_lengths[:3].sum()), int(batch.response_lengths[:4].sum()))
    changed.responses[own] = 3 + (changed.responses[own] - 2) % 17
    before, after = (
        groups(1).run("predictions", spec=spec, batch=each, folder=tmp_path)[0] for each in (batch, changed)
    )
    for sample, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.allclose(a, b, atol=1e-6) == (sample != 3)


@pytest.mark.parametrize(
    ("shape", "per_expert"),
    [
        (EXPERTS, True),
        pytest.param(DENSE, False, marks=pytest.mark.soak),
        pytest.param(EXPERTS, False, marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_continues_in_another_layout_and_is_exported(
    groups: Callable[[int], Group], tmp_path: Path, shape: str, per_expert: bool
) -> None:
    spec, _ = spec_in(tmp_path, shape, 2, per_expert=per_expert)
    first, second, saved = samples(), batch_of(8, 1, supervised=True), tmp_path / "saved"
    saved.mkdir()
    tensor = TENSOR | ({"expert": 2} if shape == EXPERTS else {})
    straight = groups(2).run("train", spec=spec, batches=[first, second], layout=tensor, folder=tmp_path)[0]
    before = groups(2).run("train", spec=spec, batches=[first], layout=tensor, folder=tmp_path, save=saved)[0]
    continued = groups(2).run(
        "train", spec=spec, batches=[second], layout={"pipeline": 2}, folder=tmp_path, restore=saved
    )[0]
    assert all(torch.equal(continued["first"][name], each) for name, each in before["published"].items())
    assert continued["metrics"][0].loss == pytest.approx(straight["metrics"][1].loss, rel=TOTAL)
    assert continued["metrics"][0].gradient_norm == pytest.approx(straight["metrics"][1].gradient_norm, rel=GRADIENTS)
    files, weights, output = CheckpointFiles.open(tmp_path / "model"), SavedWeights(saved), tmp_path / "exported"
    settings: Any = SimpleNamespace(lora=None, freeze=(), multiTokenPrediction=MultiTokenPredictionSpec())
    assert export_command._misfits(weights, files, settings) == []
    output.mkdir()
    write_hub_folder(files, export_command._values(weights, files, None), output)
    old, new = tensors_of(tmp_path / "model"), tensors_of(output)
    assert {name: (each.shape, each.dtype) for name, each in new.items()} == {
        name: (each.shape, each.dtype) for name, each in old.items()
    }
    head = CheckpointFiles.open(output).head
    assert head.keys() == {name for name in before["published"] if name.startswith("mtp.")}
    for name in head:
        trained = before["published"][name]
        assert torch.equal(CheckpointFiles.open(output).read(name), trained.bfloat16()), name
        assert not torch.equal(trained, before["first"][name]), name


def test_a_checkpoint_without_the_head_is_refused_by_its_tensors(
    groups: Callable[[int], Group], tmp_path: Path
) -> None:
    spec, _ = spec_in(tmp_path, DENSE, 1)
    saved, without = tmp_path / "saved", copy.deepcopy(spec)
    saved.mkdir()
    del without["train"]["multiTokenPrediction"]
    groups(1).run("train", spec=without, batches=[], folder=tmp_path, save=saved)
    with pytest.raises(AssertionError, match=r"lacks mtp\..*without the head of train\.multiTokenPrediction"):
        groups(1).run("train", spec=spec, batches=[], folder=tmp_path, restore=saved)


@pytest.mark.parametrize(
    ("fields", "whole", "message"),
    [
        ({}, False, r"the model's folder lacks mtp\..* and \d+ more"),
        ({"mtp_num_hidden_layers": 2}, True, "mtp_num_hidden_layers of the model's config.json is 2"),
        ({"mtp_num_hidden_layers": 0}, True, "mtp_num_hidden_layers of the model's config.json is 0"),
        ({"mtp_use_dedicated_embeddings": True}, True, "mtp_use_dedicated_embeddings"),
    ],
    ids=str,
)
def test_a_head_that_cannot_train_is_refused_by_name(
    groups: Callable[[int], Group], tmp_path: Path, fields: dict[str, Any], whole: bool, message: str
) -> None:
    spec, _ = folder_of(tmp_path, DENSE, text=True, whole_head=whole)
    spec["train"]["multiTokenPrediction"] = {}
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= fields
    file.write_text(json.dumps(config))
    with pytest.raises(AssertionError, match=f"spec.train.multiTokenPrediction: .*{message}"):
        groups(1).run("train", spec=spec, batches=[], folder=tmp_path)


def test_a_head_that_cannot_train_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    spec, _ = folder_of(tmp_path, DENSE, text=True)
    spec["train"]["multiTokenPrediction"] = {}
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    assert list(preflight._prediction_head(parsed, tmp_path)) == []
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 3, "mtp_use_dedicated_embeddings": True}
    file.write_text(json.dumps(config))
    depth, embeddings = preflight._prediction_head(parsed, tmp_path)
    assert depth.path == embeddings.path == "spec.train.multiTokenPrediction"
    assert depth.message.startswith("mtp_num_hidden_layers of the model's config.json is 3")
    assert embeddings.message.startswith("mtp_use_dedicated_embeddings")


def test_in_a_vision_language_folder_it_trains_as_with_the_text_model_alone(
    groups: Callable[[int], Group], tmp_path: Path
) -> None:
    both = []
    for text in (True, False):
        place = tmp_path / str(text)
        spec, tensors = spec_in(place, EXPERTS, 2, text=text, **MICRO)
        both.append(groups(2).run("train", spec=spec, batches=[samples()], layout={"pipeline": 2}, folder=place)[0])
        assert all(torch.equal(both[-1]["first"][name], each) for name, each in tensors.items()), "load, then export"
    alone, inside = both
    assert inside["metrics"] == alone["metrics"]
    after = {name.replace("model.language_model.", "model."): each for name, each in inside["published"].items()}
    assert all(torch.equal(after[name], each) for name, each in alone["published"].items())
    assert all(
        torch.equal(each, inside["first"][name]) for name, each in after.items() if name.startswith("model.visual.")
    )
