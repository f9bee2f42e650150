"""The cost model of a workload: replicas, the straggler lane, the trainer, publications, prefill and faults.

Times are in seconds, or in any other unit if all times use it. The unit of the reference workload is the decode step of
a replica that holds one sequence. For a manifest, `manifest_workload.HardwareSpeeds` has assumed speeds. The options
`--decode` and `--train-seconds-per-token` replace them by measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qwen35_trainer.simulate.limits import below_minimum, not_above, raise_if_any


@dataclass(frozen=True)
class ReplicaSpeed:
    """The speed of one rollout replica.

    A step gives each of the replica's n sequences one token, and takes `base / speed + per_sequence · n` seconds.
    """

    slots: int = 64
    """Maximum number of sequences at a time."""
    base: float = 1.0
    """Seconds of a step that do not depend on n, mainly for reading the weights."""
    per_sequence: float = 0.004
    """Seconds of a step per sequence, for its KV cache and its computation."""
    speed: float = 1.0
    """Factor by which the weights are read faster than `base`: tensor parallelism, another device."""

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
        """Tokens per second of the replica if all its slots are taken."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas of one kind. A heterogeneous pool has several groups."""

    count: int = 8
    replica: ReplicaSpeed = ReplicaSpeed()

    def __post_init__(self) -> None:
        raise_if_any(*below_minimum(0, count=self.count))


@dataclass(frozen=True)
class LaneSpeed:
    """The straggler lane: faster replicas to which long sequences move."""

    replicas: int = 1
    slots: int = 96
    """Slots of each replica."""
    speed: float = 1.5
    """As `ReplicaSpeed.speed`."""
    base: float = 1.0
    """As `ReplicaSpeed.base`."""
    per_sequence: float = 0.003
    """As `ReplicaSpeed.per_sequence`."""
    arrival_steps: float = 200.0
    """Additional steps of a sequence that arrives in the lane, because its prefix is computed again."""
    after_tokens: int = 4000
    """Response tokens after which a sequence moves to the lane."""

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
    """The speed of the train pool. A batch takes `tokens · seconds_per_token / units + overhead` seconds."""

    units: int = 8
    seconds_per_token: float = 0.0375
    """Seconds per trained token of one unit."""
    overhead: float = 0.0
    """Seconds of a batch that do not depend on its size."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"trainer.units": self.units}),
            *not_above(0, **{"trainer.seconds_per_token": self.seconds_per_token}),
            *below_minimum(0, **{"trainer.overhead": self.overhead}),
        )

    def seconds(self, tokens: float) -> float:
        """Return the duration of a batch with `tokens` tokens."""
        return tokens * self.seconds_per_token / self.units + self.overhead


@dataclass(frozen=True)
class PublicationCost:
    """The cost of bringing new weights to every replica."""

    transfer: float = 0.0
    """Seconds of the transfer, during which replicas and trainer continue to work."""
    pause: float = 0.0
    """Seconds during which a replica stops to load the weights."""
    rolling: bool = False
    """Whether the replicas load the weights one after the other. Otherwise they all load them at the same time."""
    recompute: bool = False
    """Whether a replica recomputes the KV cache of its sequences, at the prefill rate. Otherwise it keeps the old cache."""

    def __post_init__(self) -> None:
        raise_if_any(*below_minimum(0, **{"publication.transfer": self.transfer, "publication.pause": self.pause}))


@dataclass(frozen=True)
class PrefillCost:
    """The cost of prefill: computing the prefix of a sequence that starts on a replica.

    The replica decodes nothing during prefill. The prompt is computed again for each sample of a group.
    """

    tokens_per_second: float = math.inf
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(0, **{"prefill.prompt_tokens": self.prompt_tokens}),
            None if self.tokens_per_second > 0 else f"prefill.tokens_per_second {self.tokens_per_second} <= 0",
        )

    def seconds(self, tokens: float) -> float:
        """Return the time to prefill `tokens` tokens."""
        return tokens / self.tokens_per_second


@dataclass(frozen=True)
class Faults:
    """Failures of replicas. A lost replica returns after `mttr` seconds, and then holds no sequences."""

    times: tuple[tuple[float, int], ...] = ()
    """(second, number of the replica) of failures. A replica that does not exist at that time does not fail. The numbers of
    the lane follow those of the pool.
    """
    mtbf: float | None = None
    """Mean seconds between two failures of a replica, exponentially distributed, in addition to `times`. None: no such
    failures.
    """
    mttr: float = 0.0
    """Seconds until a lost replica returns."""
    keep: bool = True
    """Whether the tokens of a lost replica are available elsewhere. Partial rollout then does not generate them again."""

    def __post_init__(self) -> None:
        raise_if_any(
            *(problem for second, _ in self.times for problem in below_minimum(0, **{"faults.times": second})),
            *([] if self.mtbf is None else not_above(0, **{"faults.mtbf": self.mtbf})),
            *below_minimum(0, **{"faults.mttr": self.mttr}),
        )

    def gaps(self, seed: int, replica: int) -> Iterator[float]:
        """Yield the seconds from each start of a replica to its next failure; nothing if `mtbf` is None."""
        draw = np.random.default_rng((seed, 1, replica))
        while self.mtbf is not None:
            yield float(draw.exponential(self.mtbf))
