"""The tables of docs/recipes.md that compare verl's scripts for FSDP key by key with the manifests."""

import re
from dataclasses import dataclass
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
TABLES = [pytest.param(table, id=table.section.removeprefix("Key by key: ")) for table in (LARGE, SMALL)]
IN_WORDS = {"model.source", "tracking", "metadata.name"}
"""Fields whose value the table describes."""


def rows(table: Table) -> list[list[str]]:
    """The cells of each row of the table."""
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    section = page.split(f"\n## {table.section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def keys_of(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def value_at(document: Any, path: str) -> Any:
    for part in path.replace("[", ".").replace("]", "").split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


@pytest.mark.parametrize("table", TABLES)
def test_the_table_has_every_key_of_the_scripts_once(table: Table) -> None:
    keys = [key for row in rows(table) for key in keys_of(row[0])]
    assert len(keys) == len(set(keys))
    assert set(keys) >= table.keys


@pytest.mark.parametrize("table", TABLES)
def test_no_key_is_without_a_field_or_a_reason(table: Table) -> None:
    for verl, script, here, value in rows(table):
        assert script, verl
        assert value, verl
        assert here or len(value.split()) > 2, verl


@pytest.mark.parametrize(
    ("table", "file"),
    [pytest.param(table, file, id=file.stem) for table in (LARGE, SMALL) for file in table.manifests],
)
def test_a_manifest_has_the_values_of_the_table(table: Table, file: Path) -> None:
    spec = load_manifest(file).spec.model_dump(mode="json", by_alias=True)
    compared = 0
    for _, _, here, value in rows(table):
        for field in keys_of(here):
            if field not in IN_WORDS:
                gpu, *npu = value.split(" / ")
                expected = npu[0] if npu and file.stem.endswith("-ascend") else gpu
                assert value_at(spec, field) == yaml.safe_load(expected), field
                compared += 1
    assert compared > 50
