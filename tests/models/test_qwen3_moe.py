"""Mixtures of experts of Qwen3: what is computed from a folder of published form, against the library's model of the same folder."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles, CheckpointUnusable
from qwen35_trainer.models.qwen3_5.decoder import Decoder
from qwen35_trainer.models.qwen3_5.forward import logits
from qwen35_trainer.models.qwen3_5.hub_folder import write_hub_folder
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.linear_layers import linear_layers
from qwen35_trainer.models.qwen3_5.packing import check_packing
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts
from qwen35_trainer.planning import parameters
from tests.distributed.distance import distance
from tests.models import kernels_stand_in, qwen3_moe, test_shared_prompts
from tests.models.published import tensors_of
from tests.models.qwen3_moe import ABSENT
from tests.models.rounding import allowed, in_float64
from tests.models.test_forward import GRADIENTS, gradients, reference, rows_of, scored
from tests.models.test_linear_layers import of_modules
from tests.models.test_shared_prompts import LEADERS, LENGTHS, PROMPTS, compare

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The parent of a folder `model`, with experts one by one, and the library's model of it."""
    parent = tmp_path_factory.mktemp("qwen3")
    return parent, qwen3_moe.write(parent / "model")


def built(parent: Path, precision: str = "FP32") -> Any:
    spec = ModelSpec.model_validate({"name": "tiny", "precision": precision, "source": {"path": "model"}})
    dtype = {"FP32": torch.float32, "BF16": torch.bfloat16}[precision]
    return build(ModelSettings(spec, seed=0, vocabulary=23, max_length=128, base=parent, precision=dtype))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_scores_and_gradients_are_those_of_the_library(written, tokens, packed) -> None:
    parent, library = written
    model, lengths = built(parent), [5, 1, 70, 30]
    sequences, targets = [tokens(n, seed=n) for n in lengths], tokens(sum(lengths), seed=9)
    expected, expected_entropy = scored(reference(library, sequences), targets)
    inputs = ModelInput.of_text(sequences, packed=packed, device="cpu")
    scores = model(inputs, rows_of(lengths, packed=packed), targets, 0.7, with_entropy=True)
    assert scores.entropy is not None
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropy, expected_entropy, atol=1e-4, rtol=1e-4)
    ours, theirs = gradients(model, scores.log_probs, scores.entropy), gradients(library, expected, expected_entropy)
    precise = in_float64(library)
    exact = gradients(precise, *scored(reference(precise, sequences), targets))
    assert distance(ours, theirs, allowed(theirs, exact, GRADIENTS)) <= GRADIENTS


@pytest.mark.parametrize("with_kernels", [False, True], ids=["split", "kernels"])
def test_shared_prompts_have_the_librarys_scores_and_gradients(written, tokens, monkeypatch, with_kernels) -> None:
    if with_kernels:
        kernels_stand_in.install(monkeypatch)
    parent, library = written
    sequences, inputs = of_shared_prompts(tokens)
    library.zero_grad()
    expected = test_shared_prompts.log_probs_of(library, sequences, [None] * len(sequences))
    targets = torch.cat(sequences)[test_shared_prompts.rows_of_packed()[1]]
    test_shared_prompts.agree(built(parent), library, inputs, expected, targets)


def of_shared_prompts(tokens: Any) -> tuple[list[Tensor], ModelInput]:
    sequences = test_shared_prompts.sequences_of([tokens(n, seed=n) for n in PROMPTS], tokens)
    shared = SharedPrompts.of(PROMPTS, LENGTHS, LEADERS)
    return sequences, ModelInput.of_text(sequences, packed=True, device="cpu").sharing(shared)


@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared prompts"])
def test_losses_of_routers_are_the_librarys_of_each_sequence(written, tokens, shared) -> None:
    parent, library = written
    library, model, seen = copy.deepcopy(library), built(parent), []

    def keep(gate: Any, arguments: tuple[Tensor], _: object) -> None:
        # Not what the gate returns: in some versions of transformers this is their softmax.
        seen.append(F.linear(arguments[0].reshape(-1, gate.weight.shape[1]), gate.weight))

    for layer in library.model.layers:
        layer.mlp.gate.register_forward_hook(keep)
    sequences, inputs = of_shared_prompts(tokens)
    if not shared:
        inputs = ModelInput.of_text(sequences, packed=True, device="cpu")
    for sequence in sequences:
        library(input_ids=sequence[None], use_cache=False)
    assert len(seen) == len(library.model.layers) * len(sequences)
    balance = sum(len(routed) / 2 * load_balancing_loss_func((routed,), 4, 2) for routed in seen)
    z = sum(routed.logsumexp(-1).square().sum() for routed in seen)
    losses = model(inputs, torch.tensor([0]), torch.tensor([0]), lengths=torch.tensor(LENGTHS)).router_losses
    torch.testing.assert_close(losses, torch.stack((balance, z)), atol=1e-4, rtol=1e-5)
    (losses * torch.tensor([0.5, 0.1])).sum().backward()
    library.zero_grad()
    (0.5 * balance + 0.1 * z).backward()
    for (name, own), theirs in zip(model.named_parameters(), library.parameters(), strict=True):
        if theirs.grad is not None:
            compare(name, own.grad, theirs.grad)


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_the_check_at_load_accepts_it(written, precision) -> None:
    check_packing(built(written[0], precision), share_prompts=True)


def test_scores_in_bfloat16_are_nearer_to_exact_ones_than_the_librarys(written, tokens) -> None:
    parent, library = written
    sequences, targets = [tokens(40, seed=n) for n in range(6)], tokens(240, seed=9)
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu")
    with torch.no_grad():
        exact, theirs = (
            scored(reference(each, sequences).double(), targets)[0]
            for each in (in_float64(library), copy.deepcopy(library).bfloat16())
        )
        ours = built(parent, "BF16")(inputs, torch.arange(240), targets, 0.7).log_probs
    assert (ours - exact).square().mean() < (theirs - exact).square().mean()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="as published"),
        pytest.param({"rope_scaling": {"rope_type": "yarn"} | YARN}, id="yarn"),
        pytest.param({"rope_scaling": {"type": "yarn"} | YARN}, id="yarn by its old name"),
        pytest.param({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, id="linear"),
        pytest.param(
            {
                "rope_theta": ABSENT,
                "rope_scaling": ABSENT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            id="rope_parameters",
        ),
        pytest.param({"rope_theta": ABSENT}, id="no rope_theta"),
        pytest.param({"head_dim": ABSENT}, id="no head_dim"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"mlp_only_layers": None, "shared_expert_intermediate_size": 0, "qkv_bias": False}, id="Coder"),
    ],
)
def test_what_config_json_may_say_is_computed_as_the_library_does(tmp_path: Path, tokens, fields) -> None:
    """By the trainer and, token by token, by the Torch engine. The library reads the folder itself."""
    qwen3_moe.write(tmp_path / "model", **fields)
    library = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    model, sequences, prompts = built(tmp_path), [tokens(72, seed=seed) for seed in range(3)], [2, 9, 66]
    with torch.no_grad():
        expected = [library(input_ids=each[None], use_cache=False).logits[0] for each in sequences]
        ours = logits(model, ModelInput.of_text(sequences, packed=True, device="cpu"))[0]
    torch.testing.assert_close(ours, torch.cat(expected), atol=1e-4, rtol=1e-4)
    decoder = Decoder(model, slots=4, max_length=73)
    first = decoder.prefill([s[:n].tolist() for s, n in zip(sequences, prompts, strict=True)], [[0], [1], [2]])
    decoded = [
        first,
        *(decoder.step(torch.stack([s[n + i] for s, n in zip(sequences, prompts, strict=True)])) for i in range(6)),
    ]
    for step, rows in enumerate(decoded):
        at = torch.stack([each[n - 1 + step] for each, n in zip(expected, prompts, strict=True)])
        torch.testing.assert_close(rows, at, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert classes.read_config(tmp_path / "model").head_dim == model.model.layers[0].self_attn.head_dim
    counted = sum(each.numel() for each in model.parameters())
    assert parameters.text(ModelSizes.of_config(config)).total == counted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob False, not True"),
        ({"norm_topk_prob": ABSENT}, r"norm_topk_prob False \(the default of transformers\), not True"),
        ({"attention_bias": True}, "attention_bias True, not False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\], not \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2, not 1"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window True, not False"),
        ({"hidden_act": "gelu"}, "hidden_act gelu, not silu"),
        ({"num_experts": 0}, "num_experts 0, not at least 1"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types .*, not full_attention in every"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic, not default or linear"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type longrope, not "),
        ({"rope_scaling": "yarn"}, "rope_parameters yarn, not a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, not 1"),
    ],
    ids=str,
)
def test_what_would_be_another_model_is_refused_by_name(tmp_path: Path, fields, message) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_moe.contents(**fields)))
    with pytest.raises(CheckpointUnusable, match=rf"config\.json: {message}.* is not supported for qwen3_moe\."):
        CheckpointFiles.open(tmp_path)


def test_a_folder_that_the_library_saved_is_read_like_the_published_one(written, tmp_path: Path) -> None:
    """It names the number of experts otherwise."""
    parent, library = written
    library.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_local_experts"] == 4
    assert "num_experts" not in config
    assert ModelSizes.of_config(config) == ModelSizes.of_config(qwen3_moe.CONFIG)
    files = CheckpointFiles.open(tmp_path / "model")
    assert all(torch.equal(files.read(name), each) for name, each in library.named_parameters())
    assert linear_layers(config) == linear_layers(qwen3_moe.CONFIG) == of_modules(built(parent))


def test_the_library_loads_what_is_written_bit_for_bit(written, tmp_path: Path) -> None:
    parent, library = written
    trained = {name: (each.detach() * 1.25).bfloat16() for name, each in library.named_parameters()}
    source, output = parent / "model", tmp_path / "out"
    output.mkdir()
    write_hub_folder(CheckpointFiles.open(source), lambda name: lambda *part: trained[name][part], output)
    before, after = tensors_of(source), tensors_of(output)
    assert after.keys() == before.keys()
    assert "model.layers.3.mlp.experts.3.up_proj.weight" in after
    assert (output / "config.json").read_bytes() == (source / "config.json").read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name].float()), name


def test_an_adapted_model_decodes_as_the_library_s(tokens) -> None:
    """The engine's model is adapted; a decoder of one that is not computes the same."""
    model = qwen3_moe.model()
    prompt = tokens(9).tolist()
    plain, adapted = (Decoder(each, 1, 16).prefill([prompt], [[0]]) for each in (model, adapt(copy.deepcopy(model))))
    torch.testing.assert_close(adapted, plain, atol=1e-4, rtol=1e-4)
