"""Checks across the sections of a spec.

Each check is a pure function from the spec to its problems. `CHECKS` lists the sections that each check
reads. If a section is invalid, the checks that do not read this section still run. Checks that CEL can express are also
in the custom resource definition (`qwen35_operator/api/rules.py`); tests/controlplane/test_admission.py tests that both agree.
"""

from collections.abc import Callable, Collection, Iterable

from qwen35_trainer.manifest import contents, layout, modes
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
    (layout.dense, ("accelerator", "train")),
    (layout.expert, ("accelerator", "train")),
    (layout.copies, ("accelerator", "train")),
    (layout.heads, ("model", "train")),
    (layout.offload, ("train",)),
    (layout.batch, ("mode", "accelerator", "algorithm", "train")),
    (layout.token_budget, ("data", "train")),
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
    (contents.straggler_lane, ("rollout",)),
    (contents.vllm_options, ("rollout",)),
    (contents.vllm_arguments, ("rollout",)),
    (contents.vllm_candidates, ("rollout",)),
    (contents.checkpoint_storage, ("checkpoint",)),
    (contents.publication_folder, ("publication",)),
    (contents.variables, ("pods",)),
    (contents.rule_names, ("failurePolicy",)),
    (contents.rule_patterns, ("failurePolicy",)),
)


def check(spec: TrainingSpec, without: Collection[str] = ()) -> list[Problem]:
    """Return every problem of the spec. Checks that read a section in `without` are skipped."""
    return [problem for function, reads in CHECKS if not set(reads) & set(without) for problem in function(spec)]
