"""Steps whose gradient is NaN or infinite are skipped. After several consecutive skipped steps, the run ends."""

from __future__ import annotations

import logging
import math

from qwen35_trainer.failure_reasons import FailureReason

logger = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 5
"""Number of consecutive updates with an infinite or NaN gradient after which the run ends, because it
would not learn again."""


class NotFinite(RuntimeError):
    """Gradients were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates."""

    failure = FailureReason.NOT_FINITE


class NotFiniteInSFT(NotFinite):
    """Gradients of SFT were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates.

    The run is not restarted after this error, because another attempt would train on the same examples.
    """

    failure = FailureReason.NOT_FINITE_IN_SFT


class SkippedUpdates:
    """Counts consecutive skipped updates, and raises an exception when there are MAX_SKIPPED_UPDATES.

    All ranks see the same gradient norms, so all of them raise the exception at the same update. sft: whether the run
    is SFT. The exception is then NotFiniteInSFT, and otherwise NotFinite.
    """

    def __init__(self, *, sft: bool) -> None:
        self._sft, self._count = sft, 0

    def add(self, norm: float) -> None:
        """Record the gradient norm of an update.

        An infinite or NaN norm counts as a skipped update. Raises NotFinite, or NotFiniteInSFT in SFT, at the last of
        `MAX_SKIPPED_UPDATES` consecutive skipped updates.
        """
        if math.isfinite(norm):
            self._count = 0
            return
        self._count += 1
        logger.warning("update skipped: the gradient's norm is %s (%d in a row)", norm, self._count)
        if self._count == MAX_SKIPPED_UPDATES:
            raise (NotFiniteInSFT if self._sft else NotFinite)(
                f"the gradient's norm is {norm} for the {MAX_SKIPPED_UPDATES}th step in a row, and all of them were skipped: lower "
                "spec.train.optimizer.learningRate, or compute in more precision (spec.model.precision FP32)"
            )
