"""Every rule of the trainer's Role is used, and none is missing: its real link to the operator, with exactly these rules.

operator ─► Role demo-trainer ─► token of the account ─► a process with the link of this release, or of the release before
                 └────────── the rules are compared with the requests that the API server permitted ──────────┘
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import qwen35_trainer
from qwen35_trainer.contract import Control, StopOrder
from tests.controlplane import account_link
from tests.controlplane.live_training import LiveTraining
from tests.patience import PATIENCE
from tests.testbed.api import Api, Refused
from tests.testbed.certificates import Authority
from tests.testbed.control_plane import ControlPlane
from tests.upgrade.recording import releases
from tests.virtual.https import serving
from tests.virtual.plane import VirtualPlane
from tests.virtual.rights import Rights

pytestmark = pytest.mark.worlds("memory", "real")

THIS_RELEASE = Path(qwen35_trainer.__file__).parents[1]
CHANGED = Control(attempt=1, stop=StopOrder(id="1-Suspend", reason="Suspend", time=1.0))
REFUSED = ("", "?fieldSelector=metadata.name=demo-config", "?fieldSelector=metadata.name=demo-progress")
REFUSED_NAMES = ("demo-config", "demo-control", "demo-progress", "demo-history")
"""What the account may not read: lists of ConfigMaps, and each of them."""

type Use = tuple[str, str]
"""Verb, and name of the ConfigMap."""


@dataclass(frozen=True)
class Account:
    """What the kubelet mounts into a head pod, and where the API server is."""

    folder: Path
    server: str

    @property
    def api(self) -> Api:
        return Api.of_token(self.server, self.folder / "ca.crt", (self.folder / "token").read_text())


@asynccontextmanager
async def mounted(training: LiveTraining, folder: Path) -> AsyncIterator[Account]:
    """The trainer's account of a training, in an empty folder."""
    name, plane = f"{training.name}-trainer", training.plane
    if isinstance(plane, ControlPlane):
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = plane.api.post(f"{training.path('serviceaccounts', name)}/token", request)
        (folder / "token").write_text(made["status"]["token"])
        (folder / "ca.crt").write_text(plane.ca.read_text())
        yield Account(folder, plane.server)
        return
    assert isinstance(plane, VirtualPlane)
    authority = Authority.create(folder / "authority")
    (folder / "token").write_text("of the account")
    (folder / "ca.crt").write_text(authority.ca.read_text())
    rights = Rights(name, training.get("roles", name)["rules"], (training.namespace,))
    certificate = authority.issue("server", "server", names="IP:127.0.0.1")
    async with serving(plane.server, rights, "of the account", certificate) as address:
        yield Account(folder, address)


async def used_by(packages: Path, training: LiveTraining, account: Account) -> set[Use]:
    """What the link of a release does with the account."""
    address = urlsplit(account.server)
    pod = {
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "QWEN35_TRAINING": training.name,
        "QWEN35_NAMESPACE": training.namespace,
        "QWEN35_ATTEMPT": "1",
        "PYTHONPATH": str(packages),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, account_link.__file__, account.folder, env=os.environ | pod, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            link = (await process.stdout.readline()).decode()
            assert Path(link).is_relative_to(packages)
            control = training.path("configmaps", f"{training.name}-control")
            training.patch(control, {"data": {"control.json": CHANGED.text()}})
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    permitted, refused_calls = json.loads(printed)
    assert refused_calls == [], "the link repeats a refused call, so that alone would not fail"
    return {(verb, name) for verb, name in permitted}


def granted(training: LiveTraining) -> set[Use]:
    """What the Role grants, for ConfigMaps and by name only."""
    rules = training.get("roles", f"{training.name}-trainer")["rules"]
    assert all((rule["apiGroups"], rule["resources"]) == ([""], ["configmaps"]) for rule in rules)
    return {use for rule in rules for use in itertools.product(rule["verbs"], rule["resourceNames"])}


@pytest.fixture
def begun(live_training: LiveTraining) -> LiveTraining:
    live_training.apply()
    live_training.until_job()
    live_training.until(lambda: live_training.find("configmaps", "demo-control"), "there are orders")
    return live_training


async def refused(account: Account, maps: str) -> list[int]:
    """The statuses with which the API server refuses to let the account read what it need not read."""
    statuses = []
    for path in (*(f"{maps}{query}" for query in REFUSED), *(f"{maps}/{name}" for name in REFUSED_NAMES)):
        with pytest.raises(Refused) as caught:
            await asyncio.to_thread(account.api.get, path)
        statuses.append(caught.value.status)
    return statuses


def test_the_trainer_uses_every_rule_of_its_role_and_needs_no_other(begun: LiveTraining, tmp_path: Path):
    async def use() -> None:
        async with mounted(begun, tmp_path) as account:
            assert await used_by(THIS_RELEASE, begun, account) == granted(begun)
            assert set(await refused(account, begun.path("configmaps", None))) == {403}

    asyncio.run(use())
    assert "Running" in begun.get("configmaps", "demo-progress")["data"]["progress.json"]
    assert begun.get("configmaps", "demo-history")["binaryData"]


@pytest.mark.worlds("memory")
def test_the_trainer_of_the_release_before_works_with_the_role_of_this_one(begun: LiveTraining, tmp_path: Path):
    """An attempt keeps its image when the operator is upgraded, and its Role is replaced."""
    releases()[-1].unpack(tmp_path / "packages")

    async def use() -> None:
        (tmp_path / "account").mkdir()
        async with mounted(begun, tmp_path / "account") as account:
            assert await used_by(tmp_path / "packages", begun, account) <= granted(begun)

    asyncio.run(use())
