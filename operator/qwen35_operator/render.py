"""`qwen35 render`: the objects that the operator would create for a manifest, without a cluster."""

import re
from pathlib import Path

import yaml

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import all_objects, config, disruption_budget, message_config_maps, pod_size, ray_job
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.desired.pools import rollout_nodes
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.acceptance import problems_in_pods
from qwen35_operator.reconcile.child_writes import control_message
from qwen35_trainer.manifest import Manifest, ManifestError, Problem
from qwen35_trainer.manifest.document import SCALARS, TAG

NAMESPACE_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
UID = "00000000-0000-0000-0000-000000000000"
"""The uid of the training in rendered objects. In a cluster the API server assigns another one."""


def objects(
    manifest: Manifest,
    *,
    namespace: str | None = None,
    settings: OperatorSettings | None = None,
    file: Path | None = None,
) -> tuple[KubeObject, ...]:
    """Return the child objects that the operator would create for the first attempt, in the order of creation.

    namespace: replaces the namespace in the manifest. If it is None and the manifest names none, the namespace is
    "default". settings: None for the default settings. file: the path that errors name. Raises ManifestError if the
    namespace is invalid, if a setting cannot work in pods, if no objects can be built from the manifest, or if the
    model does not fit the devices.
    """
    if namespace is not None and not NAMESPACE_PATTERN.fullmatch(namespace):
        fix = "Use lower-case letters, digits and -, at most 63, with a letter or digit at both ends."
        raise ManifestError(file, [Problem("--namespace", f'"{namespace}" is not a valid namespace name.', fix)])
    metadata = manifest.metadata
    training = TrainingResource(
        name=metadata.name,
        namespace=namespace or metadata.namespace or "default",
        uid=UID,
        generation=1,
        spec=manifest.spec,
        labels=metadata.labels,
        annotations=metadata.annotations,
    )
    settings = settings or OperatorSettings()
    problems = [
        *problems_in_pods(training.spec.publication),
        *all_objects.problems(training, settings),
        *pod_size.problems(training),
    ]
    if problems:
        raise ManifestError(file, problems)
    nodes = rollout_nodes(training.spec)
    control = message_config_maps.control(training, control_message(training, 1, nodes))
    return (
        *all_objects.in_order_of_creation(training, settings, config.build(training), control),
        ray_job.build(training, settings, attempt=1, rollout_nodes=nodes),
        *([disruption_budget.build(training, 1)] if disruption_budget.is_wanted(training) else []),
    )


def without_owner(manifests: tuple[KubeObject, ...]) -> tuple[KubeObject, ...]:
    """Return the objects without owner references.

    If somebody applied them with references to a training that does not exist, Kubernetes would delete them.
    """
    return tuple(
        dict(manifest)
        | {"metadata": {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}}
        for manifest in manifests
    )


def text(manifests: tuple[KubeObject, ...]) -> str:
    """Return the objects as one YAML stream, for kubectl."""
    dumped = (yaml.dump(dict(manifest), Dumper=_KubectlDumper, sort_keys=False, width=120) for manifest in manifests)
    return "".join(f"---\n{document}" for document in dumped)


class _KubectlDumper(yaml.SafeDumper):
    """Writes YAML for kubectl: no anchors, multi-line strings as blocks, quotes around ambiguous strings."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(f"{TAG}str", data, style="|" if "\n" in data else None)


_KubectlDumper.add_representer(str, _KubectlDumper.represent_text)
_KubectlDumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in SCALARS:
    _KubectlDumper.add_implicit_resolver(
        f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""] if _tag == "null" else list(_first)
    )
