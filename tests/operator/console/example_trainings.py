"""Trainings in every state, with the statuses that the operator decides for them."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from qwen35_operator.console.training_view import TrainingView, WarningEvent
from qwen35_operator.desired.objects import KubeObject
from tests.operator.reconcile.world import START, UID, World

TRAINING = {
    "updates": 1000,
    "prompts": 6_592,
    "samples": 105_472,
    "tokens": 12_345_678,
    "reward": 0.71234,
    "accuracy": 0.625,
    "lagMean": 0.8125,
    "lagMax": 3,
    "rolloutIdle": 0.12,
    "trainIdle": 0.034,
    "tokensPerSecond": 4779.3,
    "secondsPerUpdate": 12.5,
}
QUEUED = {"kueue.x-k8s.io/queue-name": "rl"}


@dataclass(frozen=True)
class ExampleTraining:
    """A training's object, and the time at which it is shown."""

    raw: KubeObject
    now: datetime
    warnings: tuple[WarningEvent, ...] | None = ()

    @property
    def view(self) -> TrainingView:
        return TrainingView.of(self.raw, self.warnings)


def training() -> World:
    """A training in the middle of its run."""
    world = World()
    world.until_running()
    world.wait(3600)
    saved = {"uri": "file:///var/lib/qwen35/checkpoints/update-000400", "update": 400}
    at = (world.now - timedelta(seconds=185)).timestamp()
    world.report(update=412, version=410, checkpoint={**saved, "time": at}, phase="training", **TRAINING)
    world.reconcile()
    return world


def unseen() -> ExampleTraining:
    return example(World(), seconds=3)


def refused() -> ExampleTraining:
    world = World()
    world.edit(train={"nodes": 0}, rollout={"nodes": -1})
    world.settle(2)
    return example(world)


def queued() -> ExampleTraining:
    world = World(labels=QUEUED)
    world.settle(3)
    return example(world, seconds=400)


def starting() -> ExampleTraining:
    world = World()
    world.reconcile()
    world.kuberay()
    world.fault("rollout", "ImagePullBackOff")
    world.reconcile()
    return example(world, seconds=20)


def running() -> ExampleTraining:
    return example(training(), seconds=4)


def silent() -> ExampleTraining:
    """The trainer has not reported for long."""
    return example(training(), seconds=900)


def degraded() -> ExampleTraining:
    world = training()
    world.fault("rollout", "OOMKilled", 137)
    world.wait(30)
    world.reconcile()
    return example(world, seconds=2)


def skewed() -> ExampleTraining:
    """The head's clock is ten minutes ahead: so is the time of its checkpoint."""
    world = training()
    ahead = world.now + timedelta(minutes=10)
    world.wait(12)
    saved = {"uri": "file:///var/lib/qwen35/checkpoints/update-000420", "update": 420, "time": ahead.timestamp()}
    world.report(update=421, checkpoint=saved, time=ahead.timestamp())
    world.reconcile()
    return example(world, seconds=1)


def restarting() -> ExampleTraining:
    world = training()
    world.report("Failed", reason="WorkerLost", message="train worker 1 was lost: its node does not answer any more")
    world.reconcile()
    message = (
        "attempt 1 failed: WorkerLost: train worker 1 was lost: its node does not answer any more (rule anything-else)"
    )
    return example(world, seconds=4, warnings=(WarningEvent(world.now, "AttemptFailed", message),))


def resumed() -> ExampleTraining:
    """The second attempt, which has not reported yet."""
    world = training()
    world.report("Failed", reason="WorkerLost", message="train worker 1 was lost")
    world.finish_job(ok=False)
    world.settle(30)
    return example(world, seconds=4)


def suspending() -> ExampleTraining:
    world = training()
    world.edit(suspend=True)
    world.reconcile()
    return example(world, seconds=2)


def suspended() -> ExampleTraining:
    world = training()
    world.edit(suspend=True)
    world.reconcile()
    world.obey(update=413)
    world.settle(4)
    return example(world, seconds=7200)


def failed() -> ExampleTraining:
    world = training()
    world.report(
        "Failed", reason="DataError", message="source math: /data/math.jsonl, line 17: no field answer. Add it"
    )
    world.finish_job(ok=False)
    world.settle(3)
    message = "attempt 1 failed: DataError: source math: /data/math.jsonl, line 17: no field answer. Add it (rule not-retryable)"
    return example(world, seconds=60, warnings=(WarningEvent(world.now, "AttemptFailed", message),))


def succeeded() -> ExampleTraining:
    world = training()
    folder = "file:///var/lib/qwen35/checkpoints/exports/update-001000"
    export = {"uri": folder, "update": 1000, "time": world.now.timestamp()}
    summary = {"message": "1000 updates", "reward": 0.98, "accuracy": 0.9912, "heldOutReward": 0.9651, "export": export}
    world.report("Succeeded", update=1000, version=1000, **summary)
    world.settle(3)
    world.finish_job(ok=True)
    world.settle(3)
    return example(world, seconds=86400)


def supervised() -> ExampleTraining:
    """No rollout: neither reward nor lag."""
    world = World()
    world.edit(mode="SFT")
    for section in ("rollout", "rewards"):
        world.spec.pop(section)
    world.settle(4)
    world.report(update=30, updates=60, secondsPerUpdate=2.0, trainIdle=0.01, prompts=480, samples=480, tokens=9_000)
    world.reconcile()
    return example(world, seconds=1, warnings=None)


def changed() -> ExampleTraining:
    """The spec was edited a moment ago."""
    world = training()
    world.edit(rollout={"nodes": 4})
    return example(world)


def example(world: World, *, seconds: float = 0, warnings: tuple[WarningEvent, ...] | None = ()) -> ExampleTraining:
    """The world as the API server reports it, this number of seconds later."""
    metadata = {"name": "demo", "namespace": "team", "uid": UID, "generation": world.generation, "resourceVersion": "7"}
    metadata |= {"creationTimestamp": START.strftime("%Y-%m-%dT%H:%M:%SZ")}
    status = json.loads(world.status.model_dump_json(exclude_none=True))
    policy = {"failurePolicy": world.spec["failurePolicy"]}
    raw = {"metadata": metadata, "spec": {"mode": "FullyAsync", **world.spec, **policy}, "status": status}
    return ExampleTraining(raw, world.now + timedelta(seconds=seconds), warnings)


EXAMPLES = {
    make.__name__: make
    for make in (
        unseen, refused, queued, starting, running, silent, degraded, skewed, restarting, resumed, suspending, suspended,
        failed, succeeded, supervised, changed,
    )
}  # fmt: skip
