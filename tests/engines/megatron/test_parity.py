"""megatron-core's training against the transformers library trained by a plain loop, and against the FSDP engine, in float32.

`tests/distributed/test_parity.py` has the plain loop and its bounds. `pytest tests/engines/megatron/test_parity.py -s` prints what
docs/numerics.md has.
"""

import re
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35_trainer.engines.megatron.published_model import LAYER_NUMBER, publishers
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.manifest.train import ParallelismSpec
from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from qwen35_trainer.planning.megatron_memory import stages
from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, policy_spec_of, spec_of
from tests.distributed.test_parity import (
    OFFLOAD,
    PICTURED,
    SCORES,
    TEXT,
    batches,
    exact,
    library_model,
    reference,
    reference_scores,
)
from tests.models.rounding import allowed

pytestmark = pytest.mark.processes

TOTAL, GRADIENTS = 1e-5, 1e-4
"""Allowed: of loss and norm of the first update, relative; of each parameter's gradient, relative to its norm."""
ACROSS = 2e-3
"""Allowed of loss and norm of later updates, relative: Adam steps by the sign of tiny gradients, which rounding decides."""

SMALL = 10_000
"""Bytes of the files of a checkpoint, of which every rank then writes several."""

LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "1 process, dense": (1, "dense", {}, {}),
    "1 process, MoE": (1, "MoE", {}, {}),
    "1 process, recomputed activations": (1, "dense", {}, {"activationCheckpointing": True}),
    "1 process, fused": (
        1,
        "MoE",
        {},
        {
            "engine": "Megatron",
            "overrideTransformerConfig": {"bias_activation_fusion": True, "bias_dropout_fusion": True},
        },
    ),
    "1 process, micro-batch 4": (1, "MoE", {}, {"batch": {"microBatchSequences": 4}}),
    "2 data-parallel, dense": (2, "dense", {}, {}),
    "tensor 2, dense": (2, "dense", {"tensor": 2}, {}),
    "tensor 2, sequence, dense": (2, "dense", {"tensor": 2, "sequence": True}, {}),
    "tensor 2, sequence, MoE": (2, "MoE", {"tensor": 2, "sequence": True}, {"batch": {"microBatchSequences": 4}}),
    "pipeline 2, dense": (2, "dense", {"pipeline": 2}, {}),
    "pipeline 2, MoE": (2, "MoE", {"pipeline": 2}, {"batch": {"microBatchSequences": 2}}),
    "pipeline 2, virtual 2, dense": (2, "dense", {"pipeline": 2, "virtual": 2}, {}),
    "pipeline 2, virtual 2, MoE": (2, "MoE", {"pipeline": 2, "virtual": 2}, {"batch": {"microBatchSequences": 4}}),
    "pipeline 2, virtual 2, recomputed, three micro-batches": (
        2,
        "dense",
        {"pipeline": 2, "virtual": 2},
        {"activationCheckpointing": True, "batch": {"dynamicMicroBatches": True, "maxTokensPerDevice": 39}},
    ),
    "expert 2, MoE": (2, "MoE", {"expert": 2}, {}),
    "tensor 2, expert 2, MoE": (2, "MoE", {"tensor": 2, "sequence": True, "expert": 2}, {}),
    "expert tensor 2, MoE": (2, "MoE", {"expert_tensor": 2}, {"batch": {"microBatchSequences": 2}}),
    "tensor 2, expert tensor 2, MoE": (2, "MoE", {"tensor": 2, "sequence": True, "expert_tensor": 2}, {}),
    "tensor 2, pipeline 2, MoE": (4, "MoE", {"tensor": 2, "sequence": True, "pipeline": 2}, {}),
    "tensor 2, pipeline 2, virtual 2, MoE": (
        4,
        "MoE",
        {"tensor": 2, "sequence": True, "pipeline": 2, "virtual": 2},
        {"batch": {"microBatchSequences": 2}},
    ),
    "1 process, vision-language": (1, "vision-language", {}, {"activationCheckpointing": True}),
    "2 data-parallel, vision-language MoE": (2, "vision-language MoE", {}, {"batch": {"microBatchSequences": 4}}),
    "tensor 2, vision-language": (2, "vision-language", {"tensor": 2}, {"batch": {"microBatchSequences": 3}}),
    "tensor 2, expert 2, vision-language MoE": (
        2,
        "vision-language MoE",
        {"tensor": 2, "sequence": True, "expert": 2},
        {"batch": {"microBatchSequences": 4}},
    ),
    "pipeline 2, virtual 2, vision-language MoE": (
        2,
        "vision-language MoE",
        {"pipeline": 2, "virtual": 2},
        {"batch": {"microBatchSequences": 2}},
    ),
    "tensor 2, pipeline 2, vision-language": (
        4,
        "vision-language",
        {"tensor": 2, "sequence": True, "pipeline": 2},
        {"batch": {"microBatchSequences": 4}},
    ),
}


UNEVEN = {"dense, 6 layers": {"layers": 6}}
"""The virtual stages of the first of two pipeline stages then have two layers each, and those of the second one."""


SELDOM = ("1 process, vision-language", "2 data-parallel, vision-language MoE", "tensor 2, vision-language")
"""Layouts whose parts others have, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SELDOM else name for name in LAYOUTS]
)
def test_updates_are_those_of_a_plain_loop(groups: Callable[[int], Group], name: str) -> None:
    ranks, kind, layout, train = LAYOUTS[name]
    spec = spec_of(ranks, random=TEXT.get(kind), **train)
    results = groups(ranks).run(
        "train", spec=spec, batches=batches(kind), layout=layout, pictured=PICTURED.get(kind), pictures=kind in PICTURED
    )
    [result, *_], expected = results, reference(kind)
    built = library_model(kind).state_dict()
    assert result["first"].keys() == built.keys()
    assert all(torch.equal(result["first"][name], tensor) for name, tensor in built.items()), "load, then export"
    assert all(each["metrics"] == result["metrics"] for each in results), "any rank can report"
    scores = max(float((each["scores"][0] - reference_scores(kind)).abs().max()) for each in results)
    losses, norms = ([getattr(each, name) for each in result["metrics"]] for name in ("loss", "gradient_norm"))
    parts = {(rank, *_place(part)) for rank, each in enumerate(results) for part in each["gradients"]}
    assert parts == planned_parts({each: tuple(tensor.shape) for each, tensor in built.items()}, layout, ranks)
    gradients = joined([part for each in results for part in each["gradients"]], built)
    clipped = {name: gradient * min(1.0, 1.0 / norms[0]) for name, gradient in gradients.items()}
    scale = allowed(expected.gradients[0], exact(kind).gradients[0], GRADIENTS)
    worst = distance(clipped, expected.gradients[0], scale)
    totals = [abs(a / b - 1) for a, b in ((losses[0], expected.losses[0]), (norms[0], expected.norms[0]))]
    print(f"\n| {name} | {scores:.0e} | {totals[0]:.0e} | {totals[1]:.0e} | {worst:.0e} |", end="")
    assert scores <= SCORES
    assert max(totals) <= TOTAL
    assert worst <= GRADIENTS
    assert losses[1:] == pytest.approx(expected.losses[1:], rel=ACROSS)
    assert norms[1:] == pytest.approx(expected.norms[1:], rel=10 * ACROSS)
    assert result["likelihood"][0] < losses[0], "it has learnt"


def planned_parts(
    shapes: dict[str, tuple[int, ...]], layout: dict[str, Any], ranks: int
) -> set[tuple[int, str, int, int]]:
    """Rank, tensor, first value and number of values of every part, by the plan of a publication."""
    renamed = {"virtual": "virtualPipeline", "expert_tensor": "expertTensor"}
    degrees = ParallelismSpec(**{renamed.get(key, key): value for key, value in layout.items() if key != "sequence"})
    layers = 1 + max(int(match[1]) for name in shapes if (match := LAYER_NUMBER.match(name)))
    divided = [chain(*stage.parts) for stage in stages(layers, degrees.pipeline, degrees.virtualPipeline)]
    planned = publishers(shapes, [tuple(numbers) for numbers in divided], degrees, ranks)
    return {(rank, name, values.start, len(values)) for rank, name, values in planned}


def _place(part: tuple[str, int, Tensor]) -> tuple[str, int, int]:
    return part[0], part[1], part[2].numel()


def joined(parts: list[tuple[str, int, Tensor]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of the parts of all ranks, each value of which is in exactly one part."""
    whole = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in like.items()}
    for name, start, values in parts:
        place = whole[name][start : start + values.numel()]
        assert place.isnan().all(), f"{name} is published twice"
        place.copy_(values.flatten())
    assert not any(tensor.isnan().any() for tensor in whole.values()), "values that no rank publishes"
    return {name: tensor.view(like[name].shape) for name, tensor in whole.items()}


@pytest.mark.parametrize(
    ("layout", "kind", "settings"),
    [
        ({"tensor": 2, "sequence": True}, "dense", {"kl": "Loss"}),
        ({"pipeline": 2}, "MoE", {"kl": "Reward", "algorithm": {"entropyCoefficient": 0.01}}),
        ({"expert": 2}, "MoE", {"algorithm": {"correction": {"type": "TokenTIS"}}}),
        ({"pipeline": 2, "virtual": 2}, "dense, 6 layers", {"kl": "Loss"}),
        pytest.param({"tensor": 2, "sequence": True, "pipeline": 2}, "MoE", {"kl": "Loss"}, marks=pytest.mark.soak),
        pytest.param({"tensor": 2, "sequence": True, "expert": 2}, "MoE", {"kl": "Loss"}, marks=pytest.mark.soak),
        pytest.param({"expert_tensor": 2}, "MoE", {"kl": "Reward"}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("truncated", [False, True], ids=["", "truncated sampling"])
def test_a_policy_update_is_that_of_the_fsdp_engine(
    groups: Callable[[int], Group], layout: dict[str, Any], kind: str, settings: dict[str, Any], truncated: bool
) -> None:
    ranks = max(2, layout.get("tensor", 1) * layout.get("pipeline", 1))
    spec = policy_spec_of(ranks, random=(TEXT | UNEVEN)[kind], **settings)
    assert_updates_as_fsdp(groups(ranks), spec, layout, batch_of(8, 0, truncated=truncated))


@pytest.mark.soak
def test_four_uneven_stages_of_two_virtual_stages_update_as_the_fsdp_engine(groups: Callable[[int], Group]) -> None:
    """The first pipeline stage has four layers, and each other one has two."""
    spec = policy_spec_of(4, "Loss", random={"layers": 10})
    assert_updates_as_fsdp(groups(4), spec, {"pipeline": 4, "virtual": 2}, batch_of(8, 0))


def assert_updates_as_fsdp(
    group: Group, spec: dict[str, Any], layout: dict[str, Any], batch: TrainBatch, **model: Any
) -> None:
    """Check metrics and the gradient of each parameter. model: `pictured` and `pictures` of the jobs."""
    results = group.run("train", spec=spec, batches=[batch], layout=layout, **model)
    theirs = group.run("train_with_fsdp", spec=spec, batches=[batch], **model)[0]
    [metrics], [expected] = results[0]["metrics"], theirs["gradients"]
    assert_equal_updates(metrics, theirs["metrics"][0])
    gradients = joined([part for each in results for part in each["gradients"]], expected)
    clipped = {name: gradient * min(1.0, 1.0 / metrics.gradient_norm) for name, gradient in gradients.items()}
    worst = distance(clipped, expected, expected)
    print(f"\n| {layout} | {abs(metrics.loss - theirs['metrics'][0].loss):.0e} | {worst:.0e} |", end="")
    assert worst <= GRADIENTS


def assert_equal_updates(ours: UpdateMetrics, theirs: UpdateMetrics) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=TOTAL, abs=1e-6)  # it is a difference of advantages: small
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=GRADIENTS)
    assert ours.tokens == theirs.tokens
    assert ours.means.keys() == theirs.means.keys()
    for name, mean in ours.means.items():
        assert mean == pytest.approx(theirs.means[name], rel=1e-4, abs=1e-5), name


def test_a_checkpoint_is_continued_in_another_layout_and_by_the_other_engine(
    groups: Callable[[int], Group], tmp_path: Path
) -> None:
    kind, first, second = "MoE", batch_of(8, 0, supervised=True), batch_of(8, 1, supervised=True)
    spec = spec_of(2, random=TEXT[kind])
    tensor, pipeline, expert = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"expert": 2}
    virtual = pipeline | {"virtual": 2}
    straight = groups(2).run("train", spec=spec, batches=[first, second], layout=tensor)[0]
    both = straight["metrics"]
    folder = tmp_path / "tensor"
    folder.mkdir()
    saved = groups(2).run("train", spec=spec, batches=[first], layout=tensor, save=folder, file_bytes=SMALL)[0]
    of_virtual = tmp_path / "virtual"
    of_virtual.mkdir()
    groups(2).run("train", spec=spec, batches=[], layout=virtual, restore=folder, save=of_virtual, file_bytes=SMALL)
    for each in (folder, of_virtual):
        assert len(list((each / "state").glob("*.distcp"))) > 10, "each rank has gathered several windows"
    for layout, source in ((pipeline, folder), (virtual, folder), (expert, of_virtual)):
        restored = groups(2).run("train", spec=spec, batches=[second], layout=layout, restore=source)[0]
        for name, values in saved["published"].items():
            assert torch.equal(restored["first"][name], values), name
        assert restored["metrics"][0].loss == pytest.approx(both[1].loss, rel=TOTAL)
        assert restored["metrics"][0].gradient_norm == pytest.approx(both[1].gradient_norm, rel=GRADIENTS)
        assert_equal_steps(restored["published"], straight["published"], saved["published"])
    by_fsdp = tmp_path / "fsdp"
    by_fsdp.mkdir()
    groups(2).run("train_with_fsdp", spec=spec, batches=[first], save=by_fsdp)
    ours = groups(2).run("train", spec=spec, batches=[second], layout=tensor, restore=by_fsdp)[0]
    theirs = groups(2).run("train_with_fsdp", spec=spec, batches=[second], restore=folder)[0]
    for continued in (ours, theirs):
        assert continued["metrics"][0].loss == pytest.approx(both[1].loss, rel=TOTAL)
        assert_equal_steps(continued["published"], straight["published"], saved["published"])


def assert_equal_steps(weights: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """A step depends on Adam's moments. With those of another parameter, it would be as far off as it is long."""
    for name, values in expected.items():
        step = values - before[name]
        assert float((weights[name] - values).norm()) <= 0.05 * float(step.norm()) + 1e-7, name


@pytest.mark.parametrize(
    ("other", "tensor"),
    [
        ({"optimizer": {"type": "Muon"}}, r"\.exp_avg\b"),
        ({"freeze": ["Embeddings"]}, r"\bmodel\.embed_tokens\.weight,"),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_tensors_is_refused_before_anything_changes(
    groups: Callable[[int], Group], tmp_path: Path, other: dict[str, Any], tensor: str
) -> None:
    groups(1).run("train_with_fsdp", spec=spec_of(1, random={}, **other), batches=[], save=tmp_path)
    text, unchanged = groups(1).run("refusal_of", folder=tmp_path, spec=spec_of(1, random={}))[0]
    assert re.search(tensor, text)
    assert "train.freeze" in text
    assert unchanged


def test_an_optimizer_that_counts_its_steps_in_groups_continues_where_it_was(
    groups: Callable[[int], Group], tmp_path: Path
) -> None:
    first, second = batch_of(8, 0, supervised=True), batch_of(8, 1, supervised=True)
    spec = spec_of(1, random={})
    straight = groups(1).run("train", spec=spec, batches=[first, second])[0]["published"]
    saved = groups(1).run("train", spec=spec, batches=[first], save=tmp_path, fused=True, file_bytes=SMALL)
    saved = saved[0]["published"]
    for fused, offload in ((False, {}), (True, {}), (True, OFFLOAD)):
        continued = groups(1).run(
            "train",
            spec=spec_of(1, random={}, **offload),
            batches=[second],
            restore=tmp_path,
            fused=fused,
            group_numbers=3000,
        )[0]["published"]
        for name, values in straight.items():
            step = values - saved[name]
            assert float((continued[name] - values).norm()) <= 0.05 * float(step.norm()) + 1e-7, name


def test_a_gradient_that_is_not_finite_changes_nothing(groups: Callable[[int], Group]) -> None:
    spec, samples = spec_of(2, random=TEXT["MoE"]), [batch_of(8, 0, supervised=True)]
    result = groups(2).run("train", spec=spec, batches=samples, layout={"expert": 2}, spoilt=True)[0]
    assert not result["metrics"][0].gradient_norm < float("inf")
    assert all(torch.equal(result["published"][name], values) for name, values in result["first"].items())


@pytest.mark.parametrize(
    ("kind", "layout", "train"),
    [
        pytest.param("dense", {"tensor": 2, "sequence": True}, {}, marks=pytest.mark.soak),
        ("MoE", {"expert": 2}, OFFLOAD),
    ],
    ids=["dense", "MoE, offload"],
)
def test_a_bfloat16_model_has_float32_decays_and_continues_exactly(
    groups: Callable[[int], Group], tmp_path: Path, kind: str, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    spec = spec_of(2, random=TEXT[kind], **train)
    spec["model"]["precision"] = "BF16"
    first, second = batch_of(8, 0, supervised=True), batch_of(8, 1, supervised=True)
    straight = groups(2).run("train", spec=spec, batches=[first, second], layout=layout)[0]
    groups(2).run("train", spec=spec, batches=[first], layout=layout, save=tmp_path, file_bytes=SMALL)
    continued = groups(2).run("train", spec=spec, batches=[second], layout=layout, restore=tmp_path)[0]
    assert continued["metrics"][0] == straight["metrics"][1]
    assert all(torch.equal(continued["published"][name], values) for name, values in straight["published"].items())
    for name, values in straight["published"].items():
        assert values.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16), name
    fsdp = groups(2).run("train_with_fsdp", spec=spec, batches=[first])[0]["metrics"][0]
    assert straight["metrics"][0].loss == pytest.approx(fsdp.loss, rel=2e-2)


def test_norms_stay_modules_of_their_own_where_transformer_engine_would_join_them(
    groups: Callable[[int], Group],
) -> None:
    """Transformer Engine is not installed here: its part is played by classes that say what they join."""
    assert set(groups(2).run("classes_of_linear_layers")[0]) == {"ColumnParallelLinear"}


def test_settings_of_the_manifest_reach_megatron_core(groups: Callable[[int], Group]) -> None:
    settings = {"bias_activation_fusion": True, "attention_backend": "auto", "cuda_graph_warmup_steps": 5}
    spec = policy_spec_of(1, random=TEXT["dense"], kl="Loss", engine="Megatron", overrideTransformerConfig=settings)
    trained, reference_model = groups(1).run("settings_of", spec=spec, names=[*settings, "bias_dropout_fusion"])[0]
    assert trained == reference_model
    assert trained == {
        "bias_activation_fusion": "True",
        "attention_backend": "AttnBackend.auto",
        "cuda_graph_warmup_steps": "5",
        "bias_dropout_fusion": "False",
    }


def test_wrong_settings_are_refused_together_before_groups_form(groups: Callable[[int], Group]) -> None:
    settings = {"bias_activation_fuson": True, "cuda_graph_warmup_steps": "many"}
    spec = spec_of(1, random=TEXT["dense"], engine="Megatron", overrideTransformerConfig=settings)
    text, formed = groups(1).run("refusal_of_settings", spec=spec)[0]
    assert f"overrideTransformerConfig.bias_activation_fuson: megatron-core {version('megatron-core')} has no" in text
    assert "Did you mean bias_activation_fusion" in text
    assert "overrideTransformerConfig.cuda_graph_warmup_steps: " in text
    assert not formed


def test_what_megatron_core_itself_refuses_is_named_before_groups_form(groups: Callable[[int], Group]) -> None:
    settings = {"bias_activation_fusion": True, "use_te_activation_func": True}
    spec = spec_of(1, random=TEXT["dense"], engine="Megatron", overrideTransformerConfig=settings)
    text, formed = groups(1).run("refusal_of_settings", spec=spec)[0]
    assert text.startswith(
        "spec.train.overrideTransformerConfig: megatron-core refuses the settings bias_activation_fusion: True, "
        "use_te_activation_func: True: bias_activation_fusion and use_te_activation_func cannot be both true."
    )
    assert not formed
