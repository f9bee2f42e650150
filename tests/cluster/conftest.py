"""One cluster for all tests, with our chart in it, and a namespace for each test or story."""

import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from tests.cluster import requirements
from tests.cluster.cluster import Cluster
from tests.cluster.cluster import cluster as start_cluster
from tests.cluster.release import ENFORCE, Release
from tests.testbed import binaries

SHARED = "shared_namespace"
BROKEN = pytest.StashKey[str]()
"""Of a class whose tests follow each other: the first that failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers where a story broke."""
    report = yield
    story = _story(item)
    if report.failed and story is not None:
        story.stash.setdefault(BROKEN, item.name)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail the tests of a story that follow a failed one immediately: they would wait, and fail for the same reason."""
    story = _story(item)
    if story is not None and (first := story.stash.get(BROKEN, None)) is not None:
        pytest.fail(f"not run: {first} failed, and the tests of {story.name} follow each other", pytrace=False)


def _story(item: pytest.Item) -> pytest.Class | None:
    """The class, when its tests look at one training."""
    return item.getparent(pytest.Class) if SHARED in getattr(item, "fixturenames", ()) else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real node that has our images, KubeRay, and our operator. What a test takes away, it brings back."""
    if why := requirements.missing():
        pytest.skip(why)
    with start_cluster(binaries.find(), "tests", requirements.IMAGES) as running:
        Release(running).install()
        yield running


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Release:
    return Release(cluster)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace that enforces the baseline standard and takes pods."""
    with _namespace(cluster) as name:
        yield name


@pytest.fixture(scope="class")
def shared_namespace(cluster: Cluster) -> Iterator[str]:
    """The same for tests that look at one training, one after the other."""
    with _namespace(cluster) as name:
        yield name


@contextmanager
def _namespace(cluster: Cluster) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    cluster.api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": {ENFORCE: "baseline"}}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    cluster.processes.wait("kube-controller-manager", lambda: cluster.api.exists(account))
    yield name
    cluster.kubectl("delete", "namespace", name)
