"""The cost model of a workload: replicas, the straggler lane, the trainer, publications, prefill and faults.

Times are in seconds, or in any other unit if all times use the same unit. The unit of the reference workload is the
decode step of a replica that holds one sequence. For a manifest, `manifest_workload.HardwareSpeeds` contains assumed
speeds. The options `--decode` and `--train-seconds-per-token` replace them by measured speeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def raise_if_any(*problems: str | None) -> None:
    """Raise ValueError with all problems that are not None."""
    messages = [problem for problem in problems if problem is not None]
    if messages:
        raise ValueError("; ".join(messages))


def below_minimum(minimum: float, **values: float) -> list[str]:
    """Return the message `name value < minimum` for each value that is below the minimum or not finite."""
    return [f"{name} {value} < {minimum}" for name, value in values.items() if not minimum <= value < math.inf]


def not_above(limit: float, **values: float) -> list[str]:
    """Return the message `name value <= limit` for each value that is at most the limit or not finite."""
    return [f"{name} {value} <= {limit}" for name, value in values.items() if not limit < value < math.inf]


@dataclass(frozen=True)
class ReplicaSpeed:
    """The speed of one rollout replica.

    A step gives each of the replica's n sequences one token, and takes `base / speed + per_sequence · n` seconds.
    """

    slots: int = 64
    """Maximum number of sequences that the replica decodes at a time."""
    base: float = 1.0
    """Seconds of a decode step that do not depend on the number of sequences.

    They are mainly for reading the weights.
    """
    per_sequence: float = 0.004
    """Seconds that each sequence adds to a decode step, for its KV cache and its computation."""
    speed: float = 1.0
    """Factor by which the replica reads its weights faster, because it has more or faster devices.

    Reading them takes `base / speed` seconds.
    """

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, slots=self.slots),
            *below_minimum(0, base=self.base, per_sequence=self.per_sequence),
            *not_above(0, speed=self.speed),
            "base 0 + per_sequence 0 <= 0: a step takes no time" if self.base == 0 == self.per_sequence else None,
        )

    def step(self, sequences: int) -> float:
        """Return the duration of a step with `sequences` sequences, in seconds."""
        return self.base / self.speed + self.per_sequence * sequences

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the replica generates per second if all its slots are taken."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True)
class ReplicaGroup:
    """A number of equal replicas. A pool with different kinds of replicas has several such groups."""

    count: int = 8
    replica: ReplicaSpeed = ReplicaSpeed()

    def __post_init__(self) -> None:
        raise_if_any(*below_minimum(0, count=self.count))


@dataclass(frozen=True)
class LaneSpeed:
    """The straggler lane: faster replicas, to which long sequences move."""

    replicas: int = 1
    slots: int = 96
    """Maximum number of sequences that each replica of the lane decodes at a time."""
    speed: float = 1.5
    """Factor by which a replica of the lane reads its weights faster. Reading them takes `base / speed` seconds."""
    base: float = 1.0
    """Seconds of a decode step in the lane that do not depend on the number of sequences, at speed 1."""
    per_sequence: float = 0.003
    """Seconds that each sequence adds to a decode step in the lane."""
    arrival_steps: float = 200.0
    """Decode steps that a sequence loses when it moves to the lane, in addition to the prefill that `prefill` charges for
    its prompt and its tokens. With the default of `prefill`, which is free, they stand for prefill too.
    """
    after_tokens: int = 4000
    """Number of response tokens after which a sequence may move to the lane."""
    breaks_even: bool = True
    """Whether a sequence moves only if it is expected to finish sooner in the lane, as in real runs. If not, every sequence
    moves after `after_tokens` tokens, for comparison.
    """

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
    """The speed of a train pool of `units` equal units.

    A batch takes `tokens · seconds_per_token / units + overhead` seconds.
    """

    units: int = 8
    seconds_per_token: float = 0.0375
    """Seconds that one unit of the train pool takes per trained token."""
    overhead: float = 0.0
    """Seconds that a batch takes in addition, independently of its size."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"trainer.units": self.units}),
            *not_above(0, **{"trainer.seconds_per_token": self.seconds_per_token}),
            *below_minimum(0, **{"trainer.overhead": self.overhead}),
        )

    def seconds(self, tokens: float) -> float:
        """Return the duration of a batch with `tokens` tokens, in seconds."""
        return tokens * self.seconds_per_token / self.units + self.overhead


@dataclass(frozen=True)
class PublicationCost:
    """The cost of bringing new weights to every replica."""

    copy: float = 0.0
    """Seconds to copy the weights. The trainer does nothing else during this time."""
    transfer: float = 0.0
    """Seconds to transfer the copy to the replicas. Replicas and trainer continue to work during this time."""
    pause: float = 0.0
    """Seconds for which each replica stops decoding while it loads the weights."""
    rolling: bool = False
    """Whether the replicas load the weights one after the other. Otherwise all of them load at the same time."""
    recompute: bool = False
    """Whether a replica recomputes the KV cache of its sequences after it has loaded weights, at the speed of prefill.

    Otherwise the sequences continue with the cache that older weights computed.
    """

    def __post_init__(self) -> None:
        costs = {"copy": self.copy, "transfer": self.transfer, "pause": self.pause}
        raise_if_any(*below_minimum(0, **{f"publication.{name}": value for name, value in costs.items()}))


@dataclass(frozen=True)
class PrefillCost:
    """The cost of prefill: computing the prompt and earlier tokens of a sequence before a replica can decode it.

    The replica decodes nothing during prefill. With `shared`, the replica computes a prompt once for all samples of the group
    that it holds at the same time. The response tokens that a sequence already has are computed for each sequence.
    """

    tokens_per_second: float = math.inf
    prompt_tokens: int = 0
    shared: bool = True
    """Whether the samples of a group that are on one replica share the computation of their prompt (prefix caching)."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(0, **{"prefill.prompt_tokens": self.prompt_tokens}),
            None if self.tokens_per_second > 0 else f"prefill.tokens_per_second {self.tokens_per_second} <= 0",
        )

    def seconds(self, tokens: float) -> float:
        """Return the time to prefill `tokens` tokens, in seconds."""
        return tokens / self.tokens_per_second


@dataclass(frozen=True)
class Faults:
    """Failures of replicas. A lost replica returns after `mttr` seconds, and then holds no sequences."""

    times: tuple[tuple[float, int], ...] = ()
    """Failures, each as (second, number of the replica). If the replica does not exist at that time, nothing happens.

    Replicas are numbered from 0, first those of the pool, then those of the lane.
    """
    mtbf: float | None = None
    """Mean seconds between two random failures of a replica, exponentially distributed.

    Random failures are in addition to those in `times`. None: there are no random failures.
    """
    mttr: float = 0.0
    """Seconds until a lost replica returns."""
    keep: bool = True
    """Whether the tokens of a lost replica's sequences survive the loss.

    If so, and with partial rollout, the sequences continue with these tokens. Otherwise they start over.
    """

    def __post_init__(self) -> None:
        raise_if_any(
            *(problem for second, _ in self.times for problem in below_minimum(0, **{"faults.times": second})),
            *([] if self.mtbf is None else not_above(0, **{"faults.mtbf": self.mtbf})),
            *below_minimum(0, **{"faults.mttr": self.mttr}),
        )

    def gaps(self, seed: int, replica: int) -> Iterator[float]:
        """Yield the seconds from each start of a replica to its next random failure.

        Yields nothing if `mtbf` is None.
        """
        draw = np.random.default_rng((seed, 1, replica))
        while self.mtbf is not None:
            yield float(draw.exponential(self.mtbf))
