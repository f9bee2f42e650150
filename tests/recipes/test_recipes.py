"""Published recipes: their manifests are valid, and their settings train, on a small model of the same kind."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen35_trainer.manifest import Manifest, dump_manifest, load_manifest
from qwen35_trainer.manifest.document import parse_document
from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, UpdateRecord
from qwen35_trainer.progress.sample_file import read_samples
from qwen35_trainer.runtime.preflight import unsupported
from qwen35_trainer.runtime.train_session import learning_rate
from tests.models import published
from tests.recipes.shrink import DIVISOR, changes, sees, shape_of, shrunken, updates, write
from tests.runtime.conftest import Command, Ended
from tests.runtime.local import Local

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("qwen3.5-*.yaml"))
RECIPES = [file for file in EXAMPLES if load_manifest(file).spec.train.engine == "FSDP"]
"""tests/engines/megatron/test_recipes.py has those that train with Megatron."""
ASYNCHRONOUS = [file for file in RECIPES if load_manifest(file).spec.mode == "FullyAsync"]
SHARDED = "qwen35-35b-a3b-grpo"
"""Start of the names of the recipes that train on two ranks."""
SIZE_AND_PLACE = {
    "spec.accelerator.profile",
    "spec.accelerator.devicesPerNode",
    "spec.model.source",
    "spec.data.train[0].files.paths[0]",
    "spec.data.train[0].files.volume",
    "spec.data.validation[0].files.paths[0]",
    "spec.data.validation[0].files.volume",
    "spec.data.maxPromptTokens",
    "spec.data.maxResponseTokens",
    "spec.rollout.engine",
    "spec.rollout.vllm",
    "spec.rollout.nodes",
    "spec.rollout.tensorParallel",
    "spec.train.nodes",
    "spec.train.updates",
    "spec.train.batch.promptsPerUpdate",
    "spec.train.batch.microBatchSequences",
    "spec.checkpoint.storage",
}
"""What a published recipe and its run here may differ in; format of the data, reward, algorithm, optimizer, offload and the rest may not."""

MAX_BEHAVIOUR_KL = 0.02
"""Of a batch that vLLM has generated, against the trainer."""
CHANGED_BY_ASYNC = {
    "metadata.name",
    "spec.mode",
    "spec.algorithm.correction.type",
    "spec.async",
    "spec.rollout.memoryFraction",
    "spec.checkpoint.storage.persistentVolumeClaim.path",
}
"""What a recipe and its fully asynchronous variant differ in."""


def _trained(file: Path) -> object:
    """In `make test`, one fully asynchronous variant trains: the others differ from their recipes in the same fields."""
    only_in_soak = file in ASYNCHRONOUS and file.stem != "qwen3.5-9b-grpo-fsdp-async"
    return pytest.param(file, marks=[pytest.mark.soak] if only_in_soak else [])


@pytest.fixture(scope="module", params=RECIPES, ids=lambda file: file.stem)
def recipe(request) -> Manifest:
    return load_manifest(request.param)


@pytest.fixture(scope="module", params=map(_trained, RECIPES), ids=[file.stem for file in RECIPES])
def trained(request) -> Manifest:
    """The recipe of `ended`."""
    return load_manifest(request.param)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[[Manifest], Ended]]:
    """Runs a shrunken recipe: by the command on two ranks or with vLLM, in this process otherwise. Two recipes that differ in
    their devices alone shrink to the same run.
    """
    command, local = Command(tmp_path_factory.mktemp("commands")), Local(tmp_path_factory.mktemp("local"))
    ended: dict[str, Ended] = {}

    def run(small: Manifest) -> Ended:
        settings = small.spec.model_dump_json()
        if settings not in ended:
            file = write(tmp_path_factory.mktemp("recipe"), small)
            by_vllm = small.spec.rollout is not None and small.spec.rollout.engine == "VLLM"
            ended[settings] = (command if small.spec.world_size > 1 or by_vllm else local).run(file)
        return ended[settings]

    yield run
    local.end()
    for running in command.started:
        running.kill()


def ranks_of(recipe: Manifest) -> int:
    """A process has one rank: one recipe, the one with most parts, trains on two."""
    return 2 if recipe.metadata.name.startswith(SHARDED) else 1


@pytest.fixture(scope="module")
def ended(run, trained) -> Ended:
    return run(shrunken(trained, ranks_of(trained)))


def test_one_recipe_at_least_trains_on_two_ranks():
    assert [file.stem for file in RECIPES if load_manifest(file).metadata.name.startswith(SHARDED)]


@pytest.mark.parametrize("file", ASYNCHRONOUS, ids=lambda file: file.stem)
def test_a_fully_asynchronous_variant_has_the_other_settings_of_its_recipe(file):
    variant, recipe = load_manifest(file), load_manifest(file.with_name(file.name.replace("-async", "")))
    differing = set(_differing(_document(recipe), _document(variant)))
    assert {place for place in differing if not _within(place, CHANGED_BY_ASYNC)} == set()
    assert (
        variant.spec.train.batch.promptsPerUpdate * variant.spec.async_.batchesPerPublication
        == recipe.spec.groups_per_batch
    )


def test_each_synchronous_recipe_has_a_fully_asynchronous_variant():
    names = {file.stem.replace("-async", "") for file in ASYNCHRONOUS}
    assert names == {file.stem for file in RECIPES if file not in ASYNCHRONOUS}


def test_shrinking_changes_size_and_place_and_nothing_else(recipe):
    ranks = ranks_of(recipe)
    before, after = _document(recipe), _document(shrunken(recipe, ranks))
    differing = set(_differing(before, after))
    assert {place for place in differing if not _within(place, SIZE_AND_PLACE)} == set()
    assert {f"spec.{path}" for path in changes(recipe, ranks)} <= SIZE_AND_PLACE


def test_a_shrunken_batch_is_the_published_one_divided(recipe):
    whole, small = recipe.spec.train.batch, shrunken(recipe).spec.train.batch
    assert whole.promptsPerUpdate % small.promptsPerUpdate == 0
    assert small.microBatchSequences * DIVISOR == max(DIVISOR, whole.microBatchSequences)


def test_a_shrunken_model_is_of_the_same_kind(recipe):
    shape = published.SHAPES[shape_of(shrunken(recipe))]
    assert "vision_config" in shape
    assert ("num_experts" in shape["text_config"]) == ("-A" in recipe.spec.model.name)


def test_recipes_of_geo3k_train_on_pictures_and_its_reward(recipe):
    """All but those of 9B, whose script trains on GSM8K."""
    [reward] = shrunken(recipe).spec.rewards
    assert sees(recipe) == ("-9B" not in recipe.spec.model.name)
    assert sees(recipe) == (reward.function == "qwen35_trainer.rewards.geo3k:score")


def test_nothing_of_a_shrunken_recipe_needs_a_cluster(recipe):
    assert unsupported(shrunken(recipe)) == []


def test_its_settings_train(trained, ended):
    assert ended.code == 0, ended.err
    records, total = ended.of(UpdateRecord), updates(trained)
    assert [record.update for record in records] == list(range(1, total + 1))
    assert all(math.isfinite(record.loss) and math.isfinite(record.gradient_norm) for record in records)
    assert all(record.tokens > 0 for record in records)
    assert any(record.gradient_norm > 0 for record in records)
    assert any(0 < record.reward_mean < 1 for record in records)
    prompts = [sample.prompt for moment in read_samples(ended.folder / "samples.jsonl") for sample in moment.samples]
    assert prompts
    assert all(("[image " in prompt) == sees(trained) for prompt in prompts)
    assert {path.name for path in (ended.folder / "logs").glob("train-*")} == {
        f"train-{rank}.log" for rank in range(ranks_of(trained))
    }
    assert [record.update for record in ended.of(CheckpointRecord)] == [total]


def test_its_learning_rates_are_those_of_its_schedule(trained, ended):
    rates = [record.learning_rate for record in ended.of(UpdateRecord)]
    optimizer = trained.spec.train.optimizer
    assert rates == pytest.approx([learning_rate(optimizer, step, len(rates)) for step in range(len(rates))])


def test_a_batch_of_a_synchronous_recipe_is_generated_by_the_version_that_the_batch_before_it_made(trained, ended):
    """In a fully asynchronous variant, tokens may be of earlier versions."""
    records, knobs = ended.of(UpdateRecord), trained.spec.effective_async
    steps = knobs.updatesPerBatch * knobs.batchesPerPublication
    assert [record.version for record in records] == [update // steps for update in range(updates(trained))]
    assert max(lag for record in records for lag in record.lag_histogram) <= knobs.maxVersionLag


def test_its_penalty_against_the_reference_model_grows_from_nothing(ended):
    kl = [record.kl for record in ended.of(UpdateRecord)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 0


def test_it_is_evaluated_where_the_recipe_says_so(trained, ended):
    expected = [0, updates(trained)] if trained.spec.data.validation else []
    assert [record.update for record in ended.of(EvaluationRecord)] == expected


@pytest.mark.soak
def test_its_settings_train_with_vllm(run, recipe):
    """With the recipe's own settings of vLLM, which computes nearly the same log-probabilities as the trainer, in bfloat16."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    ended = run(shrunken(recipe, ranks_of(recipe), "VLLM"))
    assert ended.code == 0, ended.err
    records = ended.of(UpdateRecord)
    assert [record.update for record in records] == list(range(1, updates(recipe) + 1))
    assert any(record.gradient_norm > 0 for record in records)
    assert any(0 < record.reward_mean < 1 for record in records)
    assert all(abs(record.behaviour_kl) < MAX_BEHAVIOUR_KL for record in records)


def _document(manifest: Manifest) -> object:
    document, problems = parse_document(dump_manifest(manifest))
    assert problems == []
    return document


def _differing(before: object, after: object, place: str = "") -> Iterator[str]:
    """Places of the leaves, keys or lists in which two documents differ. Lists of one length are compared item by item."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _differing(before.get(key), after.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, items in enumerate(zip(before, after, strict=True)):
            yield from _differing(*items, f"{place}[{index}]")
    elif before != after:
        yield place


def _within(place: str, allowed: set[str]) -> bool:
    return any(place == path or place.startswith(f"{path}.") for path in allowed)
