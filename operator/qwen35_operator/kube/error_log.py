"""The errors of one watch in the log. Each message is a warning once until the watch works again, which the log then says."""

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

MAX_MESSAGES = 20
"""Number of different messages that are warnings until the watch works again. An error may contain a number that changes."""


@dataclass
class ErrorLog:
    """Logs the errors of one watch. A missing permission may cause the same error for days."""

    watched: str
    """The objects that are watched, in words."""
    _messages: set[str] = field(default_factory=set)  # those that were warnings since the watch last worked

    def failed(self, message: str, *, traceback: bool = False) -> None:
        """Log a message: as a warning the first time, later as a debug message.

        traceback: whether to add that of the exception that is handled now.
        """
        new = message not in self._messages and len(self._messages) < MAX_MESSAGES
        logger.log(logging.WARNING if new else logging.DEBUG, message, exc_info=traceback)
        if new:
            self._messages.add(message)

    def works(self) -> None:
        """Record that the watch works. Logs it if there were errors."""
        if self._messages:
            logger.info("watching %s works again", self.watched)
            self._messages.clear()
