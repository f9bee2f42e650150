"""KubeRay in the cluster, by the manifests that it is released with."""

import re

from tests.testbed.core import Core
from tests.testbed.kuberay import define

NAME = "kuberay-operator"
NAMESPACE = "default"


def install(core: Core) -> None:
    """Returns before its pod is ready, see `ready`. The definitions are those of tests/testbed: a release has some megabytes."""
    for file in core.binaries.kuberay_definitions:
        define(core.api, file)
    documents = re.split(r"^---$", core.binaries.kuberay_installation.read_text(), flags=re.MULTILINE)
    others = [document for document in documents if "\nkind: CustomResourceDefinition\n" not in document]
    core.kubectl("apply", "--server-side", "--filename=-", input="---".join(others))


def ready(core: Core) -> bool:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}"
    return core.api.exists(path) and bool(core.api.get(path).get("status", {}).get("availableReplicas"))
