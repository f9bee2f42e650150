"""What came of a simulated run. Everything but `exits`, `events` and the times to fill is of the measured batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """Shares are of 0 … 1, lags in versions, times in the load's unit (seconds)."""

    throughput: float
    """Trained tokens per second, masked ones included."""
    effective_throughput: float
    """The same without those that were masked for their age."""
    ideal_throughput: float
    """What the slower pool alone could do, always busy."""
    mean_lag: float
    """Of a group: from the version of its first token to the one that trained it."""
    max_lag: int
    lag_histogram: tuple[int, ...]
    """Groups by lag, from 0."""
    mean_token_lag: float
    """Of the tokens in the loss."""
    max_token_lag: int
    """Of the tokens in the loss."""
    masked_share: float
    """Of the tokens of trained groups: those left out for their age."""
    discarded_share: float
    """Of the groups that left: those that missed their deadline."""
    filtered_share: float
    """Of the groups that left: those without signal."""
    mean_trained_length: float
    """Response tokens of a sequence that was trained."""
    true_mean_length: float
    """Of the distribution, over the same batches. The rule is biased where the two differ by more than chance."""
    idle_slots: float
    """Share of the rollout pool's slots in which nothing was decoded. What is lost is not counted as idle."""
    idle_engines: float
    """Share of the engines' time in which they decoded nothing at all, those of the lane left out."""
    idle_lane: float | None
    """As `idle_slots`, of the lane. None without one."""
    idle_trainer: float
    seconds: float
    """That the measured batches took."""
    mean_step: float
    """Seconds from one trained batch to the next."""
    time_to_first_batch: float
    """From the start until the first batch began to train."""
    time_to_full: float | None
    """From the start until every slot of the pool was taken. None: that never happened."""
    publications: int
    """Of the whole run."""
    lost_engines: int
    """Of the whole run."""
    moves: int
    """Sequences handed to the lane, of the whole run."""
    events: int
    """Events that the coordinator was told, of the whole run."""
    exits: dict[str, int]
    """Groups by the reason for which they left, of the whole run."""

    @property
    def bias(self) -> float:
        """By which share trained sequences are longer than the distribution's; below 0 when they are shorter."""
        return self.mean_trained_length / self.true_mean_length - 1

    def as_dict(self) -> dict[str, object]:
        """For JSON, with camelCase keys."""
        return {_camel(name): value for name, value in {**asdict(self), "bias": self.bias}.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)
