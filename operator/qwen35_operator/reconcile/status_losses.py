"""Pauses trainings of whose status the API server does not store all fields, because the installed CRD is that of an earlier release.

    status written ─► answer lacks fields ─► error, event ─► no reconcile of the training for a while ─► again
                  └─► answer has all ──────────────────────────────────────────────────────────────────► as usual

Decisions depend on the status. Without its fields, the operator would decide, and write, the same again and again: it would try a failed
training without end. The pause doubles with each loss in a row, so that 500 trainings cost few requests. After an upgrade of the CRD, the
operator continues without a restart. Only the training that loses fields waits, because a webhook of its namespace may be the reason.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from qwen35_operator.kube.store import TrainingKey

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 60.0, 600.0
MAX_NAMED_FIELDS: Final = 10
"""Maximum number of fields that a message names."""


class _Pause(NamedTuple):
    seconds: float
    until: datetime


class StatusLosses:
    """The trainings that are paused, and for how long."""

    def __init__(self) -> None:
        self._paused: dict[TrainingKey, _Pause] = {}

    def wait(self, key: TrainingKey, now: datetime) -> float:
        """Return for how many more seconds a training is paused; 0 or less if it is not."""
        pause = self._paused.get(key)
        return 0.0 if pause is None else (pause.until - now).total_seconds()

    def record(self, key: TrainingKey, lost: list[str], now: datetime) -> str | None:
        """Record which fields of the status a write has lost. Returns the message to report, or None if none was lost."""
        before = self._paused.pop(key, None)
        if not lost:
            return None
        over = now - timedelta(seconds=MAX_PAUSE_SECONDS)
        self._paused = {other: pause for other, pause in self._paused.items() if pause.until > over}  # others are gone
        seconds = FIRST_PAUSE_SECONDS if before is None else min(2 * before.seconds, MAX_PAUSE_SECONDS)
        self._paused[key] = _Pause(seconds, now + timedelta(seconds=seconds))
        fields = ", ".join(lost[:MAX_NAMED_FIELDS])
        return (
            f"the API server does not store {fields}, so the operator does nothing about this training for {seconds:g} s. The installed "
            "CRD is that of an earlier release, or a webhook removes the fields: apply what `qwen35 crd` of the operator's release prints"
        )


def lost_fields(sent: Mapping[str, Any], stored: Mapping[str, Any], place: str) -> list[str]:
    """Return the paths of the fields of a merge patch that the stored object lacks. place: the path of the object.

    The fields of objects in lists are compared too, if the list has been stored with all its items.
    """
    lost: list[str] = []
    for name, value in sent.items():
        here, kept = f"{place}.{name}", stored.get(name)
        if value is None:
            continue
        if name not in stored:
            lost.append(here)
        elif isinstance(value, Mapping) and isinstance(kept, Mapping):
            lost += lost_fields(value, kept, here)
        elif isinstance(value, list) and isinstance(kept, list) and len(value) == len(kept):
            for ours, theirs in zip(value, kept, strict=True):
                if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                    lost += lost_fields(ours, theirs, f"{here}[]")
    return list(dict.fromkeys(lost))
