"""Finds the parts of a valid manifest that this release cannot run. Pure.

`qwen35 validate`, `render`, `plan` and `run` report them, and the operator does not accept such a training, so nothing is
allocated for it.
"""

from collections.abc import Iterator

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec


def cannot_run(spec: TrainingSpec) -> list[Problem]:
    """Return every part of the spec that this release cannot run, each with what to write instead."""
    return [*_rollout(spec), *_train(spec), *_advantage(spec)]


def _rollout(spec: TrainingSpec) -> Iterator[Problem]:
    rollout = spec.rollout
    if rollout is None:
        return
    if rollout.engine != "Torch":
        yield Problem("spec.rollout.engine", f"this release has no {rollout.engine} engine.", "Set it to Torch.")
    if rollout.tensorParallel != 1:
        message = f"a Torch replica is one process, not {rollout.tensorParallel}."
        yield Problem("spec.rollout.tensorParallel", message, "Set it to 1.")


def _train(spec: TrainingSpec) -> Iterator[Problem]:
    train = spec.train
    if train.engine != "FSDP":
        yield Problem("spec.train.engine", f"this release has no {train.engine} engine.", "Set it to FSDP.")
    for name in ("tensor", "pipeline", "expert", "expertTensor"):
        if (degree := getattr(train.parallelism, name)) != 1:
            path = f"spec.train.parallelism.{name}"
            message = f"the FSDP engine has no {name} parallelism, so the degree cannot be {degree}."
            yield Problem(path, message, "Set it to 1; FSDP shards all weights.")


def _advantage(spec: TrainingSpec) -> Iterator[Problem]:
    if spec.mode != "SFT" and spec.algorithm.advantage == "GAE":
        message = "GAE needs a value model, which this release cannot train."
        yield Problem("spec.algorithm.advantage", message, "Use GRPO or RLOO.")
