"""Checks of the sections and fields that a mode requires, and of those that have no effect in a mode."""

from collections.abc import Iterator

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec

GROUP_RELATIVE = ("GRPO", "DrGRPO", "RLOO", "OPO", "PassAtK", "GPG", "ReMax", "ReinforcePlusPlusBaseline")


def rollout_section(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.rollout is set, except in mode SFT, which must not have it."""
    if spec.mode == "SFT" and spec.rollout is not None:
        yield Problem(
            "spec.rollout", "mode SFT has no rollout pool.", "Remove it, or use mode FullyAsync or Colocated."
        )
    if spec.mode != "SFT" and spec.rollout is None:
        yield Problem("spec.rollout", f"mode {spec.mode} needs a rollout pool.", "Add rollout: {nodes: 1}.")


def rewards_section(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.rewards has at least one reward, except in mode SFT, which must have none."""
    if spec.mode == "SFT" and spec.rewards:
        yield Problem("spec.rewards", "mode SFT has no rewards.", "Remove them, or use mode FullyAsync or Colocated.")
    if spec.mode != "SFT" and not spec.rewards:
        yield Problem("spec.rewards", f"mode {spec.mode} needs at least one reward.", "Add rewards: [{type: Math}].")


def group_size(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that a group has at least two samples if the advantage or dynamic sampling compares samples of a group."""
    algorithm = spec.algorithm
    if spec.mode != "SFT" and algorithm.advantage in GROUP_RELATIVE and algorithm.groupSize < 2:
        yield Problem(
            "spec.algorithm.groupSize",
            f"{algorithm.advantage} compares the samples of a prompt, and there is only 1.",
            "Use at least 2, or advantage ReinforcePlusPlus.",
        )
    elif spec.mode != "SFT" and algorithm.dynamicSampling and algorithm.groupSize < 2:
        yield Problem(
            "spec.algorithm.dynamicSampling",
            "groupSize 1 < 2: a single reward never differs, so every group would be dropped.",
            "Use groupSize 2 or more, or set dynamicSampling to false.",
        )


def staleness(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that stalenessThreshold is at most maxVersionLag in mode FullyAsync (docs/design/staleness.md, feasibility)."""
    share, lag = spec.async_.stalenessThreshold, spec.async_.maxVersionLag
    if spec.mode == "FullyAsync" and share > lag:
        yield Problem(
            "spec.async.stalenessThreshold",
            f"{share} is above maxVersionLag {lag}: groups would start after their deadline.",
            f"Lower it to at most {lag}, or raise maxVersionLag.",
        )


def partial_rollout(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that partialRollout is not set together with stalenessThreshold 0.

    With that threshold all sequences end before weights are published, so none can continue with newer weights.
    """
    knobs = spec.async_
    written = "partialRollout" in knobs.model_fields_set and knobs.partialRollout
    if spec.mode == "FullyAsync" and knobs.stalenessThreshold == 0 and written:
        yield Problem(
            "spec.async.partialRollout",
            "true has no effect with stalenessThreshold 0: no sequence is unfinished at a publication.",
            "Remove it, or raise stalenessThreshold above 0.",
        )


def window(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that fields that bound or handle staleness are not set in modes other than FullyAsync.

    In other modes, generation never runs ahead of training, so these fields have no effect. Values that describe
    generation without staleness, such as stalenessThreshold 0, are allowed.
    """
    if spec.mode == "FullyAsync":
        return
    neutral = {"stalenessThreshold": 0, "maxVersionLag": 0, "onMissedDeadline": "Wait"}
    for name, value in (neutral | {"partialRollout": False, "adaptiveDispatch": False}).items():
        chosen = getattr(spec.async_, name)
        if name in spec.async_.model_fields_set and chosen != value:
            shown = str(chosen).lower() if isinstance(chosen, bool) else chosen
            yield Problem(
                f"spec.async.{name}",
                f"{shown} has no effect in mode {spec.mode}, which never runs ahead.",
                "Remove it, or use mode FullyAsync.",
            )


def colocation(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that in mode Colocated both pools have the same number of nodes, which they share, and autoscaling is not set."""
    if spec.mode == "Colocated" and spec.rollout is not None and spec.rollout.nodes != spec.train.nodes:
        yield Problem(
            "spec.rollout.nodes",
            f"{spec.rollout.nodes} is not train.nodes {spec.train.nodes}: in mode Colocated the pools share their nodes.",
            f"Use {spec.train.nodes} here, or train.nodes {spec.rollout.nodes}.",
        )
    if spec.mode == "Colocated" and spec.rollout is not None and spec.rollout.autoscale is not None:
        shared = "in mode Colocated the pools share their nodes: there is nothing to autoscale."
        yield Problem("spec.rollout.autoscale", shared, "Remove it, or use mode FullyAsync.")


def router_replay(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that router replay is not set in mode SFT, in which no rollout chooses experts."""
    if spec.mode == "SFT" and spec.train.router.replay:
        yield Problem(
            "spec.train.router.replay",
            "true has no effect in mode SFT: no rollout chooses experts.",
            "Remove it, or use mode FullyAsync or Colocated.",
        )
