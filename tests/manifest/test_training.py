import pytest

from qwen35_trainer.manifest import TrainingSpec


@pytest.fixture
def spec(document):
    return lambda changes=None: TrainingSpec.model_validate(document(changes)["spec"])


def test_the_35b_recipe_has_four_dense_and_one_expert_data_parallel_rank(spec):
    cut = {"tensor": 2, "pipeline": 1, "context": 1, "expert": 8, "expertTensor": 1}
    recipe = spec({"accelerator.devicesPerNode": 8, "train.parallelism": cut})
    assert (recipe.world_size, recipe.data_parallel, recipe.expert_data_parallel) == (8, 4, 1)


def test_the_122b_recipe_has_eight_dense_and_two_expert_data_parallel_ranks(spec):
    cut = {"tensor": 2, "pipeline": 2, "context": 1, "expert": 8, "expertTensor": 1}
    recipe = spec({"accelerator.devicesPerNode": 8, "train.nodes": 4, "train.parallelism": cut})
    assert (recipe.world_size, recipe.data_parallel, recipe.expert_data_parallel) == (32, 8, 2)


def test_an_update_has_a_group_for_each_prompt(spec):
    assert spec({"algorithm.groupSize": 6}).samples_per_update == 4 * 6


def test_sft_has_one_sample_for_each_prompt(spec, removed):
    assert spec({"mode": "SFT", "rollout": removed, "rewards": removed}).samples_per_update == 4


def test_replicas_are_counted_by_device(spec):
    assert spec({"accelerator.devicesPerNode": 8, "rollout": {"nodes": 3, "tensorParallel": 2}}).rollout_replicas == 12
    assert spec({"accelerator.devicesPerNode": 8, "rollout": {"nodes": 4, "tensorParallel": 16}}).rollout_replicas == 2


def test_the_lane_takes_its_nodes_from_the_pool(spec):
    lane = {"nodes": 1, "tensorParallel": 8, "afterTokens": 4096}
    rollout = {"nodes": 3, "tensorParallel": 2, "stragglerLane": lane}
    training = spec({"accelerator.devicesPerNode": 8, "rollout": rollout})
    assert (training.rollout_replicas, training.lane_replicas, training.lane_nodes) == (8, 1, 1)
    assert [training.replica_devices(lane=lane) for lane in (False, True)] == [2, 8]
    assert training.rollout_devices == 24


def test_sft_has_no_replicas(spec, removed):
    assert spec({"mode": "SFT", "rollout": removed}).rollout_replicas == 0


def test_a_batch_is_as_many_updates_as_it_requires(spec):
    training = spec({"async": {"updatesPerBatch": 3, "batchesPerPublication": 4}})
    assert training.groups_per_batch == 4 * 3
    assert training.batches_per_version == 4


@pytest.mark.parametrize("mode", ["Colocated", "SFT"])
def test_outside_fully_async_nothing_runs_ahead(spec, mode):
    knobs = spec({"mode": mode, "async": {"batchesPerPublication": 4}}).effective_async
    assert (knobs.stalenessThreshold, knobs.maxVersionLag, knobs.partialRollout) == (0.0, 0, False)
    assert knobs.batchesPerPublication == 4


def test_at_threshold_zero_no_sequence_spans_versions(spec):
    assert not spec({"async": {"stalenessThreshold": 0}}).effective_async.partialRollout


def test_fully_async_uses_the_knobs_as_they_are(spec):
    training = spec()
    assert training.effective_async == training.async_
