"""Checks across the sections of a spec.

Each check is a pure function from the spec to its problems. `CHECKS` lists the sections that each check reads. If a
section is invalid, the checks that do not read this section still run. Checks that CEL can express are also rules of the
custom resource definition (`qwen35_operator/api/rules.py`). tests/controlplane/test_admission.py tests that these
rules agree with the checks.
"""

from collections.abc import Callable, Collection, Iterable

from qwen35_trainer.manifest import contents, layout, modes, straggler_lane
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec

type Check = Callable[[TrainingSpec], Iterable[Problem]]

CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (modes.rollout_section, ("mode", "rollout")),
    (modes.rewards_section, ("mode", "rewards")),
    (modes.group_size, ("mode", "algorithm")),
    (modes.staleness, ("mode", "async")),
    (modes.partial_rollout, ("mode", "async")),
    (modes.window, ("mode", "async")),
    (modes.colocation, ("mode", "rollout", "train")),
    (modes.router_replay, ("mode", "train")),
    (layout.dense, ("accelerator", "train")),
    (layout.expert, ("accelerator", "train")),
    (layout.whole_experts, ("model", "train")),
    (layout.copies, ("accelerator", "train")),
    (layout.virtual_stages, ("model", "train")),
    (layout.heads, ("model", "train")),
    (layout.offload, ("train",)),
    (layout.resharding, ("train",)),
    (layout.batch, ("mode", "accelerator", "algorithm", "train")),
    (layout.token_budget, ("data", "train")),
    (layout.shared_prompts, ("mode", "train")),
    (layout.replicas, ("accelerator", "rollout")),
    (contents.model_source, ("model",)),
    (contents.random_model, ("model",)),
    (contents.data_sources, ("data",)),
    (contents.gym_reward, ("rewards", "data")),
    (contents.reward_options, ("rewards",)),
    (contents.reward_names, ("rewards",)),
    (contents.reward_patterns, ("rewards",)),
    (contents.algorithm_functions, ("algorithm",)),
    (contents.clip, ("algorithm",)),
    (contents.overlong_buffer, ("algorithm", "data")),
    (contents.divergence, ("algorithm",)),
    (contents.kl, ("algorithm",)),
    (contents.correction, ("algorithm",)),
    (contents.elasticity, ("rollout",)),
    (straggler_lane.part_of_pool, ("rollout",)),
    (contents.vllm_options, ("rollout",)),
    (contents.vllm_arguments, ("rollout", "accelerator")),
    (contents.vllm_candidates, ("rollout",)),
    (contents.transformer_settings, ("train",)),
    (contents.checkpoint_storage, ("checkpoint",)),
    (contents.publication_folder, ("publication",)),
    (contents.variables, ("pods",)),
    (contents.rule_names, ("failurePolicy",)),
)
"""(check, names of the sections that it reads) of every check. The code relies on them for every spec."""

NEW_TRAINING_CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (straggler_lane.below_min_nodes, ("rollout",)),
    (straggler_lane.larger_replicas, ("rollout",)),
    (straggler_lane.before_the_limit, ("data", "rollout")),
    (straggler_lane.faster_engine, ("accelerator", "rollout")),
    (contents.rule_patterns, ("failurePolicy",)),
    (contents.soft_gate, ("algorithm", "async")),
    (contents.vllm_temperatures, ("rollout", "evaluation")),
)
"""Checks of new trainings only, because an earlier release accepted the specs that they refuse.

A training that has begun continues, resumes and is exported without these checks, so that no upgrade stops it. A check
belongs here if it is younger than the first release and refuses settings that have no use, but do no harm.
"""


def check(spec: TrainingSpec, without: Collection[str] = (), *, new: bool = True) -> list[Problem]:
    """Return every problem that the checks across fields find in a spec.

    without: names of sections; checks that read one of them are skipped. new: whether the spec is of a new training.
    False skips `NEW_TRAINING_CHECKS`.
    """
    checks = (*CHECKS, *NEW_TRAINING_CHECKS) if new else CHECKS
    return [problem for function, reads in checks if not set(reads) & set(without) for problem in function(spec)]


def check_new(spec: TrainingSpec) -> list[Problem]:
    """Return the problems that `NEW_TRAINING_CHECKS` find in a spec that passes all other checks."""
    return [problem for function, _ in NEW_TRAINING_CHECKS for problem in function(spec)]
