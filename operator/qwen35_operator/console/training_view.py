"""The facts about one training that the console shows: plain frozen data from its object and its events."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from pydantic import ValidationError

from qwen35_operator.api.v1alpha1 import Condition, PoolStatus, TrainingStatus
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.status.printable import printable, printable_object
from qwen35_operator.status.times import parse as parse_time


class StatusUnreadable(ValueError):
    """A training has a status that this version cannot read. The message names the training, the fault and the fix."""


@dataclass(frozen=True)
class WarningEvent:
    """A Warning event of the training."""

    time: datetime
    reason: str
    message: str


@dataclass(frozen=True)
class TrainingView:
    """The facts about one training that `qwen35 status` shows."""

    name: str
    namespace: str
    uid: str
    created: datetime
    generation: int
    mode: str
    profile: str
    max_restarts: int | None
    status: TrainingStatus
    warnings: tuple[WarningEvent, ...] | None = ()
    """The latest warnings, newest first; None without the permission to read events."""

    @classmethod
    def of(cls, raw: KubeObject, warnings: tuple[WarningEvent, ...] | None = ()) -> Self:
        """Return the view of a training's object. Raises StatusUnreadable if its status has an unknown format.

        warnings: the latest Warning events, newest first; None without the permission to read events.
        """
        metadata, spec = raw["metadata"], raw.get("spec") or {}
        try:
            status = TrainingStatus.model_validate(printable_object(raw.get("status") or {}))
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
            raise StatusUnreadable(
                f"this version cannot read the status of {metadata['name']}: {faults}. "
                "Use the qwen35 of the operator's version"
            ) from error
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            created=parse_time(metadata["creationTimestamp"]),
            generation=metadata["generation"],
            mode=printable(spec.get("mode", "FullyAsync")),
            profile=printable((spec.get("accelerator") or {}).get("profile", "")),
            max_restarts=(spec.get("failurePolicy") or {}).get("maxRestarts"),
            status=status,
            warnings=warnings,
        )

    @property
    def state(self) -> str:
        return self.status.state or "Pending"

    @property
    def ended(self) -> bool:
        return self.state in ("Succeeded", "Failed")

    def condition(self, kind: str) -> Condition | None:
        return next((condition for condition in self.status.conditions if condition.type == kind), None)

    def pool(self, name: str) -> PoolStatus | None:
        return next((pool for pool in self.status.pools if pool.name == name), None)

    def idle(self, pool: str) -> float | None:
        """Return the share of time, 0 to 1, in which the pool was idle.

        Returns None while the training does not run, if the trainer has not reported the share, and for the head, whose
        idle time is not measured.
        """
        progress = self.status.progress
        if progress is None or self.state != "Running":
            return None
        return {"rollout": progress.rolloutIdle, "train": progress.trainIdle}.get(pool)


def latest_warnings(events: Sequence[KubeObject], uid: str, count: int) -> tuple[WarningEvent, ...]:
    """Return the newest `count` of the events about the object with this uid, newest first.

    events: raw Event objects of type Warning. The uid excludes events of an earlier training with the same name.
    """
    warnings = [
        WarningEvent(_time(event), printable(event.get("reason", "")), printable(event.get("message", "")))
        for event in events
        if event.get("involvedObject", {}).get("uid") == uid
    ]
    return tuple(sorted(warnings, key=lambda warning: warning.time, reverse=True)[:count])


def _time(event: KubeObject) -> datetime:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"]["creationTimestamp"])
    return parse_time(next(text for text in times if text))
