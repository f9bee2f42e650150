"""What verl and TRL call our fields, for those who write their names.

verl's keys are those in the descriptions of the fields ("verl: actor_rollout_ref.rollout.n."). TRL's are the names of GRPOConfig
and of the command line of version 1.16.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

from qwen35_trainer.spec import fields

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
    "entropy_coef": "algorithm.entropyCoefficient",
    "temperature": "rollout.temperature",
    "top_p": "rollout.topP",
    "top_k": "rollout.topK",
    "vllm_tensor_parallel_size": "rollout.tensorParallel",
    "vllm_gpu_memory_utilization": "rollout.memoryFraction",
    "max_steps": "train.updates",
    "per_device_train_batch_size": "train.batch.microBatchPerDevice",
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
"""Last words of keys of verl that mean much elsewhere: the word before them must fit too."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")


@dataclass(frozen=True)
class Foreign:
    """A name of another trainer, and the path of our field."""

    trainer: str
    key: str
    path: str


def answer(path: Sequence[str], model: type[BaseModel]) -> str | None:
    """What to write in place of `path`, the names down to a field that does not exist; None if no other trainer has that name.

    model: the spec. The keys that share most words with the end of the path are answered; of a section and its fields the section.
    """
    best = max((_shared(path, one) for one in _known(model)), default=0)
    if best == 0:
        return None
    found = {one.path: one for one in _known(model) if _shared(path, one) == best}
    depth = min(one.path.count(".") for one in found.values())
    outermost = [one for one in found.values() if one.path.count(".") == depth]
    return " ".join(f"{one.trainer}'s {one.key} is spec.{one.path} here." for one in outermost)


def _shared(path: Sequence[str], foreign: Foreign) -> int:
    """How many words at the end of both are the same."""
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
