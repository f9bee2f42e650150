"""The hardware of a load: engines, the lane, the trainer, and what it costs to give weights from one to the other.

Times are in seconds. Another unit will do if it is used throughout: the reference load counts in decode steps of an engine
that holds one sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.simulate.problems import above, at_least, refuse


@dataclass(frozen=True)
class Engine:
    """One rollout replica. A step gives each of its n sequences a token and takes `base / speed + per_sequence · n`."""

    slots: int = 64
    """Sequences at a time."""
    base: float = 1.0
    """Seconds of a step that do not depend on n: reading the weights."""
    per_sequence: float = 0.004
    """Seconds of a step per sequence: its KV cache, its computation."""
    speed: float = 1.0
    """How much faster the weights are read than `base` says: tensor parallelism, another device."""

    def __post_init__(self) -> None:
        refuse(
            *at_least(1, slots=self.slots),
            *at_least(0, base=self.base, per_sequence=self.per_sequence),
            *above(0, speed=self.speed),
            "base 0 + per_sequence 0 <= 0: a step takes no time" if self.base == 0 == self.per_sequence else None,
        )

    def step(self, sequences: int) -> float:
        """Seconds of a step with so many sequences."""
        return self.base / self.speed + self.per_sequence * sequences

    @property
    def tokens_per_second(self) -> float:
        """With all slots taken."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True)
class EnginePool:
    """Engines of one kind. Several of these make a heterogeneous pool."""

    count: int = 8
    engine: Engine = Engine()

    def __post_init__(self) -> None:
        refuse(*at_least(0, count=self.count))


@dataclass(frozen=True)
class Lane:
    """Faster engines that take over the sequences that have grown long."""

    engines: int = 1
    slots: int = 96
    """Of each."""
    speed: float = 1.5
    """As `Engine.speed`."""
    base: float = 1.0
    """As `Engine.base`."""
    per_sequence: float = 0.003
    """As `Engine.per_sequence`."""
    arrival_steps: float = 200.0
    """Further steps that a sequence takes here when it arrives: its prefix is computed again."""
    after_tokens: int = 4000
    """Response tokens after which a sequence moves here."""

    def __post_init__(self) -> None:
        refuse(
            *at_least(1, **{"lane.engines": self.engines, "lane.after_tokens": self.after_tokens}),
            *at_least(0, **{"lane.arrival_steps": self.arrival_steps}),
        )
        _ = self.engine

    @property
    def engine(self) -> Engine:
        """One of its engines. Raises ValueError when there can be none such."""
        return Engine(self.slots, self.base, self.per_sequence, self.speed)


@dataclass(frozen=True)
class Trainer:
    """The train pool. A batch takes `tokens · seconds_per_token / units + overhead`."""

    units: int = 8
    seconds_per_token: float = 0.0375
    """Of one unit."""
    overhead: float = 0.0
    """Seconds that a batch takes whatever its size."""

    def __post_init__(self) -> None:
        refuse(
            *at_least(1, **{"trainer.units": self.units}),
            *above(0, **{"trainer.seconds_per_token": self.seconds_per_token}),
            *at_least(0, **{"trainer.overhead": self.overhead}),
        )

    def seconds(self, tokens: float) -> float:
        """Of a batch."""
        return tokens * self.seconds_per_token / self.units + self.overhead


@dataclass(frozen=True)
class Publication:
    """What it costs to give new weights to every engine."""

    transfer: float = 0.0
    """Seconds in which they travel, while engines and trainer work on."""
    pause: float = 0.0
    """Seconds in which an engine stands still to load them."""
    rolling: bool = False
    """One engine after the other loads them. Otherwise all do at once."""
    recompute: bool = False
    """An engine computes the KV cache of what it holds again, at the prefill rate. Otherwise the old one is kept."""

    def __post_init__(self) -> None:
        refuse(*at_least(0, **{"publication.transfer": self.transfer, "publication.pause": self.pause}))


@dataclass(frozen=True)
class Prefill:
    """The prefix of a sequence that starts on an engine: the engine decodes nothing for so long.

    The samples of a group do not share it.
    """

    tokens_per_second: float = math.inf
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        refuse(
            *at_least(0, **{"prefill.prompt_tokens": self.prompt_tokens}),
            None if self.tokens_per_second > 0 else f"prefill.tokens_per_second {self.tokens_per_second} <= 0",
        )

    def seconds(self, tokens: float) -> float:
        """Of so many tokens."""
        return tokens / self.tokens_per_second
