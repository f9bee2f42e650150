"""Pods have the memory that their training's plan needs, and trainings that no device holds are refused."""

from copy import deepcopy
from pathlib import Path

import pytest

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import pod_size, pod_templates
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.device_profiles import NVIDIA, PROFILES
from qwen35_trainer.manifest import load_manifest, parse_spec
from tests.controlplane.kept import load

EXAMPLES = Path(__file__).parents[3] / "examples"
LARGE = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 8},
    "model": {"name": "Qwen/Qwen3.5-397B-A17B", "source": {"path": "/models/397b"}},
    "rollout": {"engine": "VLLM", "nodes": 2, "tensorParallel": 2},
    "rewards": [{"type": "Gym"}],
}


@pytest.fixture
def example():
    def read(name: str) -> TrainingResource:
        return TrainingResource("demo", "rl", "1" * 36, 1, load_manifest(EXAMPLES / f"{name}.yaml").spec)

    return read


@pytest.mark.parametrize(
    ("name", "text_gib", "tower"),
    [("qwen3.5-27b-grpo-fsdp", 726.5, 0.461e9), ("qwen3.5-35b-a3b-grpo-fsdp", 778, 0.447e9)],
)
def test_pods_of_offloaded_state_have_the_planned_memory_and_a_tenth_more(name, text_gib, tower, example):
    """The vision tower takes 16 bytes for each of its parameters, because the data may contain pictures."""
    size, planned_gib = pod_size.size_of(example(name), "train"), text_gib + 16 * tower / 2**30
    assert size.memory_gib == pytest.approx(planned_gib / 0.9, abs=1.5)
    assert size.memory_gib > 8 * NVIDIA.per_device.memory_gib
    assert size.cpu == 8 * NVIDIA.per_device.cpu
    # Ray takes 30 % of the memory for its object store, and moves it to a disk if /dev/shm is smaller.
    assert 0.3 * size.memory_gib <= size.shm_gib <= 0.5 * size.memory_gib


def test_what_lies_in_shared_memory_is_counted_once(make_training):
    """Of a 397B model, the parts that the ranks of a pod publish are more than half of the pod's memory."""
    train = {"nodes": 2, "activationCheckpointing": True}
    training = make_training(LARGE | {"train": train, "publication": {"transport": "ObjectStore"}})
    size = pod_size.size_of(training, "train")
    shared = 2 * 2 * 397 / 2 / 1.0737  # two versions in bfloat16 over two pods, in GiB
    processes = 8 * 4
    assert size.memory_gib == pytest.approx((shared + processes) / 0.9, rel=0.05)
    assert shared <= size.shm_gib <= size.memory_gib


@pytest.mark.parametrize("profile", PROFILES)
def test_a_small_model_has_the_memory_of_its_profile(profile, make_training):
    training = make_training({"accelerator": {"profile": profile, "devicesPerNode": 4}})
    share = PROFILES[profile].per_device
    for pool in ("rollout", "train"):
        size = pod_size.size_of(training, pool)
        assert (size.memory_gib, size.shm_gib) == (4 * share.memory_gib, 4 * share.shm_gib)
    assert pod_size.size_of(training, "head") == PROFILES[profile].head


def test_a_training_that_the_devices_cannot_hold_is_refused_with_every_problem_its_fix_and_the_override(make_training):
    problems = pod_size.problems(make_training(LARGE | {"train": {"nodes": 2}}))
    assert [problem.path for problem in problems] == ["spec.train", "spec.rollout"]
    assert problems[0].message.startswith("with 2 nodes × 8 devices, a rank needs ")
    assert "use more than 2 nodes" in problems[0].fix
    assert "Raise rollout.tensorParallel to 4 or more" in problems[1].fix
    assert all(problem.fix.endswith("set spec.pods.sizing to Profile.") for problem in problems)


def test_a_node_selector_names_the_device_that_a_training_must_fit(make_training):
    def selecting(product: str) -> dict[str, object]:
        return {"spec": {"nodeSelector": {"nvidia.com/gpu.product": product}}}

    fits = LARGE | {"model": {"name": "Qwen/Qwen3.5-27B", "source": {"path": "/models/27b"}}, "train": {"nodes": 1}}
    named = {"pods.rollout": selecting("NVIDIA-H100-80GB-HBM3"), "pods.train": selecting("NVIDIA-H100-80GB-HBM3")}
    assert pod_size.problems(make_training(fits)) == []
    [problem] = pod_size.problems(make_training(fits | named))
    assert "and H100 has 72.8 GiB free" in problem.message
    assert pod_size.problems(make_training(fits | {"pods.train": selecting("NVIDIA-H100-80GB-HBM3")})) == []
    assert pod_size.problems(make_training(fits | named | {"pods.train": selecting("of-a-later-year")})) == []


def test_degrees_and_lengths_that_the_model_does_not_allow_are_refused(make_training):
    """397B has 2 heads of keys and values, which at most 2 tensor-parallel ranks divide."""
    train = {"nodes": 32, "engine": "Megatron", "parallelism": {"tensor": 4, "expert": 64}}
    [problem] = pod_size.problems(make_training(LARGE | {"train": train, "rollout.tensorParallel": 8}))
    assert problem.path == "spec.train.parallelism.tensor"
    assert problem.message == "4 does not divide num_key_value_heads 2 of this model."
    assert problem.fix == "Use 2, or a model with other sizes."


def test_with_the_profiles_sizes_nothing_is_refused(make_training):
    training = make_training(LARGE | {"train": {"nodes": 2}, "pods.sizing": "Profile"})
    assert pod_size.problems(training) == []
    assert pod_size.size_of(training, "train").memory_gib == 8 * NVIDIA.per_device.memory_gib
    assert pod_size.note(training) == ""


def test_an_unknown_model_keeps_the_profiles_sizes_and_a_note_says_so(make_training):
    training = make_training(LARGE | {"model": {"name": "my/own", "source": {"path": "/models/own"}}})
    assert pod_size.size_of(training, "train").memory_gib == 8 * NVIDIA.per_device.memory_gib
    assert pod_size.problems(training) == []
    assert "model.name my/own is not in the catalog" in pod_size.note(training)
    assert pod_size.note(make_training(LARGE)) == ""


def test_resources_of_the_user_go_before_the_plan(make_training):
    limits = {"requests": {"memory": "300Gi"}, "limits": {"memory": "300Gi"}}
    change = {"spec": {"containers": [{"name": "ray", "resources": limits}]}}
    training = make_training(LARGE | {"train": {"nodes": 16}, "pods.train": change})
    pod = pod_templates.template(training, "trainer:1", "train", 1)
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == "300Gi"


def test_a_spec_is_planned_once(make_training, monkeypatch):
    planned = []
    plan = pod_size.memory_plan
    monkeypatch.setattr(pod_size, "memory_plan", lambda *arguments: planned.append(1) or plan(*arguments))
    training = make_training(LARGE)
    for _ in range(3):
        pod_size.problems(training)
        pod_size.size_of(training, "train")
    assert len(planned) == 1


def test_sizes_do_not_enter_the_hash_that_ends_a_running_attempt(make_training):
    assert spec_hash(make_training(LARGE)) == spec_hash(make_training(LARGE | {"pods.sizing": "Planned"}))
    assert spec_hash(make_training(LARGE)) != spec_hash(make_training(LARGE | {"pods.sizing": "Profile"}))


def test_every_valid_manifest_can_be_planned():
    """Whatever users may write: a plan that raised an exception would stop the reconciliation of its training."""
    specs = []
    for manifest in (manifest for kind in load().values() for manifest in kind):
        spec, problems = parse_spec(deepcopy(manifest["spec"]), new=False)
        specs += [] if spec is None or problems else [spec]
    assert len(specs) > 20
    for spec in specs:
        training = TrainingResource("demo", "rl", "1" * 36, 1, spec)
        for pool in ("head", "rollout", "train"):
            assert pod_size.size_of(training, pool).memory_gib > 0
        pod_size.problems(training)
