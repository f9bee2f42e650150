import pytest

from qwen35_trainer.runtime.link.config_maps import ConfigMapLink
from qwen35_trainer.runtime.link.operator_link import FolderLink, LinkRefused, ServiceAccount, open_link

POD = {
    "QWEN35_TRAINING": "demo",
    "QWEN35_NAMESPACE": "team",
    "QWEN35_ATTEMPT": "3",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}


@pytest.fixture
def account(tmp_path):
    for name in ("token", "ca.crt"):
        (tmp_path / name).touch()
    return tmp_path


def test_cluster_is_the_config_maps_of_this_pods_training(account):
    link, attempt = open_link("cluster", POD, account)
    assert isinstance(link, ConfigMapLink)
    assert attempt == 3


def test_anything_else_is_a_folder_and_the_first_attempt(tmp_path):
    link, attempt = open_link(str(tmp_path / "link"), {})
    assert isinstance(link, FolderLink)
    assert attempt == 1


def test_outside_of_a_pod_all_that_is_missing_is_named_together(tmp_path):
    with pytest.raises(LinkRefused) as caught:
        open_link("cluster", {"QWEN35_TRAINING": "demo", "QWEN35_ATTEMPT": "one"}, tmp_path)
    message = str(caught.value)
    assert "QWEN35_NAMESPACE, KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT not set" in message
    assert f"{tmp_path / 'token'}, {tmp_path / 'ca.crt'} not there" in message
    assert "QWEN35_ATTEMPT is 'one'; it is a number from 1" in message


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "", "²"])
def test_an_attempt_is_a_number_from_1(tmp_path, number):
    with pytest.raises(LinkRefused, match="it is a number from 1"):
        open_link(str(tmp_path), {"QWEN35_ATTEMPT": number})


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_the_servers_address_may_be_of_either_family(tmp_path, host, server):
    assert ServiceAccount.of_pod(POD | {"KUBERNETES_SERVICE_HOST": host}, tmp_path).server == server
