"""What carries reports to an operator and orders back."""

from collections.abc import AsyncIterator
from typing import Protocol

from qwen35_trainer.contract import Control, Progress


class LinkDown(Exception):
    """A report was not delivered; a later one may be. Says where it was to go and what came back."""


class LinkRefused(ValueError):
    """--link cannot be used as given; says everything that is missing."""


class Link(Protocol):
    """One operator's end, wherever it is. Used from one event loop."""

    async def report(self, progress: Progress) -> None:
        """Deliver a report in the place of the one before, within a deadline. Raises LinkDown."""

    async def history(self, packed: bytes) -> None:
        """Leave the run so far, as `progress.history` packs it, in the place of what was there, within a deadline.

        Raises LinkDown.
        """

    def orders(self) -> AsyncIterator[Control]:
        """What the operator asks, first as it is now and then at every change. Never ends: it outlasts an operator that
        is away, and leaves out what cannot be read.
        """

    async def close(self) -> None:
        """Let go of connections."""
