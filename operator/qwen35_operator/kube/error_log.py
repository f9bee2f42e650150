"""The errors of one watch in the log. Each message is a warning once until the watch works again, which the log then says."""

import logging
import re
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

MAX_MESSAGES = 20
"""Number of different messages that are remembered. If there are more, the oldest one is forgotten, so that a new cause is
always a warning."""
_VARYING = re.compile(r"\d{4,}")
"""Numbers in which messages with the same cause may differ, such as a resourceVersion."""


@dataclass
class ErrorLog:
    """Logs the errors of one watch. A missing permission may cause the same error for days."""

    watched: str
    """The objects that are watched, in words."""
    _messages: list[str] = field(default_factory=list)  # the newest that were warnings since the watch last worked

    def failed(self, message: str, *, traceback: bool = False) -> None:
        """Log a message: as a warning the first time, later as a debug message. Long numbers do not matter.

        traceback: whether to add that of the exception that is handled now.
        """
        cause = _VARYING.sub("", message)
        new = cause not in self._messages
        logger.log(logging.WARNING if new else logging.DEBUG, message, exc_info=traceback)
        if new:
            self._messages = [*self._messages, cause][-MAX_MESSAGES:]

    def works(self) -> None:
        """Record that the watch works. Logs it if there were errors."""
        if self._messages:
            logger.info("watching %s works again", self.watched)
            self._messages.clear()
