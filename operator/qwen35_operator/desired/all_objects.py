"""Builds the child objects that every training has except RayJobs, and checks that all children can be created."""

from itertools import chain

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import message_config_maps, network_policy, object_names, pod_templates, rbac, volumes
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.desired.pod_overrides import consistency, reserved_fields
from qwen35_operator.desired.pools import all_pools
from qwen35_operator.desired.problem_limits import first_problems
from qwen35_operator.desired.trainer_release import present
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.manifest import Problem


def always(training: TrainingResource, settings: OperatorSettings, config_map: KubeObject) -> tuple[KubeObject, ...]:
    """Return every child except RayJobs and the ConfigMaps -progress, -history and -control, in the order of creation.

    config_map: the result of `config.build(training)`, which is expensive to build. Callers may already have it.
    """
    return (config_map, *rbac.build(training), network_policy.build(training, settings))


def in_order_of_creation(
    training: TrainingResource, settings: OperatorSettings, config_map: KubeObject, control: KubeObject
) -> tuple[KubeObject, ...]:
    """Return every child except RayJobs, in the order of creation. control: the ConfigMap -control.

    The Role grants rights on the message ConfigMaps by their names, so these are created first. If an object of another
    owner has one of the names, its creation is refused, and no account gets rights on that object.
    """
    first, *others = always(training, settings, config_map)
    messages = message_config_maps.empty_progress(training), message_config_maps.empty_history(training), control
    return (first, *messages, *others)


def problems(training: TrainingResource, settings: OperatorSettings) -> list[Problem]:
    """Return the problems that keep a training's objects from being built, although its spec passes all other checks.

    The operator refuses a training with such problems. The functions that build objects must not be called for it.
    """
    own_problems = chain(
        object_names.problems(training), volumes.problems(training.spec), reserved_fields.problems(training)
    )
    if invalid := list(first_problems(own_problems)):
        return invalid
    image = present(training, settings).image
    templates = ((pool, pod_templates.template(training, image, pool, 1)) for pool in all_pools(training.spec))
    inconsistent = (consistency.problems(template, f"spec.pods.{pool}") for pool, template in templates)
    return list(first_problems(chain.from_iterable(inconsistent)))
