"""Where the credentials come from."""

import pytest

from qwen35_operator.kube.kubeconfig import IN_POD_VARIABLE, uses_pod


@pytest.mark.parametrize("in_pod", [True, False])
@pytest.mark.parametrize(
    ("option", "context", "variable", "expected"),
    [
        (None, None, None, True),
        (None, None, "", True),
        (None, None, "file", False),
        ("file", None, None, False),
        (None, "there", None, False),
    ],
)
def test_a_pod_uses_its_own_credentials_unless_others_are_named(
    in_pod, option, context, variable, expected, monkeypatch
):
    for name, value in ((IN_POD_VARIABLE, "10.0.0.1" if in_pod else None), ("KUBECONFIG", variable)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert uses_pod(option, context) == (in_pod and expected)
