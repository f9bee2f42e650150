"""Reconciles one training once: observe, decide, write, report.

    key ─► body ─► observe ─► decide ─► write ─┬─► status, if it changed ─► again after …
                                     refused ──┘ (the status then explains the refusal)

A training that was written often may have to wait before the writes (write_pace.py).

Only caches survive between two reconciles. If a reconcile is interrupted, or ends because an object has changed since
it was observed (409 Conflict), the next one takes the steps that are missing.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.kube.api_errors import ApiError, Forbidden, Invalid, NotFound
from qwen35_operator.kube.client import MERGE_PATCH, METADATA, Client
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.merge_patch import merge_patch
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.new_status import status_after_refusal
from qwen35_operator.reconcile.observe import TrainingParser, observe
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.status_losses import StatusLosses, lost_fields
from qwen35_operator.reconcile.turn_budget import TurnBudget
from qwen35_operator.reconcile.write_pace import WritePace
from qwen35_operator.reconcile.writer import ClusterWriter
from qwen35_operator.reconcile.writes import Create, PostEvent, is_repair

logger = logging.getLogger(__name__)

WEBHOOK_FAILED: Final = "failed calling webhook"
"""Part of the API server's answer if it cannot call a webhook. Other errors with status 500 are of etcd, and pass."""


class Refusal(Exception):
    """Raised if the API server refused a write. The status then explains the refusal. A later try may succeed."""

    def __init__(self, message: str, after: float | None) -> None:
        """Create the exception. after: the seconds after which the training must be reconciled at the latest, or None."""
        super().__init__(message)
        self.after = after


class Reconciler:
    """Reconciles trainings: observes one, decides, writes, and records the result in its status.

    Each leadership has a reconciler of its own, which is created when the leadership begins and the cache is complete.
    """

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        cache: ObjectCache,
        trainings: Trainings,
        progressed: Callable[[TrainingKey], None] = lambda key: None,
        may_write: Callable[[], bool] = lambda: True,
        known_version: int = 0,
    ) -> None:
        """Create a reconciler. known_version: see `Election`."""
        self._settings = settings
        self._client = client
        self._cache = cache
        self._trainings = trainings
        self._writer = ClusterWriter(client, cache, "qwen35-operator", progressed, may_write)
        self._parser = TrainingParser()
        self._pace = WritePace()
        self._leading_since, self._known_version = client.now(), known_version
        self._losses = StatusLosses()
        self._turn = TurnBudget()

    async def reconcile(self, key: TrainingKey) -> float | None:
        """Reconcile the training. Returns the seconds until the next reconcile, or None to wait for an event.

        Raises Refusal if the API server refused a write, Conflict if an object has changed since it was observed,
        another ApiError if a request failed, and NotLeading if another process may lead by now.
        """
        raw = self._trainings.get(key)
        if raw is None:
            return None
        if (wait := self._losses.wait(key, self._client.now())) > 0:
            return wait
        everywhere = not self._settings.namespaces
        observed = await observe(
            raw,
            self._cache,
            self._parser,
            self._client,
            reads_nodes=everywhere,
            reports_since=self._leading_since,
            known_version=self._known_version,
            running=self._trainings.states()["Running"],
            budget_try=self._writer.budget_try(raw["metadata"]["uid"]),
        )
        now: datetime = self._client.now()
        await self._turn.available()
        with self._turn.spending():
            decision = decide(observed, self._settings, now)
        if decision.writes or _changes(raw, decision.status):
            if (wait := self._pace.wait(key, now)) > 0:
                return min(wait, decision.after or wait)
            self._pace.wrote(key, now)
        if any(isinstance(write, Create) for write in decision.writes) and not await self._exists(observed):
            return None
        refused = await self._writer.write(observed, decision.writes)
        if not refused:
            await self._write_status(observed, raw, decision.status)
            return decision.after
        await self._write_status(observed, raw, status_after_refusal(observed, decision, refused, now))
        after = decision.after if all(is_repair(refusal.write) for refusal in refused) else None
        raise Refusal("; ".join(refusal.message for refusal in refused), after)

    async def _exists(self, observed: Observed) -> bool:
        """Return whether the training still exists, and is not being deleted without a last checkpoint.

        A training that does not exist any more is also removed from the known trainings: kopf does not report trainings
        that were deleted while its watch was interrupted. For such a training the operator would create children and
        the garbage collector would delete them, forever. The request is affordable, because the operator rarely creates
        objects.
        """
        try:
            raw = await self._client.get(TRAINING.path(observed.namespace, observed.name), accept=METADATA)
        except NotFound:
            self._forget(observed)
            return False
        if raw["metadata"]["uid"] != observed.uid:
            self._forget(observed)
            return False
        return "deletionTimestamp" not in raw["metadata"] or observed.saves_before_deletion

    def _forget(self, observed: Observed) -> None:
        self._trainings.remove((observed.namespace, observed.name), observed.uid)

    async def _write_status(self, observed: Observed, raw: dict[str, Any], status: TrainingStatus) -> None:
        """Write the changed fields of the status. Raises Conflict if the training has changed since it was observed.

        If a webhook, a missing permission or an old CRD prevents the write, an event says so, because the status cannot. raw:
        the object of the training, with the old status.
        """
        changes = _changes(raw, status)
        if not changes or (observed.deleting and not observed.saves_before_deletion):
            return
        patch = {"metadata": {"resourceVersion": observed.version}, "status": changes}
        path = TRAINING.path(observed.namespace, observed.name, "status")
        self._writer.check_leading()
        try:
            body = await self._client.patch(path, patch, MERGE_PATCH)
        except NotFound:
            self._forget(observed)
            return
        except ApiError as error:
            if isinstance(error, Forbidden | Invalid) or WEBHOOK_FAILED in error.message:
                message = f"the status is out of date, because the API server refuses to write it: {error.message}"
                await self._writer.write(observed, [PostEvent("Warning", "StatusNotWritten", message)])
            raise
        self._trainings.put_own(body)
        lost = lost_fields(changes, body.get("status") or {}, "status")
        loss = self._losses.record((observed.namespace, observed.name), lost, self._client.now())
        if loss is not None:
            logger.error("%s/%s: %s", observed.namespace, observed.name, loss)
            await self._writer.write(observed, [PostEvent("Warning", "StatusNotStored", loss)])


def _changes(raw: dict[str, Any], status: TrainingStatus) -> dict[str, Any]:
    """Return the fields in which the status of a training's object differs from a new one, as a merge patch."""
    return merge_patch(raw.get("status") or {}, status.model_dump(mode="json", exclude_none=True))
