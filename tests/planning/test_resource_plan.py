"""What `qwen35 plan --resources` says about published sizes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qwen35_trainer.catalog.devices import DEVICES
from qwen35_trainer.catalog.links import LINKS
from qwen35_trainer.catalog.models import MODELS
from qwen35_trainer.commands import app
from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.planning import (
    fsdp_memory,
    host_memory,
    megatron_memory,
    memory_plan,
    rollout_memory,
    train_memory,
)
from qwen35_trainer.planning.generation_time import generation_time
from qwen35_trainer.planning.known_sizes import known_sizes
from qwen35_trainer.planning.measured_run import MeasuredRun
from qwen35_trainer.planning.publication_time import publication_time
from qwen35_trainer.planning.train_time import train_time
from qwen35_trainer.progress.records import UpdateRecord, to_line
from tests.manifest.conftest import SMALL

GIB = 2**30
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
LARGE = {
    "mode": "SFT",
    "model": {"name": "Qwen/Qwen3.5-27B", "source": {"path": "none"}},
    "data": {
        "train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}],
        "maxPromptTokens": 1024,
        "maxResponseTokens": 1024,
    },
}


def spec_of(**sections):
    spec, problems = parse_spec(LARGE | sections)
    assert spec is not None, problems
    return spec


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def manifest(tmp_path):
    def write(**sections):
        file = tmp_path / "training.yaml"
        file.write_text(yaml.safe_dump(SMALL | {"spec": LARGE | sections}))
        return file

    return write


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        ("35b-a3b-grpo-megatron", "H100"),
        ("35b-a3b-grpo-megatron-ascend", "Ascend-910C"),
        ("122b-a10b-grpo-megatron", "H20"),
        ("122b-a10b-grpo-megatron-ascend", "Ascend-910C"),
        ("122b-a10b-grpo-megatron-32k-ascend", "Ascend-910C"),
        ("397b-a17b-grpo-megatron", "H200"),
        ("397b-a17b-grpo-megatron-ascend", "Ascend-910C"),
        ("397b-a17b-sft-megatron", "H100"),
        ("235b-a22b-grpo-megatron-async-ascend", "Ascend-910C"),
    ],
)
def test_recipes_with_megatron_fit_their_devices(recipe, device):
    [file] = [file for file in EXAMPLES if file.stem.endswith(f"-{recipe}")]
    pictures = ["--pictures"] if "35b-a3b" in recipe else []  # geo3k
    result = run(file, "--resources", "--device", device, *pictures)
    assert result.exit_code == 0
    assert "Everything fits." in result.output


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_gets_a_plan(file):
    result = run(file, "--resources", "--json")
    assert result.exit_code in (0, 3), result.output
    plan = json.loads(result.stdout)["resources"]
    assert plan["train"]["total"] == pytest.approx(sum(plan["train"]["parts"].values()))
    assert (result.exit_code == 3) == bool(plan["misfits"])
    assert (plan["time"] is None) == (plan["device"] is None)


def test_state_of_zero_3_is_sixteen_bytes_for_each_parameter_over_the_ranks():
    """arXiv:1910.02054, table 1, with float32 gradients: 4 + 4 + 8; the tower is frozen, in two bytes."""
    spec = spec_of(train={"nodes": 8})
    planned = fsdp_memory.rank_memory(MODELS["Qwen/Qwen3.5-27B"], spec, "Fused", pictures=False)
    assert planned.state == pytest.approx(12 * 26.9e9 / 64, rel=0.02)


def test_offloaded_inputs_of_layers_are_in_host_memory_and_gathered_layers_on_the_device():
    """27B has 64 layers of 5,120 channels; a micro-batch has 16 × 2,047 positions, in bfloat16."""
    shape = MODELS["Qwen/Qwen3.5-27B"]

    def memory(**train):
        batch = {"microBatchSequences": 16, "promptsPerUpdate": 512}
        spec = spec_of(train={"nodes": 4, "activationCheckpointing": True, "batch": batch} | train)
        return fsdp_memory.rank_memory(shape, spec, "Fused", pictures=False)

    recomputed, offloading, gathered = (
        memory(),
        memory(offload={"activations": True}),
        memory(reshardAfterForward=False),
    )
    each = 16 * 2047 * 5120 * 2
    assert recomputed.device.activations - offloading.device.activations == pytest.approx(63 * each)
    assert each < 512 * 2**20, "the pinned block of an input: PyTorch rounds up to a power of two"
    assert offloading.host - recomputed.host == 64 * 512 * 2**20
    assert gathered.device.gathered > 2 * 26.9e9 > 4 * recomputed.device.gathered


def test_offloaded_parameters_and_gradients_are_in_pinned_blocks_of_powers_of_two():
    """27B on 16 ranks: an MLP's matrix has 17,408 × 5,120 numbers, 22 MB of each rank in float32, in a block of 32 MiB."""
    shape = MODELS["Qwen/Qwen3.5-27B"]

    def host(**sections):
        train = {"nodes": 2, "offload": {"parameters": True, "gradients": True, "optimizer": True}}
        spec = spec_of(train=train, **sections)
        return fsdp_memory.rank_memory(shape, spec, "Torch", pictures=False).host

    assert 4 * 17_408 * 5120 / 16 < 2**25 < 1.6 * 4 * 17_408 * 5120 / 16
    exact = host(accelerator={"profile": "CPU", "devicesPerNode": 8})
    assert exact == pytest.approx(16 * 26.9e9 / 16, rel=0.02)
    # The moments of the optimizer are not pinned.
    assert host() - exact == pytest.approx(0.43 * 8 * 26.9e9 / 16, rel=0.05)


def test_a_bucket_counts_only_where_the_transport_has_buckets():
    """27B in bfloat16 over 32 ranks: 1.6 GiB for each, so that a bucket of 6 GiB is never full."""
    shape = MODELS["Qwen/Qwen3.5-27B"]

    def pods(transport, mebibytes):
        publication = {"transport": transport, "folder": "/shared", "bucketMebibytes": mebibytes}
        spec = spec_of(
            mode="FullyAsync", rewards=[{"type": "Math"}], rollout={}, train={"nodes": 4}, publication=publication
        )
        return host_memory.train_pod(shape, spec, 0.0), host_memory.rollout_pod(shape, spec, 0.0)

    replicas, default = 8, 256 * 2**20
    shard = host_memory.version_bytes(shape, spec_of()) / 32
    for transport in ("Auto", "ObjectStore", "Folder", "RDMA", "SharedMemory"):
        (train, rollout), (large_train, large_rollout) = pods(transport, 256), pods(transport, 6144)
        has_buckets, in_store = transport in ("Auto", "ObjectStore", "Folder"), transport in ("Auto", "ObjectStore")
        more = has_buckets * (shard - default)
        assert large_train.staging - train.staging == pytest.approx(8 * more)
        assert large_train.shared == train.shared
        assert large_rollout.shared - rollout.shared == pytest.approx(in_store * replicas * more)
        assert large_rollout.staging - rollout.staging == pytest.approx((not in_store) * replicas * more)


def test_changes_keep_the_version_before_in_trainer_and_replicas_and_a_late_reader_of_rdma_a_third_one():
    """27B in bfloat16 on 4 train nodes; 8 replicas in a pod."""
    shape = MODELS["Qwen/Qwen3.5-27B"]
    version = host_memory.version_bytes(shape, spec_of())

    def pods(**publication):
        spec = spec_of(
            mode="FullyAsync",
            rewards=[{"type": "Math"}],
            rollout={},
            train={"nodes": 4},
            publication={"folder": "/shared", **publication},
        )
        return host_memory.train_pod(shape, spec, 0.0), host_memory.rollout_pod(shape, spec, 0.0)

    for transport in ("ObjectStore", "Folder"):
        (train, rollout), (train_of_changes, rollout_of_changes) = (
            pods(transport=transport),
            pods(transport=transport, wholeEvery=6),
        )
        assert rollout_of_changes.staging - rollout.staging == pytest.approx(8 * version)
        assert train_of_changes.staging - train.staging == pytest.approx(version / 4)
        in_store = transport == "ObjectStore"
        assert train_of_changes.shared - train.shared == pytest.approx(in_store * 0.5 * version / 4)
    train, rollout = pods(transport="RDMA")
    assert (train.staging, rollout.staging) == pytest.approx((3 * version / 4, 2 * 8 * version))
    assert pods(transport="RDMA", wholeEvery=6)[1].staging == rollout.staging


def test_sleeping_replicas_of_vllm_with_adapters_keep_their_base_weights_in_the_host():
    """27B on 8 H100, each with a replica: 8 × 54.7 GB while the ranks train, with the vision tower."""

    def tensors(engine, **train):
        spec = spec_of(
            mode="Colocated",
            rewards=[{"type": "Math"}],
            rollout={"engine": engine},
            train={"offload": {"parameters": True}} | train,
        )
        [pod] = memory_plan.memory_plan(MODELS["Qwen/Qwen3.5-27B"], spec, "H100").pods
        return pod.tensors

    assert tensors("VLLM") == tensors("Torch")
    adapters = {"lora": {"rank": 8}}
    assert tensors("VLLM", **adapters) - tensors("Torch", **adapters) == pytest.approx(8 * 54.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("model", "of_token"),
    [
        pytest.param("Qwen/Qwen3.5-35B-A3B", 40 * 8, id="35B: 40 layers, 8 of 256 experts"),
        pytest.param("Qwen/Qwen3.5-397B-A17B", 60 * 10 * 2, id="397B: 60 layers, 10 of 512 experts, in two bytes"),
    ],
)
def test_replayed_experts_take_room_in_the_object_stores_of_both_pools(model, of_token):
    """The train pods hold those of a batch, and the rollout pods those of all sequences that are under way."""

    def pods(*, replay: bool):
        spec = spec_of(
            mode="FullyAsync",
            rewards=[{"type": "Math"}],
            rollout={"nodes": 2},
            train={"nodes": 4, "router": {"replay": replay}},
            algorithm={"groupSize": 4},
            data={
                "train": [{"name": "t", "files": {"paths": ["t"]}}],
                "maxPromptTokens": 1000,
                "maxResponseTokens": 9000,
            },
            **{"async": {"stalenessThreshold": 0.5}},
        )
        return host_memory.train_pod(MODELS[model], spec, 0.0), host_memory.rollout_pod(MODELS[model], spec, 0.0)

    (train, rollout), (plain_train, plain_rollout) = pods(replay=True), pods(replay=False)
    batch = 32 * 4 * 10_000 * of_token
    assert train.shared - plain_train.shared == pytest.approx(batch / 4)
    assert rollout.shared - plain_rollout.shared == pytest.approx(2.5 * batch / 2)
    assert (train.tensors, train.staging) == (plain_train.tensors, plain_train.staging)
    assert rollout.tensors - plain_rollout.tensors == pytest.approx(8 * 256 * 10_000 * of_token)


def test_each_node_has_the_replayed_experts_of_the_whole_share_that_its_ranks_compute():
    """64 ranks of a share are 8 nodes, and there are 2 shares."""

    def shared(*, replay: bool):
        spec = spec_of(
            mode="FullyAsync",
            rewards=[{"type": "Math"}],
            rollout={"nodes": 2, "engine": "VLLM"},
            train={
                "engine": "Megatron",
                "nodes": 16,
                "router": {"replay": replay},
                "parallelism": {"tensor": 8, "pipeline": 8},
            },
        )
        return host_memory.train_pod(MODELS["Qwen/Qwen3.5-35B-A3B"], spec, 0.0).shared

    assert shared(replay=True) - shared(replay=False) == pytest.approx(32 * 8 * 2048 * 40 * 8 / 2)


@pytest.mark.parametrize(("offloads", "code"), [("true", 0), ("false", 3)])
def test_the_recipe_for_122b_fits_its_devices_because_it_offloads_the_optimizer(offloads, code):
    [file] = [file for file in EXAMPLES if file.stem == "qwen3.5-122b-a10b-grpo-megatron"]
    settings = ("--set", f"train.offload.optimizer={offloads}", "--device", "H20")
    assert run(file, "--resources", *settings).exit_code == code


@pytest.mark.parametrize(("offloads", "code"), [("true", 0), ("false", 3)])
def test_the_recipe_for_235b_can_start_because_its_reference_model_leaves_the_device_first(offloads, code):
    """At the start megatron-core has the parameters twice, next to gradients in float32."""
    [file] = [file for file in EXAMPLES if file.stem.startswith("qwen3-235b-a22b-grpo-megatron")]
    settings = ("--set", f"train.offload.parameters={offloads}", "--device", "Ascend-910C")
    result = run(file, "--resources", *settings)
    assert result.exit_code == code
    assert "at its peak, start" in result.output


def test_virtual_stages_shorten_the_bubble_and_hold_more_activations():
    shape = replace(MODELS["Qwen/Qwen3.5-27B"], vision=None)
    times, activations = [], []
    for virtual in (1, 2):
        degrees = {"tensor": 2, "pipeline": 4, "virtualPipeline": virtual}
        spec = spec_of(train={"engine": "Megatron", "nodes": 1, "parallelism": degrees})
        times.append(train_time(shape, spec, DEVICES["H100"], 1000.0).bubble)
        activations.append(megatron_memory.rank_memory(shape, spec, "Fused").device.activations)
    assert times == pytest.approx([3 / 35, 3 / 67])  # (P - 1) / (v m + P - 1), with 32 micro-batches
    assert activations[0] < activations[1] < 1.4 * activations[0]


def test_megatron_has_six_bytes_and_twelve_over_the_copies_for_each_parameter():
    """megatron-core's documentation of the distributed optimizer: bf16 parameters, fp32 gradients: 6 + 12 / d."""
    degrees = {"tensor": 4, "pipeline": 2}
    spec = spec_of(train={"engine": "Megatron", "nodes": 8, "parallelism": degrees})
    planned = megatron_memory.rank_memory(replace(MODELS["Qwen/Qwen3.5-27B"], vision=None), spec, "Fused")
    assert planned.state == pytest.approx((6 + 12 / 8) * 26.9e9 / 8, rel=0.05)


def test_a_sleeping_rank_of_megatron_has_the_same_bytes_in_host_memory_whatever_it_offloads():
    """Its models and its optimizer state: it drops gradients, and the pinned memory of the trained model is used again."""
    [file] = [file for file in EXAMPLES if file.stem == "qwen3.5-35b-a3b-grpo-megatron"]
    recipe = yaml.safe_load(file.read_text())["spec"]
    asleep = []
    for parameters, optimizer in ((False, False), (False, True), (True, False), (True, True)):
        offload = {"parameters": parameters, "gradients": True, "optimizer": optimizer}
        spec, _ = parse_spec(recipe | {"train": recipe["train"] | {"offload": offload}})
        rank = megatron_memory.rank_memory(MODELS["Qwen/Qwen3.5-35B-A3B"], spec, "Fused")
        asleep.append(rank.host + rank.parked)
    assert asleep == pytest.approx([asleep[0]] * 4)


def moments_of_397b(**train):
    """The moments that the plan of the recipe for 397B compares, on the last pipeline stage."""
    [file] = [file for file in EXAMPLES if file.stem == "qwen3.5-397b-a17b-grpo-megatron"]
    recipe = yaml.safe_load(file.read_text())["spec"]
    spec, _ = parse_spec(recipe | {"train": recipe["train"] | train})
    compared = []

    def kept(moments):
        compared.append(moments)
        return train_memory.largest(moments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(megatron_memory, "largest", kept)
        megatron_memory.rank_memory(MODELS["Qwen/Qwen3.5-397B-A17B"], spec, "Fused")
    return compared[-1]


def test_the_head_of_megatron_holds_a_float32_gradient_of_the_rank_s_table():
    """A table of 248,320 × 4,096 numbers on two ranks; the sum over chunks is in float32, whether logits are or not."""
    heads = [
        moments_of_397b(headPrecision=precision)["backward pass of the head"].head for precision in ("BF16", "FP32")
    ]
    assert heads == pytest.approx([8 * 2**27 + 4 * 248_320 // 2 * 4096] * 2, rel=0.01)


def test_a_checkpoint_and_a_publication_gather_whole_tables_of_tokens():
    """397B: on two tensor ranks, the parts of both and the whole table, and in a checkpoint the own part."""
    table = 248_320 * 4096
    for tensor, tables in ((1, 1), (2, 2)):
        moments = moments_of_397b(parallelism={"tensor": tensor, "expert": 64})
        published, checkpoint = moments["publication"], moments["checkpoint"]
        assert checkpoint.published == pytest.approx(4 * (tables + 1 / tensor) * table)
        assert checkpoint.gradients == 0
        assert 0 < published.published - 2 * tables * table < published.parameters, "and what the rank publishes"


def test_a_train_pod_has_room_for_what_a_save_with_megatron_gathers():
    """397B on 8 expert ranks: 64 of the 512 experts of a layer, and one of the two tables on each of the first and the last stage, in float32."""
    [file] = [file for file in EXAMPLES if file.stem == "qwen3.5-397b-a17b-sft-megatron"]
    recipe = yaml.safe_load(file.read_text())["spec"]
    shape = MODELS["Qwen/Qwen3.5-397B-A17B"]
    spec, _ = parse_spec(recipe | {"train": recipe["train"] | {"parallelism": {"pipeline": 2, "expert": 8}}})
    fsdp = spec_of(train={"nodes": 4})
    experts, table = 4 * 64 * 2 * 1024 * 4096, 4 * 248_320 * 4096
    needed = 8 * experts + 2 * (table - experts)
    assert host_memory.train_pod(shape, spec, 0.0).tensors == pytest.approx(needed)
    assert host_memory.train_pod(MODELS["Qwen/Qwen3.5-27B"], fsdp, 0.0).tensors == 0


def test_expert_ranks_divide_experts_alone():
    shape = MODELS["Qwen/Qwen3.5-35B-A3B"]
    sizes = {}
    for expert in (1, 8):
        train = {"engine": "Megatron", "nodes": 1, "parallelism": {"expert": expert}}
        sizes[expert] = megatron_memory.rank_memory(shape, spec_of(train=train), "Fused").device.parameters
    experts = 2 * 3 * 2048 * 512 * 256 * 40
    assert sizes[1] - sizes[8] == pytest.approx(experts * 7 / 8)


def test_ranks_that_divide_an_expert_have_the_routed_tokens_of_all_of_them():
    """35B: 8 experts for each token in each of 40 layers; 2,047 positions of 2,048 channels."""
    activations = []
    for parallelism in ({"expert": 8}, {"expert": 4, "expertTensor": 2}):
        train = {"engine": "Megatron", "nodes": 1, "parallelism": parallelism}
        planned = megatron_memory.rank_memory(MODELS["Qwen/Qwen3.5-35B-A3B"], spec_of(train=train), "Fused")
        activations.append(planned.device.activations)
    assert activations[1] - activations[0] == pytest.approx(40 * 2047 * 8 * (2 * 2 * 2048 + 28))


def test_keys_and_values_of_a_token_are_those_of_the_layers_with_attention():
    """27B: 16 of 64 layers, 4 heads of 256 channels, key and value in two bytes."""
    assert rollout_memory.cache_per_token(MODELS["Qwen/Qwen3.5-27B"], 1, 2) == 2 * 2 * 4 * 256 * 16
    assert rollout_memory.cache_per_token(MODELS["Qwen/Qwen3.5-27B"], 8, 2) == 2 * 2 * 1 * 256 * 16


def test_slots_need_a_block_each_before_vllm_records_graphs():
    """27B on one device: a page of 64 KiB of keys and values per 16 tokens holds a state of 3.2 MB, and a block has 16 pages."""
    shape = MODELS["Qwen/Qwen3.5-27B"]
    [file] = [file for file in EXAMPLES if file.stem == "qwen3.5-27b-grpo-fsdp"]
    recipe = yaml.safe_load(file.read_text())["spec"]
    rollout = recipe["rollout"] | {"tensorParallel": 1, "memoryFraction": 0.7}
    state = 4 * 48 * 128 * 128 + 2 * (2 * 16 + 48) * 128 * 3
    block = 16 * -(-state // 2**16) * 2**16

    def misfits(slots, *, eager=False):
        options = rollout["vllm"] | {"eager": eager}
        spec, problems = parse_spec(recipe | {"rollout": rollout | {"maxSequencesPerReplica": slots, "vllm": options}})
        assert spec is not None, problems
        plan = memory_plan.memory_plan(shape, spec, "H100")
        return plan.replica, [*memory_plan.device_misfits(plan, spec)]

    replica, [problem] = misfits(256)
    assert replica.graph_block == pytest.approx(block)
    room = int((replica.for_sequences - rollout_memory.GRAPH_BYTES) // block)
    assert 1 < room < 256
    assert problem.path == "spec.rollout.maxSequencesPerReplica"
    assert problem.fix.startswith(f"Lower it to at most {room}, or set rollout.vllm.eager to true")
    assert misfits(room)[1] == misfits(256, eager=True)[1] == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_pods_have_enough_memory_for_pictures_and_devices_are_judged_by_what_the_data_contain(file):
    """The operator, which requests the pods' memory, does not know the data."""
    spec, problems = parse_spec(yaml.safe_load(file.read_text())["spec"])
    assert spec is not None, problems
    if (shape := known_sizes(spec.model)) is None:
        pytest.skip("the catalog lacks the model")
    text, pictures = (memory_plan.memory_plan(shape, spec, "H100", pictures=with_any) for with_any in (False, True))
    assert text.pods == pictures.pods
    assert text.train.device.total <= pictures.train.device.total


def test_what_does_not_fit_is_named_with_a_fix_and_exit_code_3(manifest):
    result = run(manifest(train={"nodes": 1}), "--resources")
    assert result.exit_code == 3
    assert "Does not fit:" in result.stdout
    assert "spec.train: with 1 node × 8 devices, a rank needs" in result.stdout
    assert "train.activationCheckpointing" in result.stdout


def test_more_nodes_let_it_fit(manifest):
    result = run(manifest(train={"nodes": 4, "activationCheckpointing": True}), "--resources")
    assert result.exit_code == 0, result.stdout
    assert "Everything fits." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "H10"), "--device H10: is not in the catalog. Did you mean"),
        (("--device", "Ascend-910B"), "the manifest's accelerator.profile is NVIDIA"),
        (("--mean", 5000), "--mean 5000: is not between 1 and data.maxResponseTokens 1024"),
        (("--from", "nowhere"), "--from nowhere:"),
        (("--set", "model.name=Qwen/Qwen9"), "spec.model.name: Qwen/Qwen9 is not in the catalog"),
        (("--set", "train.nodes=0"), "spec.train.nodes"),
    ],
)
def test_bad_input_is_refused_by_name(manifest, arguments, text):
    result = run(manifest(), "--resources", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


def test_a_folder_s_config_json_goes_before_the_catalog(manifest, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "vocab_size": 100, "intermediate_size": 128}
    text |= {f"linear_num_{kind}_heads": 4 for kind in ("key", "value")}
    text |= {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")} | {"linear_conv_kernel_dim": 4}
    (folder / "config.json").write_text(json.dumps({"text_config": text, "tie_word_embeddings": False}))
    file = manifest(model={"name": "Qwen/Qwen3.5-27B", "source": {"path": "model"}})
    assert json.loads(run(file, "--resources", "--json").stdout)["resources"]["parameters"] < 1e6
    del text["head_dim"], text["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    refused = run(file, "--resources")
    assert refused.exit_code == 2
    assert "num_hidden_layers" in refused.stderr


def test_times_come_from_the_records_of_a_run(manifest, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(manifest(train={"nodes": 2}).read_text())
    zeros = {"updates_total": 2, "version": 0, "time": 0.0, "loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0}
    records = [
        UpdateRecord(update=number, prompts=32, samples=32, tokens=8_000, seconds=30.0, seconds_training=20.0, **zeros)
        for number in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{to_line(record)}\n" for record in records))
    file = manifest(train={"nodes": 4, "activationCheckpointing": True})
    time = json.loads(run(file, "--resources", "--json", "--from", folder, "--mean", 500).stdout)["resources"]["time"]
    # 20 s · 16 devices / 8,000 tokens, for 32 examples of 500 tokens on 32 devices
    assert time["update"] == pytest.approx(20 * 16 / 8_000 * 32 * 500 / 32)
    assert time["measured"]
    refused = run(file, "--resources", "--from", folder, "--set", "model.name=Qwen/Qwen3.5-9B")
    assert refused.exit_code == 2
    assert "its model.name is Qwen/Qwen3.5-27B" in refused.stderr


def test_a_measured_pool_is_as_fast_as_while_it_generates_and_another_mode_is_noted(manifest, tmp_path):
    """A Colocated run: 20 s of generation and 30 s of training take turns, and a second update of a batch repeats its numbers."""
    folder = tmp_path / "run"
    folder.mkdir()
    colocated = {"mode": "Colocated", "rewards": [{"type": "ExactMatch"}], "train": {"nodes": 2}}
    colocated |= {"rollout": {"nodes": 2}}
    (folder / "run.yaml").write_text(manifest(**colocated).read_text())
    zeros = {"updates_total": 4, "version": 0, "time": 0.0, "loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0}
    zeros |= {"prompts": 32, "samples": 256, "tokens": 25_600, "response_tokens_mean": 100.0}
    records = [
        UpdateRecord(update=1, seconds=50.0, seconds_training=30.0, rollout_idle=0.6, tokens_per_second=512.0, **zeros),
        UpdateRecord(update=2, seconds=0.0, seconds_training=0.0, rollout_idle=0.6, tokens_per_second=512.0, **zeros),
        UpdateRecord(update=3, seconds=40.0, seconds_training=30.0, rollout_idle=0.5, tokens_per_second=640.0, **zeros),
        UpdateRecord(update=4, seconds=0.0, seconds_training=0.0, rollout_idle=0.5, tokens_per_second=640.0, **zeros),
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{to_line(record)}\n" for record in records))
    plans = [
        json.loads(run(manifest(**colocated | mode), "--resources", "--json", "--from", folder).stdout)["resources"]
        for mode in ({}, {"mode": "FullyAsync"})
    ]
    times = [plan["time"] for plan in plans]
    assert [time["training"] for time in times] == pytest.approx([15, 15])
    assert [time["generation"] for time in times] == pytest.approx(
        [20, 20]
    )  # 25,600 tokens at 51,200 in 40 busy seconds
    assert [time["bottleneck"] for time in times] == ["generation", "generation"]
    assert plans[0]["notes"] == []
    [note] = plans[1]["notes"]
    assert note.startswith("The times come from a run in mode Colocated, and the manifest's mode is FullyAsync.")


def test_a_run_without_updates_is_refused(manifest, tmp_path):
    (tmp_path / "run.yaml").write_text(manifest().read_text())
    (tmp_path / "metrics.jsonl").write_text("")
    refused = run(manifest(), "--resources", "--from", tmp_path)
    assert refused.exit_code == 2
    assert "no update of the run trained a token" in refused.stderr


def test_the_speed_of_a_measured_pool_scales_with_its_devices():
    rollout = {"mode": "FullyAsync", "rewards": [{"type": "ExactMatch"}], "rollout": {"nodes": 2}}
    measured = MeasuredRun(1, 0.01, 100.0, 50.0, 0.1, 1.0)
    two_nodes = measured.generation(spec_of(**rollout), 100.0)
    four_nodes = measured.generation(spec_of(**rollout | {"rollout": {"nodes": 4}}), 100.0)
    assert two_nodes is not None
    assert four_nodes is not None
    assert two_nodes.seconds == pytest.approx(2 * four_nodes.seconds)


def test_a_version_crosses_the_network_over_tcp_unless_the_transport_is_rdma():
    """27B in bfloat16, at 3 GB/s of a node: each receiver gets a version, and 4 train nodes send it to 8 others."""
    shape, device = MODELS["Qwen/Qwen3.5-27B"], DEVICES["H100"]
    version = host_memory.version_bytes(shape, spec_of())

    def publication(transport, *, nodes=8, **sections):
        pool = {
            "mode": "FullyAsync",
            "rewards": [{"type": "ExactMatch"}],
            "rollout": {"engine": "VLLM", "nodes": nodes},
        }
        spec = spec_of(**pool | {"train": {"nodes": 4}, "publication": {"transport": transport}} | sections)
        return publication_time(shape, spec, device)

    for transport in ("Auto", "ObjectStore"):
        assert publication(transport).transfer == pytest.approx(2 * version / 3e9)
        assert publication(transport, nodes=2).transfer == pytest.approx(version / 3e9)
        assert publication(transport).copy == pytest.approx(version / 32 / 3.5e9)
        assert publication(transport, nodes=4, mode="Colocated").transfer == pytest.approx(0.75 * version / 3e9)
        alone = publication(transport, nodes=1, mode="Colocated", train={"nodes": 1})
        assert alone.transfer == 0
    assert publication("RDMA").transfer < 3
    assert publication("RDMA").copy < 0.04


@pytest.mark.parametrize("engine", ["FSDP", "Megatron"])
def test_a_plan_says_that_times_do_not_contain_what_offloaded_parameters_of_fsdp_cost(manifest, engine):
    train = {"engine": engine, "nodes": 4, "offload": {"parameters": True}}
    noted = json.loads(run(manifest(train=train), "--resources", "--json").stdout)["resources"]["notes"]
    assert len(noted) == (engine == "FSDP")
    shown = " ".join(run(manifest(train=train), "--resources").output.split())
    assert ("neither the transfers of offloaded parameters and gradients" in shown) == (engine == "FSDP")


def test_without_a_prefix_cache_each_response_computes_its_prompt():
    shape, device = MODELS["Qwen/Qwen3.5-27B"], DEVICES["H100"]

    def prefill(**rollout):
        pool = {"mode": "FullyAsync", "rewards": [{"type": "ExactMatch"}], "algorithm": {"groupSize": 16}}
        return generation_time(shape, spec_of(**pool, rollout=rollout), device, 512.0, fitting=256).prefill

    shared = prefill(engine="VLLM", tensorParallel=1)
    assert prefill(engine="VLLM", vllm={"prefixCache": False}) == pytest.approx(16 * shared)
    assert prefill(engine="Torch") == pytest.approx(shared)


def test_every_fact_of_the_catalog_names_its_source():
    assert all(each.source for each in (*DEVICES.values(), *LINKS.values()))
    assert all({each.within_node, each.between_nodes, each.to_host} <= LINKS.keys() for each in DEVICES.values())
