"""Leader election by a coordination.k8s.io Lease: of several operators, one works.

    standby ── holder gone, or not renewed for DURATION as this process saw it ──► leader ── renewed every RENEW ──┐
       ▲                                                                              │ └──────────────────────────┘
       └── not renewed for GIVE_UP: stops working before anybody else may start ◄─────┘ · stopped: releases the Lease

Only intervals of this process's own monotonic clock count: what the holder dates, and how clocks differ, does not matter.
kubernetes.aio has an election too; it reads wall clocks, and neither waits for the work to end nor releases.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from qwen35_operator.kube.client import Client, Json
from qwen35_operator.kube.errors import ApiError, Conflict, NotFound
from qwen35_operator.kube.kinds import LEASE

logger = logging.getLogger(__name__)

DURATION: Final = 10.0
RENEW: Final = 2.0
GIVE_UP: Final = 7.0
"""Seconds without a renewal: leaves DURATION - GIVE_UP for work in hand to end."""
CALL: Final = 3.0


@dataclass
class Election:
    """One candidate. `lead` is run while this is the leader, and cancelled, and waited for, when it is no longer."""

    client: Client
    namespace: str
    name: str
    identity: str
    lead: Callable[[], Awaitable[None]]
    clock: Callable[[], float]
    leading: bool = False
    _seen: tuple[str, float] = field(default=("", 0.0))  # the Lease's resourceVersion, and when it was first seen

    async def run(self) -> None:
        """Until cancelled; then the Lease is released."""
        while True:
            if (asked := await self._acquired()) is not None:
                await self._term(asked)
            await asyncio.sleep(RENEW)

    async def _term(self, renewed: float) -> None:
        """From winning the Lease to losing it."""
        logger.info("%s leads", self.identity)
        self.leading = True
        work = asyncio.ensure_future(self.lead())
        try:
            await self._keep(work, renewed)
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=DURATION - GIVE_UP)
            self.leading = False
            logger.info("%s leads no longer", self.identity)
            await self._release()
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _keep(self, work: asyncio.Future[None], renewed: float) -> None:
        """Renew until that fails for GIVE_UP seconds, or the work ends by itself."""
        while (left := renewed + GIVE_UP - self.clock()) > 0 and not work.done():
            await asyncio.wait({work}, timeout=min(RENEW, left))
            if (asked := await self._acquired(renewed + GIVE_UP - self.clock())) is not None:
                renewed = asked
            elif self._seen[0] == "lost":
                return

    async def _acquired(self, seconds: float = CALL) -> float | None:
        """Try to become, or to stay, the holder, for at most so many seconds.

        Returns when it was asked for, not when it was answered: the Lease may date from then. None: not the holder.
        """
        try:
            async with asyncio.timeout(min(CALL, seconds)):
                return await self._try()
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s: %s", self.namespace, self.name, str(error) or "no answer")
            return None

    async def _try(self) -> float | None:
        try:
            lease = await self.client.get(LEASE.path(self.namespace, self.name))
        except NotFound:
            return await self._write(None)
        spec, version = lease.get("spec") or {}, str(lease["metadata"]["resourceVersion"])
        holder = spec.get("holderIdentity") or ""
        if holder == self.identity:
            return await self._write(lease)
        if self.leading:
            self._seen = "lost", 0.0  # somebody else holds it: he saw ours expire
            return None
        if version != self._seen[0]:
            self._seen = version, self.clock()
        if holder and self.clock() - self._seen[1] < DURATION:
            return None
        return await self._write(lease)

    async def _write(self, lease: Json | None) -> float | None:
        asked = self.clock()
        now = _micro(self.client.now())
        before: dict[str, Any] = {} if lease is None else lease.get("spec") or {}
        mine = before.get("holderIdentity") == self.identity
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(DURATION),
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (not mine and lease is not None),
        }
        return asked if await self._put(lease, spec) else None

    async def _put(self, lease: Json | None, spec: dict[str, Any]) -> bool:
        """False when somebody else was faster."""
        try:
            if lease is None:
                about = {"name": self.name, "namespace": self.namespace}
                body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": about, "spec": spec}
                await self.client.post(LEASE.path(self.namespace), body)
            else:
                await self.client.put(LEASE.path(self.namespace, self.name), {**lease, "spec": spec})
        except Conflict:
            return False
        return True

    async def _release(self) -> None:
        """Best effort: who cannot say goodbye is waited for."""
        try:
            async with asyncio.timeout(CALL):
                lease = await self.client.get(LEASE.path(self.namespace, self.name))
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    await self._put(lease, {**lease["spec"], "holderIdentity": ""})
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s was not released: %s", self.namespace, self.name, str(error) or "no answer")


def _micro(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
