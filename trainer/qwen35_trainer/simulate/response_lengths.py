"""Distributions of response lengths, and groups sampled from them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.simulate.cost_model import below_minimum, not_above, raise_if_any

type Floats = NDArray[np.float64]
STANDARD_NORMAL = NormalDist()
BLOCK_PROMPTS = 512
"""Number of prompts whose response lengths are drawn together."""


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths, clipped to at least `floor` and at most `cap` tokens.

    `mean` and `cv` describe the distribution before clipping.
    """

    mean: float = 4000.0
    cv: float = 1.0
    """Coefficient of variation: the standard deviation divided by the mean."""
    cap: int = 32000
    floor: int = 16

    def __post_init__(self) -> None:
        raise_if_any(
            *not_above(0, **{"lengths.mean": self.mean}),
            *below_minimum(0, **{"lengths.cv": self.cv}),
            *_ends(self.floor, self.cap),
        )

    def at(self, normal: Floats) -> Floats:
        """Convert standard normal deviates to lengths in tokens, before clipping."""
        sigma = math.sqrt(math.log1p(self.cv**2))
        return np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * normal)


@dataclass(frozen=True)
class BoundedPareto:
    """Pareto lengths with bounds: a density proportional to x^(-alpha - 1) between `floor` and `cap` tokens."""

    alpha: float = 1.1
    floor: int = 500
    cap: int = 32000

    def __post_init__(self) -> None:
        raise_if_any(*not_above(0, **{"lengths.alpha": self.alpha}), *_ends(self.floor, self.cap))

    def at(self, normal: Floats) -> Floats:
        """Convert standard normal deviates to lengths in tokens, which lie between `floor` and `cap`."""
        share = _share(normal)
        return np.asarray(self.floor * (1 - share * (1 - (self.floor / self.cap) ** self.alpha)) ** (-1 / self.alpha))


@dataclass(frozen=True)
class Replayed:
    """Observed lengths, from which lengths are drawn with replacement. `Replayed.read` reads them from a file."""

    prompts: tuple[tuple[int, ...], ...]
    """For each prompt, the observed lengths of its responses, in tokens. All lengths of a group
    are drawn from those of one prompt.

    If the file does not name prompts, all lengths belong to one prompt.
    """

    def __post_init__(self) -> None:
        raise_if_any(
            None if self.prompts and all(self.prompts) else "lengths.prompts is empty, or one of them is",
            *(f"lengths.prompts has {n} < 1" for prompt in self.prompts for n in prompt if n < 1),
        )

    @classmethod
    def read(cls, path: str | Path) -> Replayed:
        """Read lengths from JSON lines, each a number or {"prompt": key, "tokens": number}.

        Raises ValueError with every invalid line.
        """
        by_prompt: dict[Any, list[int]] = {}
        problems: list[str] = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                try:
                    key, tokens = _parse(line)
                except ValueError as error:
                    problems.append(f"{path}:{number}: {error}")
                else:
                    by_prompt.setdefault(key, []).append(tokens)
        if not by_prompt and not problems:
            problems.append(f"{path}: has no lengths")
        if None in by_prompt and len(by_prompt) > 1:
            problems.append(f"{path}: some lines name a prompt and {len(by_prompt[None])} do not")
        raise_if_any(*problems)
        return cls(tuple(tuple(lengths) for lengths in by_prompt.values()))

    @property
    def cap(self) -> int:
        """The maximum of the observed lengths, in tokens. It also limits lengths that grow during the run (`Workload.drift`)."""
        return max(map(max, self.prompts))

    @property
    def floor(self) -> int:
        """The minimum length, 1 token. It also limits lengths that shrink during the run (`Workload.drift`)."""
        return 1


type LengthDistribution = Lognormal | BoundedPareto | Replayed


class GroupSampler:
    """Draws the response lengths of the groups of a simulated run, and whether the rewards of a group differ (signal).

    Without drift, the lengths of a prompt do not depend on the simulated policy. A prompt that is dispatched again gets
    new lengths.
    """

    def __init__(
        self, lengths: LengthDistribution, group_size: int, correlation: float, drift: float, signal: float, seed: int
    ) -> None:
        """Create a sampler.

        correlation: share, 0 to 1, of the variance of the logarithm of the length that depends on the prompt.
        drift: factor by which lengths grow from one batch to the next. signal: probability that the rewards of a
        group differ. seed: seed of all draws.
        """
        self._lengths, self._size, self._seed = lengths, group_size, seed
        self._shared, self._own = math.sqrt(correlation), math.sqrt(1 - correlation)
        self._drift, self._signal = drift, signal
        self._blocks: dict[int, tuple[Floats, list[bool]]] = {}
        self._repeats: dict[int, int] = {}  # position → how often it was drawn again
        self._last_position = -1

    def draw(self, position: int, batch: int) -> tuple[list[int], bool]:
        """Draw the number of response tokens of each sequence of a group, and whether the rewards of the group differ.

        position: position of the group's prompt in the data. A position that was drawn before gets new lengths.
        batch: number of the next batch to train. If lengths drift, this number determines how far.
        """
        repeat = 0
        if position <= self._last_position:
            repeat = self._repeats[position] = self._repeats.get(position, 0) + 1
        self._last_position = max(position, self._last_position)
        block, row = divmod(position, BLOCK_PROMPTS)
        if repeat:
            lengths, signal = self._block(block, position, repeat)
        else:
            if block not in self._blocks:
                self._blocks = {block: self._block(block)}
            lengths, signal = self._blocks[block]
        return self._clip(lengths[row], self._drift**batch), signal[row]

    def mean(self, batches: range) -> float:
        """Return the mean number of tokens of a response over the batches with the numbers
        `batches`, including drift and clipping.
        """
        factors = [1.0] if self._drift == 1 else [self._drift**batch for batch in batches]
        return float(np.mean([mean_length(self._lengths, factor) for factor in factors]))

    def _clip(self, lengths: Floats, factor: float) -> list[int]:
        scaled: list[int] = (
            np.clip(np.rint(lengths * factor), self._lengths.floor, self._lengths.cap).astype(int).tolist()
        )
        return scaled

    def _block(self, block: int, position: int = 0, repeat: int = 0) -> tuple[Floats, list[bool]]:
        """Draw a block of prompts: lengths before clipping, (BLOCK_PROMPTS, group size), and whether each has signal.

        repeat: if it is not 0, other samples of the same prompts are drawn, because the prompt at `position` was
        dispatched again.
        """
        prompts = np.random.default_rng((self._seed, 0, block))
        prompt, signal = prompts.standard_normal(BLOCK_PROMPTS), (prompts.random(BLOCK_PROMPTS) < self._signal).tolist()
        samples = np.random.default_rng((self._seed, 2, position, repeat)) if repeat else prompts
        if isinstance(self._lengths, Replayed):
            return self._replayed(_share(prompt), samples), signal
        normal = self._shared * prompt[:, None] + self._own * samples.standard_normal((BLOCK_PROMPTS, self._size))
        return self._lengths.at(normal), signal

    def _replayed(self, prompt: Floats, samples: np.random.Generator) -> Floats:
        assert isinstance(self._lengths, Replayed)
        prompts = self._lengths.prompts
        indices = np.minimum((prompt * len(prompts)).astype(int), len(prompts) - 1)
        return np.array([samples.choice(prompts[index], self._size) for index in indices.tolist()], dtype=np.float64)


def mean_length(lengths: LengthDistribution, factor: float = 1.0) -> float:
    """Return the mean length, in tokens, of a distribution whose lengths are multiplied by `factor` and then clipped."""
    if isinstance(lengths, Replayed):
        means = [np.clip(np.rint(np.array(prompt) * factor), 1, lengths.cap).mean() for prompt in lengths.prompts]
        return float(np.mean(means))
    return float(np.clip(_quantiles(lengths) * factor, lengths.floor, lengths.cap).mean())


@cache
def _quantiles(lengths: Lognormal | BoundedPareto) -> Floats:
    """Return the lengths at 20,000 equidistant quantiles. Their mean has a relative error of about 1e-4."""
    shares = (np.arange(20_000) + 0.5) / 20_000
    return lengths.at(np.vectorize(STANDARD_NORMAL.inv_cdf, otypes=[np.float64])(shares))


def _share(normal: Floats) -> Floats:
    """Return the standard normal distribution function at each deviate: the share of deviates below it."""
    return np.asarray(np.vectorize(STANDARD_NORMAL.cdf, otypes=[np.float64])(normal))


def _ends(floor: int, cap: int) -> list[str]:
    return [
        *below_minimum(1, **{"lengths.floor": floor}),
        *([] if floor <= cap < math.inf else [f"lengths.cap {cap} < lengths.floor {floor}"]),
    ]


def _parse(line: str) -> tuple[Any, int]:
    """Parse a line of a file of lengths: return the prompt's key, or None if there is none, and the number of tokens.

    Raises ValueError for a line that is not valid.
    """
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(f"{line.strip()[:40]!r} is not numeric") from None
    key, tokens = (entry.get("prompt"), entry.get("tokens")) if isinstance(entry, dict) else (None, entry)
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not math.isfinite(tokens):
        raise ValueError(f"{line.strip()[:40]!r} is not numeric")
    if not isinstance(key, str | int | float | None):
        raise ValueError("the prompt is neither a string nor a number")  # noqa: TRY004, an error in the file
    if tokens < 1:
        raise ValueError(f"{tokens} tokens < 1" + (": negative" if tokens < 0 else ""))
    return key, round(tokens)
