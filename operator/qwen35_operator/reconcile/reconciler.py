"""One training, once: observe, decide, act, write the status.

    key ─► body ─► observe ─► decide ─► act ─┬─► status, if it is another ─► again after …
                                   refused ──┘ (then the status says what is in the way)

Nothing is remembered between two calls but caches: whatever this dies after, the next call finds it done or does it.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.kube.client import JSON_PATCH, METADATA, Client
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.errors import NotFound
from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.store import Key
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.reconcile.act import Actor
from qwen35_operator.reconcile.actions import Create
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.observe import Parsed, observe
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.report import blocked
from qwen35_operator.settings import Settings

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """The API server would not do what was decided; the status says so. Worth another try, later."""


class Reconciler:
    """Brings trainings closer to what their specs ask for."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        cluster: Cluster,
        trainings: Trainings,
        progressed: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._cluster = cluster
        self._trainings = trainings
        self._actor = Actor(client, cluster, "qwen35-operator", progressed)
        self._parsed = Parsed()

    async def reconcile(self, key: Key) -> float | None:
        """Seconds after which to look again; None for when something happens.

        Raises Refusal, and ApiError when the cluster does not answer.
        """
        raw = self._trainings.get(key)
        if raw is None:
            return None
        seen = await observe(raw, self._cluster, self._parsed, self._client)
        now: datetime = self._client.now()
        decision = decide(seen, self._settings, now)
        if any(isinstance(action, Create) for action in decision.actions) and not await self._lives(seen):
            return None
        refused = await self._actor.act(seen, decision.actions)
        if refused is None:
            await self._report(seen, raw, decision.status)
            return decision.after
        await self._report(seen, raw, blocked(seen, decision, [refused], now))
        raise Refusal(refused.message)

    async def _lives(self, seen: Observed) -> bool:
        """Whether the training is still there, as the API server has it now.

        kopf does not tell of what was deleted while its watch was cut, and children of the dead would be created and
        collected for ever. Children are created seldom enough to ask each time.
        """
        try:
            raw = await self._client.get(TRAINING.path(seen.namespace, seen.name), accept=METADATA)
        except NotFound:
            self._forget(seen)
            return False
        if raw["metadata"]["uid"] != seen.uid:
            self._forget(seen)
            return False
        return "deletionTimestamp" not in raw["metadata"]

    def _forget(self, seen: Observed) -> None:
        self._trainings.remove((seen.namespace, seen.name), seen.uid)

    async def _report(self, seen: Observed, raw: dict[str, Any], status: TrainingStatus) -> None:
        """Write the status, once, and only over the one that was read. Raises Conflict when that has changed."""
        written = status.model_dump(mode="json", exclude_none=True)
        if written == raw.get("status") or seen.deleting:
            return
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": seen.version},
            {"op": "add", "path": "/status", "value": written},
        ]
        try:
            body = await self._client.patch(TRAINING.path(seen.namespace, seen.name, "status"), patch, JSON_PATCH)
        except NotFound:
            self._forget(seen)
            return
        self._trainings.put_own(body)
