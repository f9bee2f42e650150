"""What the trainer may do in its namespace: its own four ConfigMaps, by name, and nothing else."""

from typing import Any

from qwen35_operator.api.training import Training
from qwen35_operator.desired.names import account_name
from qwen35_operator.desired.objects import Manifest, metadata, sealed
from qwen35_trainer.contract.names import config_name, control_name, history_name, progress_name


def build(training: Training) -> tuple[Manifest, ...]:
    """ServiceAccount, Role and RoleBinding. Only the head's pod has the account and its token."""
    name = account_name(training.name)

    def described() -> dict[str, Any]:
        return metadata(training, name, "access")

    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": described(),
        "automountServiceAccountToken": False,
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": described(),
        "rules": [
            _rule(progress_name(training.name), "get", "patch", "update"),
            _rule(history_name(training.name), "patch"),
            # list and watch by name: the request has to select metadata.name.
            _rule(control_name(training.name), "get", "list", "watch"),
            _rule(config_name(training.name), "get"),
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": described(),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": training.namespace}],
    }
    return sealed(account), sealed(role), sealed(binding)


def _rule(name: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": list(verbs)}
