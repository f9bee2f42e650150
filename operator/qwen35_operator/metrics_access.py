"""Decides which requests may read the operator's metrics. The API server knows, so the operator requests two reviews:

    bearer token ──► TokenReview ──► user ──► SubjectAccessReview (get /metrics) ──► answer, kept for seconds

Components of Kubernetes and controller-runtime (WithAuthenticationAndAuthorization) protect their metrics in this way.

waits on                         unblocked by                   deadline
a review of another request      its end                        at most MAX_WAITING_REQUESTS wait, others get 503
the API server                   its answer                     REQUEST_TIMEOUT_SECONDS of the client
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from qwen35_operator.kube.api_errors import ApiError, Forbidden
from qwen35_operator.kube.client import Client, JsonObject
from qwen35_operator.kube.kinds import SUBJECT_ACCESS_REVIEW, TOKEN_REVIEW, ObjectKind

logger = logging.getLogger(__name__)

METRICS_PATH: Final = "/metrics"
ALLOWED_SECONDS: Final = 60.0
"""Time for which a token that may read the metrics is not reviewed again: a right that is revoked ends after this time.
Prometheus reads more often, and controller-runtime keeps answers about tokens for as long."""
REFUSED_SECONDS: Final = 10.0
"""Time for which a refused token is not reviewed again: a right that is granted begins after this time."""
MAX_ALLOWED_TOKENS: Final = 64
MAX_REFUSED_TOKENS: Final = 256
MAX_WAITING_REQUESTS: Final = 16
"""Maximum number of requests that wait for a review. One review takes place at a time: anyone who reaches the port can
send tokens, and each unknown one costs the API server a request that the trainings would otherwise have. As many more may
wait if their token was allowed before, so that invented tokens do not keep Prometheus out."""


@dataclass(frozen=True)
class AccessAnswer:
    """Whether a request may read the metrics."""

    status: int
    """HTTP status: 200 if it may; otherwise 401, 403 or 503."""
    message: str = ""
    """Why the request is refused, and the fix."""


ALLOWED: Final = AccessAnswer(200)
NO_TOKEN: Final = AccessAnswer(401, "Send a token of Kubernetes in the header Authorization: Bearer TOKEN.")
UNKNOWN_TOKEN: Final = AccessAnswer(401, "The API server does not accept the token. Send a valid one.")
TOO_MANY: Final = AccessAnswer(503, "Too many requests wait for a review of their tokens. Try again later.")
UNREVIEWED: Final = AccessAnswer(503, "The token could not be reviewed. The operator's log has the reason.")


@dataclass
class _RecentAnswers:
    """Answers about tokens, each for a limited time. If there are too many, the oldest one is forgotten."""

    seconds: float
    maximum: int
    answers: dict[bytes, tuple[float, AccessAnswer]] = field(default_factory=dict)
    """When each answer expires, and the answer, in the order of expiry. Keys are hashes of tokens."""

    def get(self, key: bytes, now: float) -> AccessAnswer | None:
        expires, answer = self.answers.get(key, (now, None))
        return answer if now < expires else None

    def add(self, key: bytes, answer: AccessAnswer, now: float) -> None:
        self.answers.pop(key, None)
        self.answers[key] = now + self.seconds, answer
        while len(self.answers) > self.maximum:
            del self.answers[next(iter(self.answers))]


class MetricsAccess:
    """Decides which requests may read the metrics, and keeps the answers for a short time."""

    def __init__(self, client: Client, now: Callable[[], float] = time.monotonic) -> None:
        """Create the object. now: returns the time in seconds, by which answers expire."""
        self._client = client
        self._now = now
        self._hash_key = secrets.token_bytes(32)
        # Kept apart, so that tokens that an attacker invents cannot displace those of Prometheus.
        self._allowed = _RecentAnswers(ALLOWED_SECONDS, MAX_ALLOWED_TOKENS)
        self._refused = _RecentAnswers(REFUSED_SECONDS, MAX_REFUSED_TOKENS)
        self._review = asyncio.Lock()
        self._waiting = 0

    async def check(self, authorization: str | None) -> AccessAnswer:
        """Return whether a request may read the metrics. authorization: its header Authorization; None if it has none."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or not token.isascii():
            return NO_TOKEN
        key = hmac.digest(self._hash_key, token.encode(), "sha256")
        if (answer := self._known(key)) is not None:
            return answer
        if self._waiting >= MAX_WAITING_REQUESTS * (2 if key in self._allowed.answers else 1):
            return TOO_MANY
        self._waiting += 1
        try:
            async with self._review:
                return self._known(key) or await self._reviewed(key, token)
        finally:
            self._waiting -= 1

    def _known(self, key: bytes) -> AccessAnswer | None:
        now = self._now()
        return self._allowed.get(key, now) or self._refused.get(key, now)

    async def _reviewed(self, key: bytes, token: str) -> AccessAnswer:
        try:
            answer = await self._ask(token)
        except ApiError as error:
            fix = ""
            if isinstance(error, Forbidden):
                fix = ". Grant the operator create on tokenreviews and subjectaccessreviews, or start it without --metrics-authentication"
            logger.warning(
                "A request for the metrics was refused, because its token could not be reviewed: %s%s", error, fix
            )
            return UNREVIEWED
        (self._allowed if answer == ALLOWED else self._refused).add(key, answer, self._now())
        return answer

    async def _ask(self, token: str) -> AccessAnswer:
        """Return the API server's answer about a token. Raises ApiError if a request fails."""
        review = await self._post(TOKEN_REVIEW, {"token": token})
        if review.get("authenticated") is not True:
            return UNKNOWN_TOKEN
        user = review.get("user", {})
        name = user.get("username", "")
        subject = {"user": name} | {key: user[key] for key in ("uid", "groups", "extra") if key in user}
        path = {"path": METRICS_PATH, "verb": "get"}
        review = await self._post(SUBJECT_ACCESS_REVIEW, subject | {"nonResourceAttributes": path})
        if review.get("allowed") is True:
            return ALLOWED
        fix = f"Bind it to a ClusterRole with get on the nonResourceURL {METRICS_PATH}, such as the chart's -metrics-reader."
        return AccessAnswer(403, f"{name} may not get {METRICS_PATH}. {fix}")

    async def _post(self, kind: ObjectKind, spec: JsonObject) -> JsonObject:
        """Post a review and return its status."""
        body = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.name, "spec": spec}
        status: JsonObject = (await self._client.post(kind.path(), body)).get("status") or {}
        return status
