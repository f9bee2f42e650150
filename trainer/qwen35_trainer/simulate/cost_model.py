"""The cost model of a workload: replicas, the straggler lane, the trainer, publications, prefill and faults.

Times are in seconds, or in any other unit if all times have the same unit. The unit of the reference workload is the
decode step of a replica that holds one sequence. For a manifest, `manifest_workload.HardwareSpeeds` contains assumed
speeds, which the options `--decode` and `--train-seconds-per-token` replace by measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def raise_if_any(*problems: str | None) -> None:
    """Raise ValueError with all problems that are not None, joined by semicolons. Do nothing if all are None."""
    messages = [problem for problem in problems if problem is not None]
    if messages:
        raise ValueError("; ".join(messages))


def below_minimum(minimum: float, **values: float) -> list[str]:
    """Return the message `name value < minimum` for each value that is below the minimum or not finite."""
    return [f"{name} {value} < {minimum}" for name, value in values.items() if not minimum <= value < math.inf]


def not_above(limit: float, **values: float) -> list[str]:
    """Return a message for each value that is not above the limit or not finite. The message is `name value <= limit`."""
    return [f"{name} {value} <= {limit}" for name, value in values.items() if not limit < value < math.inf]


@dataclass(frozen=True)
class ReplicaSpeed:
    """The speed of one rollout replica.

    A decode step gives one token to each of the n sequences that the replica holds. It takes
    `base / speed + per_sequence · n` seconds.
    """

    slots: int = 64
    """Maximum number of sequences that the replica decodes at a time."""
    base: float = 1.0
    """Seconds of a decode step, at speed 1, that do not depend on the number of sequences: mainly for reading the weights."""
    per_sequence: float = 0.004
    """Seconds that each sequence adds to a decode step, for its KV cache and its computation."""
    speed: float = 1.0
    """Factor by which the replica reads its weights faster, because it has more or faster devices:
    reading takes `base / speed` seconds."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, slots=self.slots),
            *below_minimum(0, base=self.base, per_sequence=self.per_sequence),
            *not_above(0, speed=self.speed),
            "base 0 + per_sequence 0 <= 0: a step takes no time" if self.base == 0 == self.per_sequence else None,
        )

    def step(self, sequences: int) -> float:
        """Return the seconds of a decode step with `sequences` sequences."""
        return self.base / self.speed + self.per_sequence * sequences

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the replica generates per second if all its slots are occupied."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas with the same speed. A pool with replicas of different speeds has several such groups."""

    count: int = 8
    replica: ReplicaSpeed = ReplicaSpeed()

    def __post_init__(self) -> None:
        raise_if_any(*below_minimum(0, count=self.count))


@dataclass(frozen=True)
class LaneSpeed:
    """The size and speed of the straggler lane: faster replicas, to which long sequences move."""

    replicas: int = 1
    slots: int = 96
    """Maximum number of sequences that each replica of the lane decodes at a time."""
    speed: float = 1.5
    """Factor by which a replica of the lane reads its weights faster. Reading takes `base / speed` seconds."""
    base: float = 1.0
    """Seconds of a decode step in the lane that do not depend on the number of sequences, at speed 1."""
    per_sequence: float = 0.003
    """Seconds that each sequence adds to a decode step in the lane."""
    arrival_steps: float = 200.0
    """Decode steps that a sequence loses when it moves to the lane. The prefill of its prompt and tokens
    comes in addition (`PrefillCost`). With the default of `PrefillCost`, under which prefill is free,
    these steps stand for prefill too."""
    after_tokens: int = 4000
    """Number of response tokens after which a sequence may move to the lane."""
    breaks_even: bool = True
    """Whether a sequence moves only if it is expected to finish sooner in the lane, as in real runs. If False, every
    sequence moves after `after_tokens` tokens, for comparison."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"lane.replicas": self.replicas, "lane.after_tokens": self.after_tokens}),
            *below_minimum(0, **{"lane.arrival_steps": self.arrival_steps}),
        )
        _ = self.replica

    @property
    def replica(self) -> ReplicaSpeed:
        """The speed of one replica of the lane. Raises ValueError if a field of the lane has an invalid value."""
        return ReplicaSpeed(self.slots, self.base, self.per_sequence, self.speed)


@dataclass(frozen=True)
class TrainSpeed:
    """The speed of the train pool, which consists of `units` equal units.

    A unit is a single device, or a set of devices that is as large as a rollout replica. The workload decides which of
    the two. A batch takes `tokens · seconds_per_token / units + overhead` seconds.
    """

    units: int = 8
    seconds_per_token: float = 0.0375
    """Seconds that one unit of the train pool takes per trained token."""
    overhead: float = 0.0
    """Seconds that a batch takes in addition, whatever its number of tokens."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"trainer.units": self.units}),
            *not_above(0, **{"trainer.seconds_per_token": self.seconds_per_token}),
            *below_minimum(0, **{"trainer.overhead": self.overhead}),
        )

    def seconds(self, tokens: float) -> float:
        """Return the seconds in which the pool trains a batch with `tokens` tokens."""
        return tokens * self.seconds_per_token / self.units + self.overhead


@dataclass(frozen=True)
class PublicationCost:
    """The time of a publication, in which every replica gets new weights."""

    copy: float = 0.0
    """Seconds to copy the weights. The trainer does not train during this time."""
    transfer: float = 0.0
    """Seconds to transfer the copy to the replicas. Replicas and trainer continue to work during this time."""
    pause: float = 0.0
    """Seconds for which each replica stops decoding while it loads the weights."""
    rolling: bool = False
    """Whether the replicas load the weights one after the other. If False, all of them load at the same time."""
    recompute: bool = False
    """Whether a replica recomputes the KV cache of its sequences, at the speed of prefill, after it has loaded weights.

    If False, the sequences continue with the cache that older weights computed.
    """

    def __post_init__(self) -> None:
        costs = {"copy": self.copy, "transfer": self.transfer, "pause": self.pause}
        raise_if_any(*below_minimum(0, **{f"publication.{name}": value for name, value in costs.items()}))


@dataclass(frozen=True)
class PrefillCost:
    """The cost of prefill: computing the prompt and the earlier tokens of a sequence before a replica can decode it.

    The replica decodes nothing during prefill. The response tokens that a sequence already has are computed for each
    sequence, even if samples of its group share the prompt.
    """

    tokens_per_second: float = math.inf
    prompt_tokens: int = 0
    shared: bool = True
    """Whether the samples of a group that are on one replica at the same time share the
    computation of the prompt (prefix caching)."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(0, **{"prefill.prompt_tokens": self.prompt_tokens}),
            None if self.tokens_per_second > 0 else f"prefill.tokens_per_second {self.tokens_per_second} <= 0",
        )

    def seconds(self, tokens: float) -> float:
        """Return the seconds to prefill `tokens` tokens."""
        return tokens / self.tokens_per_second


@dataclass(frozen=True)
class Faults:
    """Failures of replicas. A lost replica gives up its sequences, and returns without sequences after `mttr` seconds."""

    times: tuple[tuple[float, int], ...] = ()
    """Failures at given times, each as (second, number of the replica). If there is no such
    replica at that time, nothing happens.

    Replicas are numbered from 0, first those of the pool, then those of the straggler lane.
    """
    mtbf: float | None = None
    """Mean seconds from the start of a replica to its next random failure, exponentially
    distributed (mean time between failures).

    Random failures are in addition to those in `times`. None: there are no random failures.
    """
    mttr: float = 0.0
    """Seconds from the loss of a replica until it returns (mean time to repair, here constant)."""
    keep: bool = True
    """Whether reported tokens of a lost replica's sequences survive the loss.

    If True, and with partial rollout, the sequences continue from these tokens on another
    replica. If False, they start over.
    """

    def __post_init__(self) -> None:
        raise_if_any(
            *(problem for second, _ in self.times for problem in below_minimum(0, **{"faults.times": second})),
            *([] if self.mtbf is None else not_above(0, **{"faults.mtbf": self.mtbf})),
            *below_minimum(0, **{"faults.mttr": self.mttr}),
        )

    def gaps(self, seed: int, replica: int) -> Iterator[float]:
        """Yield, for one replica, the seconds from each of its starts to its next random failure.

        The iterator is empty if `mtbf` is None, and endless otherwise. The values depend only
        on `mtbf`, `seed` and `replica`, the replica's number.
        """
        draw = np.random.default_rng((seed, 1, replica))
        while self.mtbf is not None:
            yield float(draw.exponential(self.mtbf))
