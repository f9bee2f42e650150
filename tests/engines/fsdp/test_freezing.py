"""What trains: all, all but some parts, or adapters."""

from functools import partial

import pytest
import torch
from torch import nn

from qwen35_trainer.engines.fsdp import lora
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.fsdp.freezing import convert_frozen, freeze
from qwen35_trainer.engines.fsdp.muon import Muon
from qwen35_trainer.engines.fsdp.optimizer import Optimizers
from qwen35_trainer.engines.fsdp.sharding import layers
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.manifest import LoRASpec, OptimizerSpec
from qwen35_trainer.rollout.torch import TorchEngine
from tests.distributed.masters import masters
from tests.distributed.samples import batch_of, scenes_of
from tests.models.scenes import vision_language
from tests.models.test_vision import calls
from tests.publications import published_by, received
from tests.rollout.loading import load

CPU = torch.device("cpu")
ADAPTERS = {"train.lora": {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "out_proj", "up_proj"]}}


def changed(engine: FSDPEngine, batch) -> set[str]:
    before = masters(engine)
    before = {name: tensor.clone() for name, tensor in before.items()}
    engine.train(batch, [1e-2])
    return {name for name, tensor in masters(engine).items() if not torch.equal(tensor, before[name])}


def test_what_trains_must_be_float32_and_what_does_not_rests_in_the_precision(make_model) -> None:
    model = make_model()
    freeze(model, ["Embeddings"])
    convert_frozen(model, torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.bfloat16} == {
        name for name in types if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }
    with pytest.raises(TypeError, match=r"must be float32 when they are loaded: model\.layers\.0\..* is bfloat16, "):
        convert_frozen(model.bfloat16(), torch.bfloat16)


def test_what_is_published_in_float32_rests_so_even_where_it_does_not_train(make_model) -> None:
    model = make_model().requires_grad_(False)
    convert_frozen(model, torch.bfloat16)
    exact = {name.partition("linear_attn")[2] for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert exact == {".A_log", ".norm.weight"}


@pytest.mark.usefixtures("alone")
def test_frozen_parts_stay_as_they_are_and_the_rest_trains(make_model, make_spec, make_batch) -> None:
    spec = make_spec({"train.freeze": ["Embeddings", "Router"]})
    engine = FSDPEngine(Origin(partial(make_model, experts=4)), spec, CPU)
    moved = changed(engine, make_batch())
    names = masters(engine).keys()
    frozen = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", ".shared_expert_gate.weight")
    assert names - moved == {name for name in names if name.endswith(frozen)}
    assert all(any(name.endswith(part) for name in names) for part in frozen)


def test_all_parts_that_the_model_does_not_have_are_named(make_model) -> None:
    with pytest.raises(ValueError, match="has no Vision and no Router"):
        freeze(make_model(), ("Vision", "Embeddings", "Router"))


@pytest.mark.usefixtures("alone")
def test_adapters_change_what_they_adapt_and_nothing_else(make_model, make_spec, make_batch) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec(ADAPTERS), CPU)
    names = masters(engine).keys()
    assert names == make_model().state_dict().keys()
    moved = changed(engine, make_batch())
    assert moved == {n for n in names if n.endswith(("q_proj.weight", "out_proj.weight", "up_proj.weight"))}


@pytest.mark.usefixtures("alone")
def test_an_adapted_model_scores_as_one_whose_weights_have_the_adapters_added(
    make_model, make_spec, make_batch, log_probs_of
) -> None:
    engine, batch = FSDPEngine(Origin(make_model), make_spec(ADAPTERS), CPU), make_batch()
    engine.train(batch, [1e-2])
    merged = make_model()
    merged.load_state_dict(masters(engine))
    with torch.no_grad():
        log_probs = torch.cat(log_probs_of(merged, batch))
    expected = -log_probs[torch.from_numpy(batch.trainable)].mean().item()
    assert engine.negative_log_likelihood(batch) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture of experts"])
def test_published_adapters_make_the_rollout_model_the_trainers_own(
    make_model, make_spec, make_batch, log_probs_of, experts
) -> None:
    """From the first publication on, through what a publication is on its way: bytes with checksums."""
    spec = make_spec({"train.lora": {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "out_proj"]}})
    build = partial(make_model, experts=experts)
    engine, rollout, merged, batch = FSDPEngine(Origin(build), spec, CPU), build(), build(), make_batch()
    generating = TorchEngine(rollout, end_token=2, slots=2, max_length=32, seed=0)
    for version in range(3):
        load(generating, received(published_by(engine).items(), version), version)
        merged.load_state_dict(masters(engine))
        with torch.no_grad():
            here, there = (torch.cat(log_probs_of(model, batch)) for model in (rollout, merged))
        assert (here - there).abs().max() <= 5e-5  # the sums have another order
        engine.train(batch, [1e-2])


@pytest.mark.usefixtures("alone")
def test_a_publication_of_adapters_carries_them_and_their_scale_and_nothing_else(make_model, make_spec) -> None:
    published = published_by(FSDPEngine(Origin(make_model), make_spec(ADAPTERS), CPU))
    assert published.pop("lora_scale").item() == 2.0
    prefixes = {name.rpartition(".")[0] for name in published}
    assert published.keys() == {f"{prefix}.{part}" for prefix in prefixes for part in ("lora_A", "lora_B")}
    assert {prefix.rpartition(".")[2] for prefix in prefixes} == {"q_proj", "out_proj", "up_proj"}


@pytest.mark.usefixtures("alone")
def test_adapters_that_were_restored_are_published_as_they_were_saved(
    make_model, make_spec, make_batch, tmp_path
) -> None:
    saved, restored = (FSDPEngine(Origin(make_model), make_spec(ADAPTERS | {"seed": seed}), CPU) for seed in (0, 1))
    saved.train(make_batch(), [1e-2])
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    first, second = published_by(saved), published_by(restored)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_targets_that_no_layer_has_are_named_with_those_that_exist(make_model) -> None:
    with pytest.raises(ValueError, match=r"no linear layer is called proj, qq_proj; the decoder layers have .*q_proj"):
        lora.add(make_model(), LoRASpec(targets=("qq_proj", "q_proj", "proj")))


def test_of_the_default_targets_some_may_be_missing(make_model) -> None:
    model = make_model(experts=4)  # has no MLP, but a shared expert
    lora.add(model, LoRASpec())
    assert sum(name.endswith(lora.DOWN) for name, _ in model.named_parameters()) == 3 * (3 + 3) + (4 + 3)


@pytest.mark.usefixtures("alone")
def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(make_model) -> None:
    model = make_model(experts=4)
    parts = Optimizers.of(model, OptimizerSpec(type="Muon")).parts
    [muon] = [part for part in parts if isinstance(part, Muon)]
    chosen = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert not {n for n in names if "norm" in n or "embed" in n or "lm_head" in n or "conv1d" in n or "A_log" in n}
    assert sum(len(group["params"]) for part in parts for group in part.param_groups) == len(list(model.parameters()))


def test_nothing_to_train_is_refused(make_model) -> None:
    with pytest.raises(ValueError, match="nothing is left to train"):
        Optimizers.of(make_model().requires_grad_(False), OptimizerSpec())


def test_layers_are_those_that_the_model_has_and_its_experts_come_first(make_model) -> None:
    model = make_model(experts=4)
    model._no_split_modules = ["Qwen3_5TextDecoderLayer", type(model.model.layers[0]).__name__]
    assert layers(model) == [*(layer.mlp.experts for layer in model.model.layers), *model.model.layers]


def test_a_model_without_any_of_its_layers_is_refused(make_model) -> None:
    model = make_model()
    model._no_split_modules = ["Qwen3_5TextDecoderLayer"]
    with pytest.raises(ValueError, match="no module is of a class in _no_split_modules"):
        layers(model)


def test_an_adapter_starts_as_no_change_at_all(make_model, tokens) -> None:
    plain, adapted = make_model(), make_model()
    lora.add(adapted, LoRASpec(rank=2))
    lora.initialise(adapted, 0)
    ids = tokens(2, 9)
    assert torch.equal(plain(input_ids=ids).logits, adapted(input_ids=ids).logits)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all(name.endswith((lora.DOWN, lora.UP)) for name in trained)
    assert isinstance(adapted.model.layers[0].mlp.up_proj, nn.Linear)


@pytest.mark.usefixtures("alone")
def test_a_tower_that_no_picture_reaches_does_not_train(make_spec) -> None:
    supervised = {"mode": "SFT", "rollout": None, "rewards": None, "train.optimizer.weightDecay": 0.5}
    supervised |= {"train.batch.microBatchSequences": 3}
    engine = FSDPEngine(Origin(vision_language), make_spec(supervised), CPU, pictures=False)
    moved = changed(engine, batch_of(3, seed=0, supervised=True))
    assert moved == {name for name in masters(engine) if not name.startswith("model.visual.")}
    assert len(engine._optimizers.parts[0].state) == len(moved)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("settings", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_a_tower_that_no_picture_reaches_does_not_run_and_changes_no_bit(make_spec, tmp_path, settings) -> None:
    supervised = {"mode": "SFT", "rollout": None, "rewards": None, "train.batch.microBatchSequences": 1}
    spec = make_spec(supervised | settings | {"train.freeze": ["Vision"]})
    resting, running = (FSDPEngine(Origin(vision_language), spec, CPU, pictures=each) for each in (False, True))
    runs = [calls(engine._model.model.visual) for engine in (resting, running)]
    for seed in range(2):
        batch = batch_of(3, seed=seed, supervised=True)
        assert resting.train(batch, [1e-2]) == running.train(batch, [1e-2])
        assert resting.negative_log_likelihood(batch) == running.negative_log_likelihood(batch)
    resting.save(tmp_path)
    assert resting.saved(wait=True)
    assert (len(runs[0]), len(runs[1])) == (0, 12)
    weights = masters(running)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in masters(resting).items())
    # Examples that are only scored may have pictures.
    assert resting.negative_log_likelihood(scenes_of(0)) == running.negative_log_likelihood(scenes_of(0))


@pytest.mark.usefixtures("alone")
def test_a_frozen_tower_stays_as_it_is_while_the_rest_learns_from_its_pictures(make_spec) -> None:
    supervised = {"mode": "SFT", "rollout": None, "rewards": None, "train.batch.microBatchSequences": 3}
    spec = make_spec(supervised | {"train.freeze": ["Vision"]})
    engine = FSDPEngine(Origin(vision_language), spec, CPU)
    moved = changed(engine, scenes_of(0))
    assert moved == {name for name in masters(engine) if not name.startswith("model.visual.")}
