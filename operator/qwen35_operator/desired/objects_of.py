"""All children of a training beside its attempts, and what stands in the way of making them."""

from qwen35_operator.api.training import Training
from qwen35_operator.desired import config, consistency, names, network_policy, overrides, pods, rbac, volumes
from qwen35_operator.desired.objects import Manifest
from qwen35_operator.desired.pools import all_pools
from qwen35_operator.settings import Settings
from qwen35_trainer.spec import Problem


def always(training: Training) -> tuple[Manifest, ...]:
    """Every child but -progress, -history, -control and the RayJobs, in the order of creation."""
    return (config.build(training), *rbac.build(training), network_policy.build(training))


def problems(training: Training, settings: Settings) -> list[Problem]:
    """Everything that a spec without problems of its own may still be refused for; the builders work without them."""
    found = [*names.problems(training), *volumes.problems(training.spec), *overrides.problems(training)]
    if found:
        return found
    return [
        problem
        for pool in all_pools(training.spec)
        for problem in consistency.problems(pods.template(training, settings, pool, 1), f"spec.pods.{pool}")
    ]
