"""Leader election by a coordination.k8s.io Lease: of several operators, one works.

    standby ── its holder released it ──────────────────────────────────────► leader ── renewed every RENEW ──┐
       ▲   ├── held, and not renewed for DURATION as this process saw it ────►  │ └──────────────────────────┘
       │   └── none there, or never held: makes it its own, waits DURATION ──►  │
       │                                                                        │
       ├── finds it gone or another's: stops at once ◄──────────────────────────┤
       └── not renewed for GIVE_UP: stops before anybody else may start ◄───────┘ · stopped: releases the Lease

A leader works until DURATION after its last renewal at most: GIVE_UP until it stops, the rest for what it has in hand. So
the next one may start when it knows of no renewal for DURATION, or reads that the work has ended, which is what a released
Lease says: no holder, but a renewTime.

A Lease that is not there says nothing. It may be the first start of all, or somebody has deleted it a moment ago, and its
holder works until it looks again, or to the end of its time if it cannot look. Nothing in the cluster tells the one from the
other. So who makes the Lease its own then is its holder, keeps others off, and waits DURATION before it works: the last
renewal came before the deletion, and that before the Lease was made anew. The time runs from when the answer was read, for
the request may have been on its way for long. A holder that did not work yet does not release: that would say too much.
leaseTransitions is 0 in such a Lease, so that it is known for one also when the answer to its making was lost.

Only intervals of this process's own monotonic clock count: what the holder dates, and how clocks differ, does not matter.
kubernetes.aio has an election too; it reads wall clocks, and neither waits for the work to end nor releases.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from qwen35_operator.kube.client import Client, Json
from qwen35_operator.kube.errors import ApiError, Conflict, NotFound
from qwen35_operator.kube.kinds import LEASE

logger = logging.getLogger(__name__)

DURATION: Final = 10.0
RENEW: Final = 2.0
RETRY: Final = 0.25
"""Seconds after a renewal that failed: an API server that is slow once costs no term."""
GIVE_UP: Final = 7.0
"""Seconds without a renewal: leaves DURATION - GIVE_UP for work in hand to end."""
CALL: Final = 3.0


class Lost(Exception):
    """The Lease is no longer this process's."""


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
    """Whether it works."""
    _holds: bool = False
    """Whether it has the Lease; it may have to wait before it works."""
    _seen: tuple[str, float] = ("", 0.0)  # another's Lease: its resourceVersion, and when that was first seen
    _own: tuple[str, float] = ("", 0.0)  # uid of the Lease that it held last, and from when on it may work by it

    async def run(self) -> None:
        """Until cancelled; then the Lease is released."""
        while True:
            if (asked := await self._acquired()) is not None:
                await self._term(asked)
            await asyncio.sleep(RENEW)

    async def _term(self, renewed: float) -> None:
        """From winning the Lease to losing it."""
        self._holds = True
        work = asyncio.ensure_future(self._work())
        try:
            await self._keep(work, renewed)
        except Lost as loss:
            logger.warning("Lease %s/%s: %s", self.namespace, self.name, loss)
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=DURATION - GIVE_UP)
            led, self.leading, self._holds = self.leading, False, False
            if led:
                logger.info("%s leads no longer", self.identity)
            if led and work.done():
                await self._release()
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self) -> None:
        if (wait := self._own[1] - self.clock()) > 0:
            logger.info(
                "%s has made the Lease, and leads in %g s: who had it before may not know yet", self.identity, wait
            )
            await asyncio.sleep(wait)
        logger.info("%s leads", self.identity)
        self.leading = True
        await self.lead()

    async def _keep(self, work: asyncio.Future[None], renewed: float) -> None:
        """Renew until that fails for GIVE_UP seconds, or the work ends by itself. Raises Lost."""
        pause = RENEW
        while (left := renewed + GIVE_UP - self.clock()) > 0 and not work.done():
            await asyncio.wait({work}, timeout=min(pause, left))
            asked = await self._acquired(renewed + GIVE_UP - self.clock())
            renewed, pause = (renewed, RETRY) if asked is None else (asked, RENEW)

    async def _acquired(self, seconds: float = CALL) -> float | None:
        """Try to become, or to stay, the holder, for at most so many seconds.

        Returns when it was asked for, not when it was answered: the Lease may date from then. None: not the holder.
        Raises Lost when it was the holder, and is no longer.
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
            if self._holds:
                raise Lost("somebody has deleted it") from None
            return await self._write(None)
        spec, version = lease.get("spec") or {}, str(lease["metadata"]["resourceVersion"])
        holder = spec.get("holderIdentity") or ""
        if self._holds and holder != self.identity:
            raise Lost(f"{holder or 'nobody'} holds it")
        if self._holds and lease["metadata"]["uid"] != self._own[0]:
            raise Lost("somebody has deleted it, and it was made anew")
        if holder == self.identity:
            return await self._write(lease)
        if version != self._seen[0]:
            self._seen = version, self.clock()
        if holder and self.clock() - self._seen[1] < DURATION:
            return None
        return await self._write(lease)

    async def _write(self, lease: Json | None) -> float | None:
        asked = self.clock()
        now = _micro(self.client.now())
        before: dict[str, Any] = {} if lease is None else lease.get("spec") or {}
        mine, count = before.get("holderIdentity") == self.identity, before.get("leaseTransitions", 0)
        if not mine:
            count = count + 1 if before.get("holderIdentity") or before.get("renewTime") else 0
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(DURATION),
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": count,
        }
        if (written := await self._put(lease, spec)) is None:
            return None
        uid = written["metadata"]["uid"]
        if not mine or uid != self._own[0]:
            self._own = uid, self.clock() + (0.0 if count else DURATION)
        return asked

    async def _put(self, lease: Json | None, spec: dict[str, Any]) -> Json | None:
        """None when somebody else was faster."""
        try:
            if lease is None:
                about = {"name": self.name, "namespace": self.namespace}
                body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": about, "spec": spec}
                return await self.client.post(LEASE.path(self.namespace), body)
            return await self.client.put(LEASE.path(self.namespace, self.name), {**lease, "spec": spec})
        except Conflict:
            return None

    async def _release(self) -> None:
        """Best effort: who cannot say goodbye is waited for."""
        try:
            async with asyncio.timeout(CALL):
                lease = await self.client.get(LEASE.path(self.namespace, self.name))
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    await self._put(lease, {**lease["spec"], "holderIdentity": ""})
        except NotFound:
            return
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s was not released: %s", self.namespace, self.name, str(error) or "no answer")


def _micro(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
