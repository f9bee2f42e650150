"""Which transport a run has, and what is reported about one that cannot work."""

from typing import get_args

import pytest

from qwen35_trainer.manifest import ManifestError
from qwen35_trainer.manifest.publication import TransportChoice, TransportName
from qwen35_trainer.weights import segment
from qwen35_trainer.weights.transports import TRANSPORTS, choose


def test_every_name_of_the_manifest_has_a_transport() -> None:
    assert set(TRANSPORTS) == set(get_args(TransportName))
    assert set(get_args(TransportChoice)) == {"Auto", *TRANSPORTS}


def test_auto_follows_from_where_the_pools_are(monkeypatch) -> None:
    assert choose("Auto", one_host=True) == "SharedMemory"
    assert choose("Auto", one_host=False) == "ObjectStore"
    monkeypatch.setattr(segment, "IS_SUPPORTED", False)
    assert choose("Auto", one_host=True) == "ObjectStore"


@pytest.mark.parametrize("one_host", [True, False])
def test_the_object_store_can_be_chosen_everywhere(one_host: bool) -> None:
    assert choose("ObjectStore", one_host=one_host) == "ObjectStore"


def test_shared_memory_of_several_machines_is_refused_with_the_fix() -> None:
    with pytest.raises(ManifestError) as refused:
        choose("SharedMemory", one_host=False)
    [problem] = refused.value.problems
    assert problem.path == "spec.publication.transport"
    assert "one Linux machine" in problem.message
    assert problem.fix == "Set it to Auto or ObjectStore."
