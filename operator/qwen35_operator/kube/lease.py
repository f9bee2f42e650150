"""Leader election with a coordination.k8s.io Lease: one of several operators works, and never two together.

    standby ── holder released it ──────────────────────────────────────────────► leader ── renewed every RENEW ──┐
       ▲   ├── held, but not renewed for LEASE seconds, as seen by this process ─►  │ └──────────────────────────┘
       │   └── absent, or never held: acquires it, then waits LEASE seconds ─────►  │
       │                                                                            │
       ├── finds it deleted or held by another: stops immediately ◄─────────────────┤
       └── not renewed for GIVE_UP seconds: stops before another may start ◄────────┘ · after stopping: releases the Lease

(LEASE, RENEW and GIVE_UP stand for LEASE_SECONDS, RENEW_SECONDS and GIVE_UP_SECONDS.)

A leader works at most until LEASE seconds after its last renewal: it stops after GIVE_UP seconds, and reconciles in
progress have the remaining time to end. The next leader may therefore start if it has seen no renewal for LEASE
seconds, or if the Lease is released: no holder, but a renewTime. A released Lease means that the previous leader's work
has ended.

An absent Lease proves nothing. Either no operator has worked yet, or somebody has just deleted the Lease; the previous
holder then works until it notices, or until its time is over. Nothing in the cluster distinguishes the two cases. The
process that creates the Lease therefore holds it, which keeps others from leading, but waits LEASE seconds before it
leads. Any previous leader has stopped by then: its last renewal came before the deletion, and the deletion before the
creation. The wait begins when the answer to the creation arrives, because the request may have taken long. A holder
that has not led yet must not release the Lease, because a released Lease means that all work has ended.
leaseTransitions is 0 in such a Lease, so that its creator recognizes it even if the answer to the creation was lost.

A leader may have acted on few of the changes of its last seconds. It therefore notes in the annotation KNOWN_VERSION of the
Lease the version of an earlier renewal, up to which the next leader can take changes for known.

Only intervals of this process's monotonic clock count; dates in the Lease and differences between clocks do not matter.
kubernetes.aio also has an election, but it reads wall clocks, does not wait for the work to end, and does not release.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from qwen35_operator.desired.object_names import KNOWN_VERSION
from qwen35_operator.kube import answers
from qwen35_operator.kube.api_errors import ApiError, Conflict, NotFound
from qwen35_operator.kube.client import Client, JsonObject
from qwen35_operator.kube.kinds import LEASE

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 0.25
"""Time until the retry of a failed renewal, so that one slow answer does not cost the leadership."""
GIVE_UP_SECONDS: Final = 7.0
"""Time without a renewal after which a leader stops. LEASE_SECONDS - GIVE_UP_SECONDS remain for its work to end."""
REQUEST_SECONDS: Final = 3.0
UNDECIDED_SECONDS: Final = 2.5 * RENEW_SECONDS
"""Time after the first look at a version of the Lease within which a process usually sees the next one, if the holder works."""
REMEMBERED_VERSIONS: Final = 8
"""Number of versions of the Lease that a leader remembers: those of its renewals in about 16 s."""
MAX_VERSION_DIGITS: Final = 20
"""Maximum length of a resourceVersion in the annotation KNOWN_VERSION: a number of 64 bits. Longer texts are ignored."""


class LeaseLost(Exception):
    """Raised when this process no longer holds the Lease."""


class _ObservedLease(NamedTuple):
    """The Lease as this process last read it while it was not the holder. version: resourceVersion of the Lease."""

    version: str
    since: float
    """Time of `Election.clock` at which this process first read this version."""
    is_held: bool
    """Whether the Lease had a holder."""


class _OwnLease(NamedTuple):
    """The Lease that this process acquired last.

    uid: uid of the Lease. may_lead_from: time of `Election.clock` from which this process may lead.
    """

    uid: str
    may_lead_from: float


@dataclass
class Election:
    """A candidate for leadership, which holds the Lease while it leads.

    namespace, name: namespace and name of the Lease. identity: unique name of this process. clock: returns monotonic
    seconds.
    """

    client: Client
    namespace: str
    name: str
    identity: str
    lead: Callable[[], Awaitable[None]]
    """The work of the leader: called when this process becomes the leader, cancelled when it stops leading."""
    clock: Callable[[], float]
    leading: bool = False
    """Whether `lead` runs."""
    known_version: int = 0
    """The resourceVersion up to which an earlier leader has usually acted on changes, as it noted in the Lease: from about 16 s before its last renewal;
    that of the new Lease if this process created it. Set when this process acquires the Lease."""
    _renewed: float = 0.0  # time of `clock` of the last successful renewal
    _holds: bool = False  # whether it holds the Lease; it may have to wait before it leads
    _observed: _ObservedLease = field(default=_ObservedLease("", 0.0, is_held=False))
    _own: _OwnLease = field(default=_OwnLease("", 0.0))
    _saw_renewal: bool = False  # by another process, since this one last held the Lease
    # `known_version`, then the versions of the Lease after each renewal by this process. The oldest are dropped.
    _versions: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_VERSIONS))

    @property
    def holds(self) -> bool:
        """Whether this process holds the Lease. It may have to wait before it leads."""
        return self._holds

    @property
    def is_standby(self) -> bool:
        """Whether this process has seen another one renew the Lease, and has not held it since.

        A Lease that nobody renews may be that of a process that has ended. It counts as renewed for UNDECIDED_SECONDS.
        """
        observed = self._observed  # read once, because a thread of kopf calls this
        undecided = observed.is_held and self.clock() - observed.since < UNDECIDED_SECONDS
        return not self._holds and (self._saw_renewal or undecided)

    def may_write(self) -> bool:
        """Return whether this process leads, and has renewed the Lease recently. Call this right before every write.

        `leading` alone is not enough: a process that was paused, by a signal or together with its machine, may continue
        a reconcile before it notices that its Lease has expired. A write that begins within GIVE_UP_SECONDS of the last
        renewal has LEASE_SECONDS - GIVE_UP_SECONDS to reach the API server before another process may lead.
        """
        return self.leading and self.clock() - self._renewed < GIVE_UP_SECONDS

    async def run(self) -> None:
        """Take part in the election until cancelled, then release the Lease.

        If `lead`, the work of the leader, ends with an exception, this method raises the exception.
        """
        while True:
            if (requested := await self._acquire()) is not None:
                await self._hold(requested)
            await asyncio.sleep(RENEW_SECONDS)

    async def _hold(self, renewed: float) -> None:
        """Lead until the Lease is lost or `lead` ends. Then end `lead`, and release the Lease.

        If `lead` takes too long to end, the Lease is not released. renewed: time of the request that acquired the
        Lease. Raises the exception with which `lead` ends, if any.
        """
        self._holds, self._renewed, self._saw_renewal = True, renewed, False
        self.known_version = self._versions[0]
        work = asyncio.ensure_future(self._work())
        try:
            await self._renew(work, renewed)
        except LeaseLost as loss:
            logger.warning("Lease %s/%s: %s", self.namespace, self.name, loss)
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=LEASE_SECONDS - GIVE_UP_SECONDS)
            led, self.leading, self._holds = self.leading, False, False
            if led:
                logger.info("%s no longer leads", self.identity)
            if led and work.done():
                await self._release()
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self) -> None:
        if (wait := self._own.may_lead_from - self.clock()) > 0:
            logger.info(
                "%s has created the Lease and leads in %g s, when any previous leader has stopped", self.identity, wait
            )
            await asyncio.sleep(wait)
        logger.info("%s leads", self.identity)
        self.leading = True
        await self.lead()

    async def _renew(self, work: asyncio.Future[None], renewed: float) -> None:
        """Renew the Lease again and again, until no renewal has succeeded for GIVE_UP_SECONDS or the work has ended.

        work: the work of the leader. renewed: time of the last renewal. Raises LeaseLost if this process is no longer
        the holder.
        """
        pause = RENEW_SECONDS
        while (remaining := renewed + GIVE_UP_SECONDS - self.clock()) > 0 and not work.done():
            await asyncio.wait({work}, timeout=min(pause, remaining))
            requested = await self._acquire(renewed + GIVE_UP_SECONDS - self.clock())
            renewed, pause = (renewed, RETRY_SECONDS) if requested is None else (requested, RENEW_SECONDS)
            self._renewed = renewed

    async def _acquire(self, timeout_seconds: float = REQUEST_SECONDS) -> float | None:
        """Acquire or renew the Lease. Returns the time of the request, or None if this did not succeed.

        The time of the request is returned and not that of the answer, because the API server may have renewed the
        Lease right after the request was sent. timeout_seconds: maximum duration. Raises LeaseLost if this process was
        the holder and no longer is.
        """
        try:
            async with asyncio.timeout(min(REQUEST_SECONDS, timeout_seconds)):
                return await self._try()
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s: %s", self.namespace, self.name, str(error) or "no answer")
            return None

    async def _try(self) -> float | None:
        try:
            lease = await self._read()
        except NotFound:
            if self._holds:
                raise LeaseLost("the Lease was deleted") from None
            return await self._write(None)
        spec, version = lease.get("spec") or {}, str(lease["metadata"]["resourceVersion"])
        holder = spec.get("holderIdentity") or ""
        if self._holds and holder != self.identity:
            raise LeaseLost(f"{holder or 'nobody'} holds it")
        if self._holds and lease["metadata"]["uid"] != self._own.uid:
            raise LeaseLost("the Lease was deleted and created again")
        if holder == self.identity:
            return await self._write(lease)
        if version != self._observed.version:
            self._saw_renewal = bool(holder and self._observed.version)
            self._observed = _ObservedLease(version, self.clock(), is_held=bool(holder))
        if holder and self.clock() - self._observed.since < LEASE_SECONDS:
            return None
        return await self._write(lease)

    async def _read(self) -> JsonObject:
        """Return the Lease. Raises NotFound if it does not exist."""
        path = LEASE.path(self.namespace, self.name)
        return answers.lease(path, await self.client.get(path))

    async def _write(self, lease: JsonObject | None) -> float | None:
        """Write the Lease with this process as its holder. lease: the Lease as it was read; None creates it.

        Returns the time of the request, or None if another process has changed or created the Lease first.
        """
        requested = self.clock()
        now = _micro_time(self.client.now())
        before: dict[str, Any] = {} if lease is None else lease.get("spec") or {}
        is_holder, transitions = before.get("holderIdentity") == self.identity, before.get("leaseTransitions", 0)
        if not is_holder:
            transitions = transitions + 1 if before.get("holderIdentity") or before.get("renewTime") else 0
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": before.get("acquireTime", now) if is_holder else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        is_renewal = lease is not None and is_holder and lease["metadata"]["uid"] == self._own.uid
        known_version = self._versions[0] if is_renewal else _known_version(lease)
        if (written := await self._put(lease, spec, known_version)) is None:
            return None
        version = int(written["metadata"]["resourceVersion"])
        if not is_renewal:
            self._versions.clear()
            wait = 0.0 if transitions else LEASE_SECONDS
            self._own = _OwnLease(written["metadata"]["uid"], self.clock() + wait)
        self._versions.append(version if is_renewal or known_version is None else known_version)
        return requested

    async def _put(
        self, lease: JsonObject | None, spec: dict[str, Any], known_version: int | None
    ) -> JsonObject | None:
        """Create or update the Lease. lease: the Lease as it was read; None creates it. known_version: see KNOWN_VERSION.

        Returns the stored Lease, or None if another process has changed or created the Lease first.
        """
        new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        metadata: dict[str, Any] = lease["metadata"] if lease else {"name": self.name, "namespace": self.namespace}
        if known_version is not None:
            annotations = {**(metadata.get("annotations") or {}), KNOWN_VERSION: str(known_version)}
            metadata = {**metadata, "annotations": annotations}
        body = {**(lease or new), "metadata": metadata, "spec": spec}
        path = LEASE.path(self.namespace, None if lease is None else self.name)
        try:
            if lease is None:
                return answers.lease(path, await self.client.post(path, body))
            return answers.lease(path, await self.client.put(path, body))
        except Conflict:
            return None

    async def _release(self) -> None:
        """Release the Lease, best effort. If this fails, the next leader waits for the Lease to expire."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                lease = await self._read()
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    await self._put(lease, {**lease["spec"], "holderIdentity": ""}, _known_version(lease))
        except NotFound:
            return
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s was not released: %s", self.namespace, self.name, str(error) or "no answer")


def _known_version(lease: JsonObject | None) -> int | None:
    """Return the version up to which the last holder has usually acted on changes; None if there is no Lease.

    This is the version of the Lease itself if its annotation is missing, as after an earlier release of the operator, or is not a
    version.
    """
    if lease is None:
        return None
    version = int(lease["metadata"]["resourceVersion"])
    noted = (lease["metadata"].get("annotations") or {}).get(KNOWN_VERSION, "")
    return min(int(noted), version) if noted.isdecimal() and len(noted) <= MAX_VERSION_DIGITS else version


def _micro_time(time: datetime) -> str:
    """Format a UTC time as Kubernetes' MicroTime, such as 2026-01-02T03:04:05.000006Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
