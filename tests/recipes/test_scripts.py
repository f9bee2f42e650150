"""The tables of docs/recipes.md that compare verl's scripts key by key with the manifests."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen35_trainer.manifest import load_manifest

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"


@dataclass(frozen=True)
class Table:
    """A section of docs/recipes.md, which compares the keys of a script with manifests."""

    section: str
    keys: frozenset[str]
    """Every key that the script sets, without the prefix actor_rollout_ref."""
    manifests: tuple[Path, ...]
    compared: int = 50
    """Minimum number of values of each manifest that the table has."""
    columns: dict[str, str] = field(default_factory=dict)
    """Start of a manifest's name → heading of its column, in tables that have a column for each model."""

    def column(self, file: Path) -> str:
        [heading] = [heading for start, heading in self.columns.items() if file.stem.startswith(start)]
        return heading


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LARGE = Table(
    section="Key by key: 27B and 35B-A3B",
    keys=words(
        """
        algorithm.adv_estimator data.train_files data.val_files data.train_batch_size data.max_prompt_length data.max_response_length
        data.filter_overlong_prompts data.truncation data.image_key data.shuffle model.path model.use_remove_padding
        model.enable_gradient_checkpointing actor.optim.lr actor.ppo_mini_batch_size actor.ppo_micro_batch_size_per_gpu actor.use_kl_loss
        actor.entropy_coeff actor.kl_loss_coef actor.kl_loss_type actor.use_torch_compile actor.strategy ref.strategy
        actor.fsdp_config.fsdp_size actor.fsdp_config.reshard_after_forward ref.fsdp_config.reshard_after_forward
        actor.fsdp_config.entropy_checkpointing actor.entropy_from_logits_with_chunking actor.fsdp_config.offload_policy
        actor.use_dynamic_bsz actor.fsdp_config.ulysses_sequence_parallel_size actor.fsdp_config.param_offload
        actor.fsdp_config.optimizer_offload ref.log_prob_micro_batch_size_per_gpu ref.fsdp_config.param_offload
        ref.entropy_from_logits_with_chunking ref.fsdp_config.ulysses_sequence_parallel_size ref.use_torch_compile
        ref.fsdp_config.offload_policy rollout.name rollout.ignore_eos rollout.log_prob_micro_batch_size_per_gpu
        rollout.tensor_model_parallel_size rollout.gpu_memory_utilization rollout.n rollout.enable_chunked_prefill
        rollout.max_num_batched_tokens rollout.free_cache_engine rollout.enforce_eager rollout.enable_prefix_caching
        rollout.checkpoint_engine.update_weights_bucket_megabytes algorithm.use_kl_in_reward trainer.critic_warmup trainer.logger
        trainer.project_name trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes trainer.balance_batch trainer.resume_from_path
        trainer.val_before_train trainer.save_freq trainer.test_freq trainer.total_epochs
        """
    ),
    manifests=tuple(
        EXAMPLES / f"qwen3.5-{model}-grpo-fsdp{place}.yaml" for model in ("27b", "35b-a3b") for place in ("", "-ascend")
    ),
)
SMALL = Table(
    section="Key by key: 9B",
    keys=words(
        """
        algorithm.adv_estimator data.train_files data.val_files data.train_batch_size data.max_prompt_length data.max_response_length
        data.filter_overlong_prompts data.truncation model.path model.model_type model.use_remove_padding
        model.enable_gradient_checkpointing actor.optim.lr actor.ppo_mini_batch_size actor.ppo_micro_batch_size_per_gpu actor.use_kl_loss
        actor.kl_loss_coef actor.kl_loss_type actor.entropy_coeff actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload
        rollout.log_prob_micro_batch_size_per_gpu rollout.tensor_model_parallel_size rollout.name rollout.gpu_memory_utilization rollout.n
        ref.log_prob_micro_batch_size_per_gpu ref.fsdp_config.param_offload algorithm.use_kl_in_reward trainer.critic_warmup
        trainer.logger trainer.project_name trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes trainer.save_freq
        trainer.test_freq trainer.total_epochs
        """
    ),
    manifests=(EXAMPLES / "qwen3.5-9b-grpo-fsdp.yaml",),
)
MODELS = {
    "qwen3.5-35b-a3b-grpo-megatron": "35B-A3B",
    "qwen3.5-122b-a10b-grpo-megatron": "122B-A10B",
    "qwen3.5-397b-a17b-grpo-megatron": "397B-A17B",
}
LONG = "qwen3.5-122b-a10b-grpo-megatron-32k"
MEGATRON = Table(
    section="Key by key: GRPO with Megatron",
    keys=words(
        """
        algorithm.adv_estimator algorithm.use_kl_in_reward data.train_files data.val_files data.train_batch_size data.max_prompt_length
        data.max_response_length data.truncation data.filter_overlong_prompts data.filter_overlong_prompts_workers model.path
        model.trust_remote_code model.use_remove_padding model.enable_gradient_checkpointing model_engine actor.optim.lr
        actor.ppo_mini_batch_size actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz
        actor.use_kl_loss actor.kl_loss_coef actor.kl_loss_type actor.entropy_coeff actor.use_torch_compile
        actor.checkpoint.save_contents actor.checkpoint.strict megatron.use_mbridge megatron.vanilla_mbridge megatron.use_remove_padding
        megatron.tensor_model_parallel_size megatron.pipeline_model_parallel_size megatron.virtual_pipeline_model_parallel_size
        megatron.context_parallel_size megatron.expert_model_parallel_size megatron.expert_tensor_parallel_size megatron.param_offload
        megatron.optimizer_offload megatron.grad_offload megatron.dtype override_transformer_config.attention_backend
        override_transformer_config.recompute_method override_transformer_config.recompute_granularity
        override_transformer_config.recompute_num_layers override_transformer_config.moe_aux_loss_coeff
        override_transformer_config.moe_z_loss_coeff override_transformer_config.moe_router_load_balancing_type
        override_transformer_config.moe_permute_fusion override_transformer_config.moe_grouped_gemm
        override_transformer_config.apply_rope_fusion override_transformer_config.moe_router_dtype
        override_transformer_config.use_flash_attn override_transformer_config.moe_token_dispatcher_type
        override_transformer_config.use_naive_l2norm override_transformer_config.use_fused_rmsnorm
        override_transformer_config.use_fused_swiglu override_optimizer_config.optimizer_offload_fraction
        override_optimizer_config.overlap_cpu_optimizer_d2h_h2d override_optimizer_config.use_precision_aware_optimizer
        override_optimizer_config.optimizer_cpu_offload rollout.name rollout.tensor_model_parallel_size
        rollout.data_parallel_size rollout.expert_parallel_size rollout.gpu_memory_utilization rollout.n rollout.mode rollout.enforce_eager
        rollout.dtype rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_use_dynamic_bsz rollout.log_prob_max_token_len_per_gpu
        rollout.calculate_log_probs rollout.checkpoint_engine.update_weights_bucket_megabytes
        rollout.engine_kwargs.vllm.max_model_len rollout.engine_kwargs.vllm.compilation_config
        rollout.engine_kwargs.vllm.mm_processor_cache_gb ref.log_prob_micro_batch_size_per_gpu ref.log_prob_use_dynamic_bsz
        ref.log_prob_max_token_len_per_gpu ref.megatron.tensor_model_parallel_size ref.megatron.pipeline_model_parallel_size
        ref.megatron.context_parallel_size ref.megatron.expert_model_parallel_size ref.megatron.expert_tensor_parallel_size
        ref.megatron.param_offload nccl_timeout trainer.critic_warmup trainer.logger trainer.project_name trainer.experiment_name
        trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.val_before_train trainer.test_freq trainer.total_epochs
        trainer.default_local_dir
        """
    ),
    manifests=tuple(EXAMPLES / f"{start}{place}.yaml" for start in MODELS for place in ("", "-ascend")),
    columns=MODELS,
)
MEGATRON_LONG = Table(
    section=MEGATRON.section,
    keys=MEGATRON.keys,
    manifests=(EXAMPLES / f"{LONG}-ascend.yaml",),
    columns={LONG: "122B-A10B, 32k"},
)
SUPERVISED = Table(
    section="Key by key: SFT of 397B-A17B",
    keys=words(
        """
        data.train_files data.train_batch_size data.micro_batch_size_per_gpu data.max_length data.pad_mode data.truncation
        data.use_dynamic_bsz data.max_token_len_per_gpu data.messages_key model.path model.use_remove_padding model.trust_remote_code
        mtp.enable mtp.enable_train mtp.detach_encoder mtp.mtp_loss_scaling_factor engine optim optim.lr optim.min_lr
        optim.lr_warmup_steps optim.weight_decay optim.betas[0] optim.betas[1] optim.clip_grad optim.lr_warmup_init optim.lr_decay_style
        override_optimizer_config.optimizer_offload_fraction override_optimizer_config.overlap_cpu_optimizer_d2h_h2d
        override_optimizer_config.use_precision_aware_optimizer override_optimizer_config.optimizer_cpu_offload
        engine.tensor_model_parallel_size engine.pipeline_model_parallel_size engine.virtual_pipeline_model_parallel_size
        engine.context_parallel_size engine.expert_model_parallel_size engine.expert_tensor_parallel_size engine.use_mbridge
        engine.vanilla_mbridge engine.dtype engine.use_remove_padding override_transformer_config.attention_backend
        override_transformer_config.recompute_method override_transformer_config.recompute_granularity
        override_transformer_config.recompute_num_layers nnodes nproc_per_node trainer.test_freq trainer.save_freq trainer.logger
        trainer.project_name trainer.experiment_name trainer.total_epochs trainer.default_local_dir trainer.resume_mode
        """
    ),
    manifests=(EXAMPLES / "qwen3.5-397b-a17b-sft-megatron.yaml",),
    compared=36,
)
ASYNCHRONOUS = Table(
    section="Key by key: Qwen3-235B-A22B, fully asynchronous",
    keys=words(
        """
        algorithm.adv_estimator data.train_files data.val_files rollout.free_cache_engine data.train_batch_size data.max_prompt_length
        data.max_response_length data.filter_overlong_prompts data.truncation data.return_raw_chat model.path actor.optim.lr
        model.override_config.model_config.max_position_embeddings actor.ppo_mini_batch_size actor.ppo_micro_batch_size_per_gpu
        megatron.pipeline_model_parallel_size megatron.tensor_model_parallel_size megatron.expert_model_parallel_size
        ref.megatron.use_dist_checkpointing actor.use_kl_loss actor.kl_loss_coef rollout.enable_chunked_prefill
        rollout.enable_prefix_caching actor.kl_loss_type megatron.use_mbridge
        override_transformer_config.num_layers_in_first_pipeline_stage override_transformer_config.num_layers_in_last_pipeline_stage
        megatron.use_dist_checkpointing actor.entropy_coeff rollout.log_prob_micro_batch_size_per_gpu
        rollout.tensor_model_parallel_size rollout.data_parallel_size rollout.expert_parallel_size rollout.max_num_batched_tokens
        megatron.param_offload megatron.optimizer_offload megatron.grad_offload rollout.gpu_memory_utilization rollout.name rollout.n
        rollout.mode ref.log_prob_micro_batch_size_per_gpu ref.log_prob_max_token_len_per_gpu
        ref.megatron.pipeline_model_parallel_size ref.megatron.tensor_model_parallel_size ref.megatron.expert_model_parallel_size
        ref.megatron.param_offload algorithm.use_kl_in_reward trainer.critic_warmup trainer.logger trainer.project_name
        trainer.experiment_name trainer.nnodes trainer.n_gpus_per_node trainer.val_before_train trainer.test_freq trainer.save_freq
        trainer.device override_transformer_config.recompute_method override_transformer_config.recompute_granularity
        override_transformer_config.recompute_num_layers rollout.enforce_eager rollout.nnodes rollout.n_gpus_per_node
        rollout.total_rollout_steps trainer.total_epochs async_training.staleness_threshold async_training.trigger_parameter_sync_step
        async_training.require_batches async_training.partial_rollout actor.optim.lr_decay_style actor.optim.weight_decay
        actor.optim.lr_decay_steps hybrid_engine rollout.engine_kwargs.vllm.compilation_config
        """
    ),
    manifests=(EXAMPLES / "qwen3-235b-a22b-grpo-megatron-async-ascend.yaml",),
)
WITH_MEGATRON = (MEGATRON, MEGATRON_LONG, SUPERVISED, ASYNCHRONOUS)
ALL = (LARGE, SMALL, *WITH_MEGATRON)
TABLES = [
    pytest.param(table, id=table.section.removeprefix("Key by key: "))
    for table in (LARGE, SMALL, MEGATRON, SUPERVISED, ASYNCHRONOUS)
]
IN_WORDS = {"model.source", "tracking", "metadata.name", "checkpoint.storage", "train.multiTokenPrediction"}
"""Fields whose value the table describes."""
OWN_FIELDS = "Fields that no key sets"
"""The section of docs/recipes.md with the other fields of manifests that train with Megatron."""


def lines(section: str) -> list[dict[str, str]]:
    """The cells of each row of the tables of a section, by their headings."""
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    text = page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [] for line in text]
    rows, headings = [], []
    for number, row in enumerate(cells):
        if row and not cells[number - 1]:
            headings = row
        elif row and set(row[0]) != {"-"}:
            rows.append(dict(zip(headings, row, strict=True)))
    return rows


def keys_of(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def values_of(table: Table, file: Path) -> Iterator[tuple[str, str]]:
    """Each field that the table has for a manifest, and its value there as a text: the second one of `script → here`, and that of
    NPUs of `GPU / NPU`. Values in parentheses have no effect, and are not compared.
    """
    for row in lines(table.section):
        gpu, *npu = row["value, or why there is none" if "script" in row else table.column(file)].split(" / ")
        text = npu[0] if npu and file.stem.endswith("-ascend") else gpu
        if not text.startswith("("):
            yield from ((each, text.rpartition(" → ")[2]) for each in keys_of(row["here"]))


def value_at(document: Any, path: str) -> Any:
    for part in path.replace("[", ".").replace("]", "").split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def leaves(document: Any, place: str = "") -> Iterator[str]:
    """Paths of the values that a manifest sets."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from leaves(value, f"{place}.{key}" if place else key)
    elif isinstance(document, list) and document:
        for index, value in enumerate(document):
            yield from leaves(value, f"{place}[{index}]")
    else:
        yield place


def is_within(place: str, fields: set[str]) -> bool:
    return any(place == each or place.startswith((f"{each}.", f"{each}[")) for each in fields)


@pytest.mark.parametrize("table", TABLES)
def test_the_table_has_every_key_of_the_scripts_once(table: Table) -> None:
    keys = [key for row in lines(table.section) for key in keys_of(row["verl"])]
    assert len(keys) == len(set(keys))
    assert set(keys) >= table.keys


@pytest.mark.parametrize("table", TABLES)
def test_no_key_is_without_a_field_or_a_reason(table: Table) -> None:
    for row in lines(table.section):
        assert all(cell for heading, cell in row.items() if heading != "here"), row
        assert row["here"] or len(row["value, or why there is none"].split()) > 2, row


@pytest.mark.parametrize(
    ("table", "file"),
    [pytest.param(table, file, id=file.stem) for table in ALL for file in table.manifests],
)
def test_a_manifest_has_the_values_of_the_table(table: Table, file: Path) -> None:
    spec = load_manifest(file).spec.model_dump(mode="json", by_alias=True)
    expected = [(place, text) for place, text in values_of(table, file) if place not in IN_WORDS]
    for place, text in expected:
        assert value_at(spec, place) == yaml.safe_load(text), place
    assert len(expected) >= table.compared


def test_every_manifest_with_megatron_is_compared() -> None:
    compared = [file for table in WITH_MEGATRON for file in table.manifests]
    trained = [file for file in EXAMPLES.glob("*.yaml") if load_manifest(file).spec.train.engine == "Megatron"]
    assert sorted(compared) == sorted(trained)


@pytest.mark.parametrize(
    ("table", "file"),
    [pytest.param(table, file, id=file.stem) for table in WITH_MEGATRON for file in table.manifests],
)
def test_every_field_that_a_manifest_sets_has_a_row_or_a_reason(table: Table, file: Path) -> None:
    rows = {place for place, _ in values_of(table, file)}
    own = {place for row in lines(OWN_FIELDS) for place in keys_of(row["field"])}
    assert not [place for place in leaves(yaml.safe_load(file.read_text())["spec"]) if not is_within(place, rows | own)]


def test_every_field_without_a_key_is_set_and_has_a_reason() -> None:
    files = [file for table in WITH_MEGATRON for file in table.manifests]
    places = {place for file in files for place in leaves(yaml.safe_load(file.read_text())["spec"])}
    for row in lines(OWN_FIELDS):
        assert len(row["why it is there"].split()) > 2
        for each in keys_of(row["field"]):
            assert any(is_within(place, {each}) for place in places), each
