"""The trainer's permissions: access to its own four ConfigMaps by name, and nothing else."""

from typing import Any

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.object_names import account_name
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_trainer.contract.shared_names import config_name, control_name, history_name, progress_name


def build(training: TrainingResource) -> tuple[KubeObject, ...]:
    """Return ServiceAccount, Role and RoleBinding of the trainer.

    Only the head's pod uses the account and gets its token.
    """
    name = account_name(training.name)

    def account_metadata() -> dict[str, Any]:
        return metadata(training, name, "access")

    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": account_metadata(),
        "automountServiceAccountToken": False,
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": account_metadata(),
        "rules": [
            _rule(progress_name(training.name), "get", "patch", "update"),
            _rule(history_name(training.name), "patch"),
            # list and watch work with resourceNames only if the request selects metadata.name.
            _rule(control_name(training.name), "get", "list", "watch"),
            _rule(config_name(training.name), "get"),
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": account_metadata(),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": training.namespace}],
    }
    return sealed(account), sealed(role), sealed(binding)


def _rule(name: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": list(verbs)}
