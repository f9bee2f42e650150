"""One training as a person is to see it: plain frozen data, read from its object and its events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from pydantic import ValidationError

from qwen35_operator.api.v1alpha1 import Condition, PoolStatus, TrainingStatus
from qwen35_operator.status.times import parse as time

type Raw = Mapping[str, Any]


class StatusUnreadable(ValueError):
    """A status that this version does not know; says whose and what."""


@dataclass(frozen=True)
class Warned:
    """A Warning event of the training."""

    time: datetime
    reason: str
    message: str


@dataclass(frozen=True)
class Seen:
    """What there is to show."""

    name: str
    namespace: str
    uid: str
    created: datetime
    generation: int
    mode: str
    profile: str
    most_restarts: int | None
    status: TrainingStatus
    warnings: tuple[Warned, ...] | None = ()
    """The latest, newest first; None when they may not be read."""

    @classmethod
    def of(cls, raw: Raw, warnings: tuple[Warned, ...] | None = ()) -> Self:
        """The training of an object. Raises StatusUnreadable."""
        about, spec = raw["metadata"], raw.get("spec") or {}
        try:
            status = TrainingStatus.model_validate(raw.get("status") or {})
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
            raise StatusUnreadable(
                f"the status of {about['name']} is not one that this version knows: {wrong}. "
                "Use the qwen35 of the operator's version"
            ) from error
        return cls(
            name=about["name"],
            namespace=about["namespace"],
            uid=about["uid"],
            created=time(about["creationTimestamp"]),
            generation=about["generation"],
            mode=spec.get("mode", "FullyAsync"),
            profile=(spec.get("accelerator") or {}).get("profile", ""),
            most_restarts=(spec.get("failurePolicy") or {}).get("maxRestarts"),
            status=status,
            warnings=warnings,
        )

    @property
    def state(self) -> str:
        return self.status.state or "Pending"

    @property
    def over(self) -> bool:
        return self.state in ("Succeeded", "Failed")

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == kind), None)

    def pool(self, name: str) -> PoolStatus | None:
        return next((one for one in self.status.pools if one.name == name), None)

    def idle(self, pool: str) -> float | None:
        """Share of time, 0 to 1; None while nothing runs. The head is not measured."""
        progress = self.status.progress
        if progress is None or self.state != "Running":
            return None
        return {"rollout": progress.rolloutIdle, "train": progress.trainIdle}.get(pool)


def warned(events: Sequence[Raw], uid: str, most: int) -> tuple[Warned, ...]:
    """The newest events of the object with this uid: an earlier training of its name had others."""
    mine = [event for event in events if event.get("involvedObject", {}).get("uid") == uid]
    found = [Warned(_when(event), event.get("reason", ""), event.get("message", "")) for event in mine]
    return tuple(sorted(found, key=lambda one: one.time, reverse=True)[:most])


def _when(event: Raw) -> datetime:
    given = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"]["creationTimestamp"])
    return time(next(one for one in given if one))
