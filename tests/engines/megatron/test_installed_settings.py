"""Settings of megatron-core in a manifest are compared with the installed version, without importing it."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from qwen35_trainer.engines.megatron import installed_settings
from qwen35_trainer.engines.megatron.installed_settings import installed, problems
from qwen35_trainer.manifest.megatron import RESERVED_SETTINGS, SettingValue, reserved

CONFIG = Path(installed_settings.__file__).with_name("config.py")
PATH = "spec.train.overrideTransformerConfig"
NEWER_SETTINGS = {
    *("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
    *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
    *("moe_router_quantile_balancing_ema", "mtp_detach_heads"),
}
"""Refused settings that the oldest version of megatron-core lacks."""

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def set_by_the_engine() -> tuple[set[str], set[str]]:
    """Names of the settings that `config.py` gives to TransformerConfig: those that a manifest cannot set, and those it can."""
    tree = ast.parse(CONFIG.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parts = ("_linear_attention", "_experts")
    [call] = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "TransformerConfig"]
    tables = {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name: {
            key.value for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys if key is not None
        }
        for node in tree.body
        if isinstance(node, ast.AnnAssign) or (isinstance(node, ast.FunctionDef) and node.name in parts)
    }
    return {word.arg for word in call.keywords if word.arg}.union(*(tables[part] for part in parts)), tables["FUSIONS"]


def test_what_the_engine_sets_is_refused_and_kernels_that_join_operations_are_not() -> None:
    fixed, free = set_by_the_engine()
    assert len(fixed) > 50
    assert fixed - RESERVED_SETTINGS.keys() == set()
    assert free
    assert free & RESERVED_SETTINGS.keys() == set()
    assert fixed | free <= installed().keys()


def test_every_refused_setting_exists_in_the_installed_version() -> None:
    """A renamed setting would otherwise be accepted under its new name."""
    assert RESERVED_SETTINGS.keys() - installed().keys() in (set(), NEWER_SETTINGS)


def test_the_types_are_those_of_the_source_which_is_not_imported() -> None:
    was_imported = "megatron.core" in sys.modules
    installed.cache_clear()
    kinds = installed()
    assert len(kinds) > 250
    assert str(kinds["bias_activation_fusion"]) == "true or false"
    assert str(kinds["num_microbatches_with_partial_activation_checkpoints"]) == "an integer"
    assert str(kinds["moe_paged_stash_buffer_size_factor_cuda"]) == "a number"
    assert str(kinds["tp_comm_bootstrap_backend"]) == "nccl, mpi or gloo"
    assert str(kinds["attention_backend"]) == "flash, fused, unfused, local or auto"
    assert not str(kinds["timers"])
    assert "_cpu_offloading_context" not in kinds
    assert ("megatron.core" in sys.modules) == was_imported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias_activation_fusion", True),
        ("moe_paged_stash_buffer_size_factor_cuda", 1.5),
        ("moe_paged_stash_buffer_size_factor_cuda", 1),
        ("attention_backend", "flash"),
        ("cuda_graph_modules", "attn"),
        ("config_logger_dir", "/logs"),
    ],
)
def test_a_value_of_the_type_is_accepted(name: str, value: SettingValue) -> None:
    assert list(problems({name: value}, "0.19.2")) == []


@pytest.mark.parametrize(
    ("name", "value", "possible", "shown"),
    [
        ("bias_activation_fusion", 1, "true or false", "1"),
        ("bias_activation_fusion", "yes", "true or false", '"yes"'),
        ("cuda_graph_warmup_steps", True, "an integer", "true"),
        ("cuda_graph_warmup_steps", 2.0, "an integer", "2.0"),
        ("moe_paged_stash_buffer_size_factor_cuda", "1.5", "a number", '"1.5"'),
        ("tp_comm_bootstrap_backend", "rpc", "nccl, mpi or gloo", '"rpc"'),
        ("attention_backend", "Flash", "flash, fused, unfused, local or auto", '"Flash"'),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_possible_ones(
    name: str, value: SettingValue, possible: str, shown: str
) -> None:
    [problem] = problems({name: value}, "0.19.2")
    assert problem.path == f"{PATH}.{name}"
    assert problem.message == f"megatron-core 0.19.2 expects {possible}, not {shown}."
    assert problem.fix == f"Set it to {possible}."


@pytest.mark.skipif(
    "flash_attention_version" not in installed(),
    reason="the oldest megatron-core has no setting with values that are numbers",
)
def test_numbers_of_a_list_are_the_possible_values() -> None:
    assert list(problems({"flash_attention_version": 3}, "0.19.2")) == []
    [problem] = problems({"flash_attention_version": 5}, "0.19.2")
    assert problem.message == "megatron-core 0.19.2 expects 2, 3 or 4, not 5."


def test_a_setting_that_a_manifest_cannot_contain_is_refused() -> None:
    [problem] = problems({"no_sync_func": "mine:function"}, "0.19.2")
    assert problem.message == "megatron-core 0.19.2 expects Optional[Callable], which a manifest cannot contain."
    assert problem.fix == "Remove it."


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    far, near = problems({"warp_drive": True, "moe_permute_fuson": True}, "0.19.2")
    assert (far.path, near.path) == (f"{PATH}.warp_drive", f"{PATH}.moe_permute_fuson")
    assert far.message == near.message == "megatron-core 0.19.2 has no such setting."
    assert near.fix.startswith("Did you mean moe_permute_fusion")
    assert far.fix == "Use the name of a field of megatron-core's class TransformerConfig."


def test_a_setting_with_a_field_of_its_own_is_left_to_the_manifest_and_never_suggested() -> None:
    assert list(problems({"tensor_model_parallel_size": "2"}, "0.19.2")) == []
    assert [name for name, _ in reserved({"tensor-model-parallel-size": 2})] == ["tensor-model-parallel-size"]
    [problem] = problems({"tensor_model_paralel_size": 2}, "0.19.2")
    assert "tensor_model_parallel_size" not in problem.fix
