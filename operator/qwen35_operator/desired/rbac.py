"""The trainer's permissions: its three message ConfigMaps by name, and of each only what its link does.

The kubelet mounts `-config`, so the trainer needs no permission for it. tests/controlplane/test_trainer_rights.py compares
the rules with the requests of the trainer's link.
"""

from typing import Any

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.object_names import account_name
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_trainer.contract.shared_names import control_name, history_name, progress_name


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
            _rule(progress_name(training.name), "patch"),
            _rule(history_name(training.name), "patch"),
            # list and watch work with resourceNames only if the request selects metadata.name.
            _rule(control_name(training.name), "list", "watch"),
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
