"""`qwen35 render`: what the operator would create for a manifest, without a cluster."""

import re
from pathlib import Path

import yaml

from qwen35_operator.api.training import Training
from qwen35_operator.desired import control, history, objects_of, progress, ray_job
from qwen35_operator.desired.objects import Manifest
from qwen35_operator.desired.pools import rollout_nodes
from qwen35_operator.reconcile.children import controlling
from qwen35_operator.settings import Settings
from qwen35_trainer.spec import Manifest as TrainingManifest
from qwen35_trainer.spec import ManifestError, Problem
from qwen35_trainer.spec.document import SCALARS, TAG

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
UID = "00000000-0000-0000-0000-000000000000"
"""Stands for the one that the API server gives."""


def objects(
    manifest: TrainingManifest,
    *,
    namespace: str | None = None,
    settings: Settings | None = None,
    file: Path | None = None,
) -> tuple[Manifest, ...]:
    """The children of the first attempt, in the order of creation.

    namespace: wins over the manifest's own; without either it is "default". file: for the message of an error. Raises
    ManifestError with everything that the operator would not accept, except what this release cannot run (`cannot_run`).
    """
    if namespace is not None and not NAMESPACE.fullmatch(namespace):
        fix = "Use lower-case letters, digits and -, at most 63, with a letter or digit at both ends."
        raise ManifestError(file, [Problem("--namespace", f'"{namespace}" is not a valid namespace name.', fix)])
    known = manifest.metadata
    training = Training(
        name=known.name,
        namespace=namespace or known.namespace or "default",
        uid=UID,
        generation=1,
        spec=manifest.spec,
        labels=known.labels,
        annotations=known.annotations,
    )
    settings = settings or Settings()
    if problems := objects_of.problems(training, settings):
        raise ManifestError(file, problems)
    nodes = rollout_nodes(training.spec)
    return (
        *objects_of.always(training),
        progress.build(training),
        history.build(training),
        control.build(training, controlling(training, 1, nodes)),
        ray_job.build(training, settings, attempt=1, rollout_nodes=nodes),
    )


def text(manifests: tuple[Manifest, ...]) -> str:
    """The objects as one YAML stream, for kubectl."""
    return "".join(f"---\n{yaml.dump(dict(one), Dumper=_Dumper, sort_keys=False, width=120)}" for one in manifests)


class _Dumper(yaml.SafeDumper):
    """Texts of more than one line as blocks, no anchors, and quotes around what kubectl would take for a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(f"{TAG}str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in SCALARS:
    _Dumper.add_implicit_resolver(
        f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""] if _tag == "null" else list(_first)
    )
