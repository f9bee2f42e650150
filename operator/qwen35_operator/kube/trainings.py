"""The trainings from kopf's events, stored as compact JSON: a parsed object takes ten times as much memory."""

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qwen35_operator.desired.object_names import FORCE_START, RETRY, UPDATE
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.desired.queueing import copied_to_job
from qwen35_operator.kube import shallow_json
from qwen35_operator.kube.error_log import ErrorLog
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.object_parsing import MAX_REQUEST_CHARACTERS
from qwen35_operator.kube.shared_strings import shared
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.watch import WatchName, blind, not_listed, where
from qwen35_trainer.manifest import Problem

IDENTITY = ("namespace", "name", "uid", "resourceVersion")
METADATA_FIELDS = frozenset(
    {*IDENTITY, "generation", "creationTimestamp", "deletionTimestamp", "finalizers", "labels", "annotations"}
)
"""Fields of the metadata that are stored. Of labels and annotations, those that RayJobs copy, and OWN_ANNOTATIONS."""
OWN_ANNOTATIONS = (RETRY, UPDATE, FORCE_START)
CONDENSED = "condensed"
"""Field of a condensed training: its state, whether its spec and its requests are served, and its text as JSON (`condensed`)."""
MAX_SPEC_BYTES = 256 * 1024
"""Maximum size of a spec as JSON, with the labels and annotations that RayJobs copy. A larger training is not accepted. The examples
have at most 4 KiB."""
MAX_NEW_PODS_BYTES = 64 * 1024
"""Maximum size of spec.pods as JSON in a training that has had no attempt. The schema keeps unknown fields of pods, and the operator does
nothing else while it reads and checks them. Lists of data files may be longer. Of gym.config, vllm.extraArguments and
train.overrideTransformerConfig the schema keeps any values too, which only MAX_SPEC_BYTES limits."""
OVERSIZED, OVERSIZED_PODS = "oversizedSpecBytes", "oversizedPodsBytes"
"""Fields of a stored training whose spec was left out: the size of the spec, or of spec.pods, in bytes."""
RESTING_STATES = ("Suspended", "Succeeded", "Failed")
"""States in which a training waits until somebody changes it, or until its objects are old enough to be deleted."""
MAX_SPEC_DEPTH = 64
"""Maximum number of levels of objects and lists in a spec. The examples have at most 12."""
TOO_DEEP = "specDepth"
"""Field of a stored training whose spec was left out: the number of levels that were read."""
LEFT_OUT = (OVERSIZED, OVERSIZED_PODS, TOO_DEEP)
"""Fields of which a stored training whose spec was left out has one."""


@dataclass
class TrainingWatch:
    """Whether the trainings of one namespace, or of all namespaces if `namespace` is None, are up to date."""

    namespace: str | None
    problem: Problem | None = None
    """Why the trainings cannot be watched; None while they can."""
    listed: bool = False
    """Whether kopf has listed the trainings. Stays so when kopf is started again."""
    seen_at: float = field(default_factory=time.monotonic)
    """When the API server last answered kopf's list or watch, by time.monotonic; at first the start of the process."""

    errors: ErrorLog = field(init=False)

    def __post_init__(self) -> None:
        self.errors = ErrorLog(f"{TRAINING.resource} in {where(self.namespace)}")

    def answered(self) -> None:
        """Record that the API server has answered a list or a watch of kopf."""
        self.seen_at = time.monotonic()

    def obstacle(self) -> Problem | None:
        """Return the problem that keeps the stored trainings from being up to date; None if they are up to date.

        The problem is that trainings cannot be watched or are not listed yet, or that the API server does not answer.
        """
        if self.problem is None and not self.listed:
            return not_listed((TRAINING,), self.namespace)
        return self.problem or blind(TRAINING, self.namespace, self.seen_at)


class _Body(NamedTuple):
    version: int
    uid: str
    state: str
    is_served: bool
    text: bytes
    """The object as JSON, without parts that decisions do not read."""


class Trainings:
    """The newest known object of each training, as far as the operator reads it.

    A spec that is too large or nested too deeply is also left out (LEFT_OUT), so that objects of one user cannot exhaust the
    operator's memory or exceed Python's recursion limit.
    """

    def __init__(self, namespaces: Sequence[str] = ()) -> None:
        """Create an empty store. namespaces: those whose trainings are watched; empty for all."""
        self._watches = {namespace: TrainingWatch(namespace) for namespace in namespaces or (None,)}
        self._bodies: dict[TrainingKey, _Body] = {}
        self._states: Counter[str] = Counter()

    @property
    def watches(self) -> tuple[TrainingWatch, ...]:
        """The watch of each namespace, or of all namespaces."""
        return tuple(self._watches.values())

    def __len__(self) -> int:
        return len(self._bodies)

    def __iter__(self) -> Iterator[TrainingKey]:
        return iter(tuple(self._bodies))

    def by_urgency(self) -> list[TrainingKey]:
        """Return the keys of all trainings: first those that start, stop or wait, then those that run, then those in RESTING_STATES.

        Most trainings are in one of these states, and those that run are reconciled with their next report too.
        """
        urgency = {"Running": 1} | dict.fromkeys(RESTING_STATES, 2)
        return sorted(self._bodies, key=lambda key: urgency.get(self._bodies[key].state, 0))

    def state(self, key: TrainingKey) -> str:
        """Return the state of a stored training; Pending if it has no status."""
        return self._bodies[key].state

    def version(self, key: TrainingKey) -> int:
        """Return the resourceVersion of a stored training."""
        return self._bodies[key].version

    def is_served(self, key: TrainingKey) -> bool:
        """Return whether the status of a stored training answers its spec, and it is neither being deleted nor to be tried again."""
        return self._bodies[key].is_served

    def put(self, raw: KubeObject) -> bool:
        """Store a training's object and return True; return False if the same or a later version is already stored.

        raw: the object as the API server returns it, or the result of `condensed`.
        """
        metadata = raw["metadata"]
        key, version = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        stored = self._bodies.get(key)
        if stored is not None and version <= stored.version:
            return False
        body = raw if CONDENSED in raw else condensed(raw)
        summary = body[CONDENSED]
        state, text = shared(summary["state"]), summary["text"].encode()
        self._drop(key)
        self._bodies[key] = _Body(version, metadata["uid"], state, summary["isServed"], text)
        self._states[state] += 1
        return True

    def put_own(self, raw: KubeObject) -> None:
        """Store the object that the API server returned for a write of the operator, unless it was deleted meanwhile."""
        metadata = raw["metadata"]
        stored = self._bodies.get((metadata["namespace"], metadata["name"]))
        if stored is not None and stored.uid == metadata["uid"]:
            self.put(raw)

    def remove(self, key: TrainingKey, uid: str) -> None:
        """Remove a deleted training, unless another training with the same name has been stored since."""
        stored = self._bodies.get(key)
        if stored is not None and stored.uid == uid:
            self._drop(key)

    def forget_unlisted(self, namespace: str | None, listed: Collection[tuple[TrainingKey, str]], version: int) -> None:
        """Remove the trainings that a complete list of a namespace lacks: their deletion was not reported.

        namespace: None for all namespaces. listed: key and uid of each training in the list. version: resourceVersion
        of the list; a training that has changed since is kept.
        """
        for key, stored in list(self._bodies.items()):
            if namespace in (None, key[0]) and stored.version <= version and (key, stored.uid) not in listed:
                self._drop(key)

    def get(self, key: TrainingKey) -> dict[str, Any] | None:
        """Return a copy of the training's object; None if the training is not known."""
        stored = self._bodies.get(key)
        return None if stored is None else json.loads(stored.text)

    def obstacles(self, namespace: str | None) -> list[Problem]:
        """Return the problems that keep the trainings of a watched namespace from being up to date. namespace: None for all."""
        watch = self._watches.get(namespace)
        problem = None if watch is None else watch.obstacle()
        return [] if problem is None else [problem]

    def silent_seconds(self) -> dict[WatchName, float]:
        """Return the seconds since the API server last answered kopf, for each watched namespace."""
        now = time.monotonic()
        return {WatchName(TRAINING.resource, watch.namespace): now - watch.seen_at for watch in self.watches}

    def states(self) -> Counter[str]:
        """Return the number of trainings in each state. Trainings without a status count as Pending."""
        return +self._states

    def _drop(self, key: TrainingKey) -> None:
        """Remove a training's object, if there is one."""
        if (stored := self._bodies.pop(key, None)) is not None:
            self._states[stored.state] -= 1


def condensed(raw: KubeObject) -> dict[str, Any]:
    """Return a training's identity and the fields of CONDENSED. The stored object is text, because parsed it takes ten times the memory.

    The text lacks managedFields, owners, labels and annotations that the operator does not read, and what is too large or too deep.
    """
    metadata = {name: value for name, value in raw["metadata"].items() if name in METADATA_FIELDS}
    labels, annotations = (metadata.get(name) or {} for name in ("labels", "annotations"))
    own = {key: annotations[key][:MAX_REQUEST_CHARACTERS] for key in OWN_ANNOTATIONS if key in annotations}
    labels, annotations = copied_to_job(labels), copied_to_job(annotations)
    spec = _compact(raw.get("spec") or {})
    body = {name: value for name, value in raw.items() if name != "spec"}
    body["metadata"] = metadata | {"labels": labels, "annotations": annotations | own}
    size = len(spec) + sum(len(_compact(entries)) for entries in (labels, annotations) if entries)
    if left_out := _left_out(raw, spec, size):
        body |= left_out
        spec = b"{}"
    if OVERSIZED in left_out:  # the labels and annotations may be what is large
        body["metadata"] = metadata | {"labels": {}, "annotations": own}
    identity = {name: raw["metadata"][name] for name in IDENTITY}
    status = raw.get("status") or {}
    summary = {"state": status.get("state", "Pending"), "isServed": _is_served(metadata, own.get(RETRY, ""), status)}
    # The spec, which may be large, is written once.
    text = _compact(body).removesuffix(b"}") + b',"spec":' + spec + b"}"
    return {"metadata": identity, CONDENSED: summary | {"text": text.decode()}}


def _left_out(raw: KubeObject, spec: bytes, size: int) -> dict[str, int]:
    """Return one of the fields LEFT_OUT if the spec cannot be read, and otherwise none.

    spec: as JSON. size: that of the spec, and of the labels and annotations that RayJobs copy.
    """
    if size > MAX_SPEC_BYTES:
        return {OVERSIZED: size}
    if len(spec) > MAX_NEW_PODS_BYTES and not (raw.get("status") or {}).get("attempts"):
        pods = len(_compact(raw["spec"].get("pods")))
        if pods > MAX_NEW_PODS_BYTES:
            return {OVERSIZED_PODS: pods}
    levels = shallow_json.depth(spec)
    return {TOO_DEEP: levels} if levels > MAX_SPEC_DEPTH else {}


def _is_served(metadata: dict[str, Any], retry: str, status: dict[str, Any]) -> bool:
    """Return whether the operator has acted on the spec and on `retry`, the annotation RETRY, and no deletion was requested."""
    is_known = metadata.get("generation") == status.get("observedGeneration") and retry in ("", status.get("retry"))
    return is_known and "deletionTimestamp" not in metadata


def _compact(value: object) -> bytes:
    """Return JSON without spaces, with ? in place of halves of letters, which UTF-8 lacks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
