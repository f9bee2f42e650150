"""Field names of verl and TRL, so that an error about such a name can give this project's field.

verl's names are in the descriptions of this project's fields ("verl: actor_rollout_ref.rollout.n."). TRL's names are those of
the fields of GRPOConfig and of the command-line options in TRL 1.16.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

from qwen35_trainer.manifest import fields

TRL = {
    "model_name_or_path": "model.source.path",
    "dtype": "model.precision",
    "max_prompt_length": "data.maxPromptTokens",
    "max_completion_length": "data.maxResponseTokens",
    "num_train_epochs": "data.epochs",
    "shuffle_dataset": "data.shuffle",
    "reward_funcs": "rewards",
    "reward_weights": "rewards[].weight",
    "num_generations": "algorithm.groupSize",
    "num_generations_eval": "evaluation.samplesPerPrompt",
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.loss.clipLow",
    "epsilon_high": "algorithm.loss.clipHigh",
    "delta": "algorithm.loss.dualClip",
    "loss_type": "algorithm.loss.type",
    "importance_sampling_level": "algorithm.loss.type",
    "scale_rewards": "algorithm.advantage",
    "vllm_importance_sampling_mode": "algorithm.correction.type",
    "vllm_importance_sampling_clip_max": "algorithm.correction.cap",
    "vllm_importance_sampling_clip_min": "algorithm.correction.floor",
    "sapo_temperature_pos": "algorithm.loss.tauPositive",
    "sapo_temperature_neg": "algorithm.loss.tauNegative",
    "entropy_coef": "algorithm.entropyCoefficient",
    "mask_truncated_completions": "algorithm.maskTruncated",
    "temperature": "rollout.temperature",
    "top_p": "rollout.topP",
    "top_k": "rollout.topK",
    "min_p": "rollout.minP",
    "vllm_tensor_parallel_size": "rollout.tensorParallel",
    "vllm_gpu_memory_utilization": "rollout.memoryFraction",
    "max_steps": "train.updates",
    "per_device_train_batch_size": "train.batch.microBatchSequences",
    "gradient_checkpointing": "train.activationCheckpointing",
    "learning_rate": "train.optimizer.learningRate",
    "lr_scheduler_type": "train.optimizer.schedule",
    "warmup_steps": "train.optimizer.warmupUpdates",
    "weight_decay": "train.optimizer.weightDecay",
    "adam_beta1": "train.optimizer.beta1",
    "adam_beta2": "train.optimizer.beta2",
    "max_grad_norm": "train.optimizer.gradientClip",
    "lora_r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_target_modules": "train.lora.targets",
    "eval_steps": "evaluation.everyUpdates",
    "eval_on_start": "evaluation.atStart",
    "save_steps": "checkpoint.everyUpdates",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "checkpoint.storage",
    "report_to": "tracking",
}
VAGUE = frozenset({"name", "path", "enable", "strategy", "seed"})
"""Last words of verl's keys that are too common to identify a field alone. For these, the
word before the last must match too."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")


@dataclass(frozen=True)
class Foreign:
    """A field name of another trainer, and the path of this project's field with the same meaning."""

    trainer: str
    key: str
    path: str


def answer(path: Sequence[str], model: type[BaseModel]) -> str | None:
    """Return a text that says which field of this project corresponds to another trainer's field in a manifest.

    Returns None if no field name of another trainer matches. path: the names from the spec down to the other trainer's
    field. model: the class of the spec.

    A field name of another trainer matches if its last part is the last name of `path`. If this part is in VAGUE (too
    common to identify a field), the part before it must match, too. Of several matches, those that share the longest
    end with `path` are chosen. The text gives this project's field for each chosen match. If these fields are at
    different depths of the spec, such as a section and its fields, only the outermost are given.
    """
    best = max((_shared(path, foreign) for foreign in _known(model)), default=0)
    if best == 0:
        return None
    matches = {foreign.path: foreign for foreign in _known(model) if _shared(path, foreign) == best}
    depth = min(match.path.count(".") for match in matches.values())
    outermost = [match for match in matches.values() if match.path.count(".") == depth]
    return " ".join(f"{match.trainer}'s {match.key} is spec.{match.path} here." for match in outermost)


def _shared(path: Sequence[str], foreign: Foreign) -> int:
    """Return how many words at the ends of the path and of the foreign key are equal.

    If only the last word is equal, and it is in VAGUE, the result is 0.
    """
    count = 0
    for ours, theirs in zip(reversed(path), reversed(foreign.key.split(".")), strict=False):
        if ours != theirs:
            break
        count += 1
    return 0 if count == 1 and path[-1] in VAGUE else count


@cache
def _known(model: type[BaseModel]) -> tuple[Foreign, ...]:
    verl = (Foreign("verl", key, path) for path, keys in _keys(model, "") for key in keys)
    return (*verl, *(Foreign("TRL", key, path) for key, path in TRL.items()))


def _keys(model: type[BaseModel], path: str) -> Iterator[tuple[str, list[str]]]:
    for name, field in fields.fields(model).items():
        here = f"{path}.{name}".lstrip(".")
        theirs = (field.description or "").partition("verl: ")[2]
        if not theirs.startswith("none"):
            yield here, _KEY.findall(theirs)
        item = fields.item(field.annotation)
        inside = fields.section(field.annotation if item is None else item)
        if inside is not None:
            yield from _keys(inside, here if item is None else f"{here}[]")
