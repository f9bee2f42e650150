"""Nothing is accepted that cannot run, and what may change in a training is what its attempt can take over.

manifest ─► API server ─┬─ refused ──► the models refuse it too
                        └─ admitted ─► decide ─┬─► Accepted=False, with every reason
                                               └─► children and pods that the API server admits
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from qwen35_operator.api.rules import RULES, Rule
from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired import pod_size
from qwen35_operator.desired.pod_overrides import label_syntax
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import acceptance
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.decision import Decision
from qwen35_operator.reconcile.new_status import status_after_refusal
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.writes import Create, RefusedWrite
from qwen35_trainer.manifest import ManifestError, check_new, parse_manifest, parse_spec
from qwen35_trainer.manifest.checks import CHECKS, NEW_TRAINING_CHECKS
from tests.controlplane import kept
from tests.controlplane.manifests import manifests
from tests.controlplane.pod_templates import FRAGMENTS, joined
from tests.manifest.conftest import SMALL, set_at
from tests.manifest.test_checks import CASES
from tests.operator.desired.pod_overrides.test_label_syntax import (
    KEY_PLACES,
    KEYS,
    NO_KEYS,
    NO_VALUES,
    VALUE_PLACES,
    VALUES,
)
from tests.testbed.api import Refused as ApiRefused
from tests.testbed.control_plane import ControlPlane

Eventually = Callable[..., None]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DRY = "?dryRun=All&fieldValidation=Strict"
KNOWN = {
    "reward_patterns": "CEL cannot tell whether a text is a regular expression",
    "rule_patterns": "CEL cannot tell whether a text is a regular expression",
    "vllm_arguments": "CEL cannot read a map whose values have no type",
    "transformer_settings": "CEL cannot read a map whose values have no type",
    "random_model": "only for characters that repeat: CEL would have to compare each of 512 with every other",
}
"""Checks that the API server does not make, and why."""
UNTYPED = (".gym.config.", ".vllm.extraArguments.", ".overrideTransformerConfig.")
"""The places whose values have no type in the definition: structural schemas have no unions."""
COLLECTIONS = {
    "Qwen35Training": "apis/rl.qwen35.io/v1alpha1/namespaces/{}/qwen35trainings",
    "RayJob": "apis/ray.io/v1/namespaces/{}/rayjobs",
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "Pod": "api/v1/namespaces/{}/pods",
    "ServiceAccount": "api/v1/namespaces/{}/serviceaccounts",
    "Role": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
DRAWING = 120.0
"""Seconds for which soak draws manifests of a kind."""
RANDOM = settings(
    database=None, deadline=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)
# Rules of one check of the models that the table of its cases does not tell apart.
ALSO = {
    "group of one, RLOO": (
        {"algorithm": {"groupSize": 1, "advantage": "RLOO"}},
        "spec.algorithm.groupSize",
        {"algorithm": {"groupSize": 2, "advantage": "RLOO"}},
    ),
}


def collection(kind: str, namespace: str) -> str:
    return "/" + COLLECTIONS[kind].format(namespace)


def created(plane: ControlPlane, namespace: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The object as it is stored, with its defaults; None when it is refused."""
    try:
        return plane.api.post(f"{collection('Qwen35Training', namespace)}?fieldValidation=Strict", manifest)
    except ApiRefused as refused:
        if refused.status not in (400, 422):
            raise
        return None


def deleted(plane: ControlPlane, stored: dict[str, Any]) -> None:
    metadata = stored["metadata"]
    path = collection("Qwen35Training", metadata["namespace"])
    plane.api.request("DELETE", f"{path}/{metadata['name']}")


def observed(stored: dict[str, Any]) -> Observed:
    """What the operator sees of a new object."""
    metadata, (spec, problems) = stored["metadata"], parse_spec(stored["spec"])
    who = (metadata["name"], metadata["namespace"], metadata["uid"])
    training = None
    if spec is not None and not problems:
        labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
        training = TrainingResource(*who, metadata["generation"], spec, labels, annotations)
    return Observed(
        training=training,
        name=who[0],
        namespace=who[1],
        uid=who[2],
        generation=metadata["generation"],
        version=metadata["resourceVersion"],
        created=NOW,
        deleting=False,
        status=TrainingStatus(),
        problems=tuple(problems),
    )


def condition(status: TrainingStatus, kind: str) -> Any:
    return next(item for item in status.conditions if item.type == kind)


def assert_status_is_admitted(plane: ControlPlane, stored: dict[str, Any], status: TrainingStatus) -> None:
    path = f"{collection('Qwen35Training', stored['metadata']['namespace'])}/{stored['metadata']['name']}/status"
    body = {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    plane.api.request("PATCH", path + DRY, body, content="application/merge-patch+json")


def first_refusal(plane: ControlPlane, decision: Decision) -> RefusedWrite | None:
    """Creates the children in a dry run, as far as the API server goes along."""
    for action in decision.writes:
        if isinstance(action, Create):
            manifest = action.manifest
            try:
                plane.api.post(collection(manifest["kind"], manifest["metadata"]["namespace"]) + DRY, manifest)
            except ApiRefused as refused:
                return RefusedWrite(action, "Rejected", refused.message)
    return None


def job_of(decision: Decision) -> dict[str, Any]:
    made = [write.manifest for write in decision.writes if isinstance(write, Create)]
    return next(dict(manifest) for manifest in made if manifest["kind"] == "RayJob")


def pods_of(decision: Decision) -> list[dict[str, Any]]:
    """The pods that KubeRay would make, without what it adds."""
    job = job_of(decision)
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    metadata = {"generateName": "pod-", "namespace": job["metadata"]["namespace"]}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": group["template"]["metadata"] | metadata,
            # The account comes with the children, which a dry run leaves uncreated.
            "spec": {k: v for k, v in group["template"]["spec"].items() if not k.startswith("serviceAccount")},
        }
        for group in groups
    ]


def assert_runs_or_says_why(plane: ControlPlane, stored: dict[str, Any], *, templates: bool) -> None:
    """`templates`: whether pod templates may be such that only the API server finds the fault."""
    # One that is created suspended has its say when it is resumed.
    stored["spec"]["suspend"] = False
    seen = observed(stored)
    decision = decide(seen, OperatorSettings(), NOW)
    accepted = condition(decision.status, "Accepted")
    if accepted.status == "True":
        if (refused := first_refusal(plane, decision)) is None:
            assert_status_is_admitted(plane, stored, decision.status)
            if not templates:
                for pod in pods_of(decision):
                    plane.api.post(collection("Pod", seen.namespace) + DRY, pod)
            return
        assert templates, refused
        assert refused.write.manifest["kind"] == "RayJob"
        status = status_after_refusal(seen, decision, [refused], NOW)
        assert condition(status, "Accepted").status == "False"
        assert refused.message[:1000] in condition(status, "Accepted").message
        assert_status_is_admitted(plane, stored, status)
        return
    assert not decision.writes
    assert accepted.reason == "Invalid"
    problems = list(seen.problems)
    if (training := seen.training) is not None:
        problems += acceptance.refusals(training, OperatorSettings())
        problems += [*check_new(training.spec), *pod_size.problems(training)]
    listed = "; ".join(f"{item.path}: {item.message} {item.fix}" for item in problems)
    assert problems
    assert accepted.message == listed[:4096]
    assert_status_is_admitted(plane, stored, decision.status)


def assert_no_arithmetic_is_left(stored: dict[str, Any]) -> None:
    """What the API server let through, the models refuse for listed reasons only."""
    spec, problems = parse_spec(stored["spec"])
    if spec is None:
        assert any(place in problem.path for place in UNTYPED for problem in problems), problems
        assert_no_arithmetic_is_left(without_untyped(stored))
        return
    left = {check.__name__: list(check(spec)) for check, _ in (*CHECKS, *NEW_TRAINING_CHECKS)}
    unlisted = {name: messages for name, messages in left.items() if messages and name not in KNOWN}
    assert not unlisted
    assert all(item.path.endswith(".characters") for item in left["random_model"])


def without_untyped(value: Any) -> Any:
    """A copy in which the settings without a type are empty. Problems next to them, such as a wrong pattern, then remain."""
    if isinstance(value, list):
        return [without_untyped(each) for each in value]
    if not isinstance(value, dict):
        return value
    untyped = {place.rpartition(".")[0].rpartition(".")[2] for place in UNTYPED}
    return {name: {} if name in untyped else without_untyped(each) for name, each in value.items()}


def assert_the_models_refuse_it_too(manifest: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(json.loads(json.dumps(manifest)))


@dataclass
class Jobs:
    """RayJobs held back by `suspend`: KubeRay validates them like any other, and makes no pods."""

    plane: ControlPlane
    namespace: str
    names: list[str] = field(default_factory=list)

    def add(self, stored: dict[str, Any]) -> None:
        """The first attempt's, under a name of the same length."""
        decision = decide(observed(stored), OperatorSettings(), NOW)
        if condition(decision.status, "Accepted").status != "True":
            return
        job = deepcopy(job_of(decision))
        name = job["metadata"]["name"]
        # Without its owner, which is about to go.
        del job["metadata"]["ownerReferences"]
        job["metadata"]["name"] = f"{name[:1]}{len(self.names):04d}{name[5:]}"
        job["spec"]["suspend"] = True
        try:
            self.plane.api.post(collection("RayJob", self.namespace), job)
        except ApiRefused:
            return
        self.names.append(job["metadata"]["name"])

    def states(self) -> dict[str, str]:
        """Name by deployment state, of those that KubeRay has seen and is done with."""
        passing = ("", "Initializing", "Suspending")
        jobs = self.plane.api.get(collection("RayJob", self.namespace))["items"]
        states = {job["metadata"]["name"]: job.get("status", {}).get("jobDeploymentStatus", "") for job in jobs}
        return {name: state for name, state in states.items() if name in self.names and state not in passing}


def assert_kuberay_takes_them(jobs: Jobs, eventually: Eventually, *, at_least: int) -> None:
    assert len(jobs.names) >= at_least
    eventually(lambda: len(jobs.states()) == len(jobs.names), "KubeRay has seen every job")
    assert set(jobs.states().values()) == {"Suspended"}


def try_sane(plane: ControlPlane, namespace: str, manifest: dict[str, Any], jobs: Jobs) -> bool:
    """Whether it is admitted; then it runs, or says why, and if not the models refuse it as well."""
    stored = created(plane, namespace, manifest)
    if stored is None:
        assert_the_models_refuse_it_too(manifest)
        return False
    try:
        assert_no_arithmetic_is_left(stored)
        assert_runs_or_says_why(plane, stored, templates=False)
        jobs.add(stored)
    finally:
        deleted(plane, stored)
    return True


def try_mad(plane: ControlPlane, namespace: str, manifest: dict[str, Any], jobs: Jobs) -> bool:
    """Whether it is admitted; then it runs, or says why."""
    if (stored := created(plane, namespace, manifest)) is None:
        return False
    try:
        assert_runs_or_says_why(plane, stored, templates=True)
        jobs.add(stored)
    finally:
        deleted(plane, stored)
    return True


TRY = {"sane": try_sane, "mad": try_mad}


@pytest.mark.parametrize("kind", TRY)
def test_whatever_is_admitted_runs_or_says_why_and_both_refuse_the_same(
    control_plane: ControlPlane, namespace: str, eventually: Eventually, kind: str
):
    """The manifests of kept.py, which between them reach every field and every fragment."""
    jobs = Jobs(control_plane, namespace)
    admitted = Counter(TRY[kind](control_plane, namespace, item, jobs) for item in kept.load()[kind])
    assert min(admitted[True], admitted[False]) >= 5
    assert_kuberay_takes_them(jobs, eventually, at_least=5)


@pytest.mark.soak
@pytest.mark.parametrize("kind", TRY)
def test_whatever_is_drawn_and_admitted_runs_or_says_why(
    control_plane: ControlPlane, namespace: str, eventually: Eventually, kind: str
):
    """New manifests until the time is over."""
    jobs, admitted, until = Jobs(control_plane, namespace), Counter(), time.monotonic() + DRAWING

    while time.monotonic() < until:
        drawn = random.SystemRandom().randrange(2**32)
        print(f"hypothesis seed {drawn}")

        @seed(drawn)
        @settings(RANDOM, max_examples=50)
        @given(manifest=manifests(mad=kind == "mad"))
        def check(manifest: dict[str, Any]) -> None:
            admitted[TRY[kind](control_plane, namespace, manifest, jobs)] += 1

        check()
    print(f"{kind}: {admitted[True]} admitted, {admitted[False]} refused")
    assert min(admitted[True], admitted[False]) > 0
    assert_kuberay_takes_them(jobs, eventually, at_least=1)


def test_every_rule_of_the_definition_refuses_what_the_models_refuse(control_plane: ControlPlane, namespace: str):
    """The specs of tests/manifest/test_checks.py, of which each fails one check and has a twin that passes."""
    refusals: list[str] = []
    for name, (wrong, _, right) in [*CASES.items(), *ALSO.items()]:
        spec, problems = parse_spec(spec_of(wrong))
        assert problems, name
        failed = {check.__name__ for check, _ in (*CHECKS, *NEW_TRAINING_CHECKS) if list(check(spec))}
        refusal = refusal_of(control_plane, namespace, spec_of(wrong))
        repeated = "random_model" not in failed or all(item.path.endswith(".characters") for item in problems)
        assert (refusal is None) == (failed <= KNOWN.keys() and repeated), (name, refusal)
        refusals += [refusal or ""]
        assert refusal_of(control_plane, namespace, spec_of(right)) is None, name
    unused = [rule.message for rule in creation_rules() if not any(told(rule, refusal) for refusal in refusals)]
    assert not unused


def refusal_of(plane: ControlPlane, namespace: str, spec: dict[str, Any], name: str = "demo") -> str | None:
    envelope = {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": {"name": name}}
    try:
        plane.api.post(collection("Qwen35Training", namespace) + DRY, envelope | {"spec": spec})
    except ApiRefused as refused:
        if refused.status != 422:
            raise
        return refused.message
    return None


def spec_of(changes: dict[str, Any]) -> dict[str, Any]:
    spec = deepcopy(SMALL["spec"])
    for path, value in changes.items():
        set_at(spec, path, value)
    return spec


def creation_rules() -> list[Rule]:
    """Those that an object alone can break; test_changes.py is about the others."""
    rules = [rule for place, listed in RULES.items() if place for rule in listed]
    return [rule for rule in rules if "oldSelf" not in rule.rule]


def told(rule: Rule, refusal: str) -> bool:
    """Whether the refusal is this rule's: by the text between the values, where it has some."""
    text = rule.message if rule.expression is None else rule.expression.split("'")[1]
    return re.search(".*".join(map(re.escape, re.split("%[ds]", text))), refusal) is not None


@pytest.mark.parametrize(
    ("place", "texts", "template"),
    [
        *((place, [*VALUES, *NO_VALUES], template) for place, template in VALUE_PLACES.items()),
        *((place, [*KEYS, *NO_KEYS], template) for place, template in KEY_PLACES.items()),
        ("metadata.annotations.{}", [*KEYS, *NO_KEYS], lambda key: {"metadata": {"annotations": {key: "x"}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_labels_that_no_pod_may_have_are_those_that_are_refused(
    control_plane: ControlPlane, namespace: str, place: str, texts: list[str], template: Callable[[str], dict[str, Any]]
):
    for text in texts:
        change = template(text)
        pod = {"metadata": {"labels": {}} | change.get("metadata", {}), "spec": change.get("spec", {})}
        problems = list(label_syntax.problems(pod, "spec.pods.train"))
        body = {
            "metadata": pod["metadata"] | {"name": "probe"},
            "spec": pod["spec"] | {"containers": [{"name": "ray", "image": "none"}]},
        }
        # A key that no node can have is admitted there, and spreads nothing.
        stricter = place == "spec.topologySpreadConstraints[0].topologyKey"
        assert bool(problems) == refused(control_plane, collection("Pod", namespace), body) or (
            problems and stricter
        ), text


def refused(plane: ControlPlane, path: str, body: dict[str, Any]) -> bool:
    try:
        plane.api.post(path + DRY, body)
    except ApiRefused as answer:
        if answer.status != 422:
            raise
        return True
    return False


@pytest.mark.parametrize("profile", ["NVIDIA", "Ascend", "CPU"])
def test_kuberay_makes_the_pods_of_every_pool(
    control_plane: ControlPlane, namespace: str, eventually: Eventually, profile: str
):
    """With every fragment in every pool, as far as they go together, and with a straggler lane where Torch has one."""
    lane = {"nodes": 1, "tensorParallel": 2, "afterTokens": 9} if profile == "CPU" else None
    pods: dict[str, Any] = {}
    for pool, start in (("head", 0), ("rollout", 1), ("train", 2)):
        pods[pool] = joined(FRAGMENTS[start::3])
    spec = {
        "accelerator": {"profile": profile, "devicesPerNode": 2},
        "model": {"name": "tiny", "source": {"random": {}}},
        "data": {"train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 8}}]},
        "rewards": [{"type": "Gym"}],
        "rollout": {"nodes": 2, "stragglerLane": lane} if lane else {"nodes": 2},
        "pods": pods,
    }
    envelope = {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": {"name": "a" * 40}}
    stored = control_plane.api.post(collection("Qwen35Training", namespace), envelope | {"spec": spec})
    for action in decide(observed(stored), OperatorSettings(), NOW).writes:
        if isinstance(action, Create):
            control_plane.api.post(collection(action.manifest["kind"], namespace), action.manifest)

    def labels(name: str) -> list[str]:
        made = control_plane.api.get(collection("Pod", namespace))["items"]
        values = (pod["metadata"]["labels"].get(f"rl.qwen35.io/{name}") for pod in made)
        return sorted(value for value in values if value is not None)

    eventually(lambda: labels("pool") == ["head", "rollout", "rollout", "train"], "every pool has its pods")
    assert labels("straggler-lane") == (["false", "true"] if lane else [])
    (job,) = control_plane.api.get(collection("RayJob", namespace))["items"]
    assert job["status"]["jobDeploymentStatus"] in ("Initializing", "Running")
