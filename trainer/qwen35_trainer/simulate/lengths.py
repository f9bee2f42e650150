"""How long responses are: three distributions, and groups drawn from them."""

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

from qwen35_trainer.simulate.problems import above, at_least, refuse

type Floats = NDArray[np.float64]
NORMAL = NormalDist()
BLOCK = 512
"""Prompts that are drawn at a time."""


@dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithm is normal, cut off at both ends. `mean` and `cv` are those before the cut."""

    mean: float = 4000.0
    cv: float = 1.0
    """Standard deviation over mean."""
    cap: int = 32000
    floor: int = 16

    def __post_init__(self) -> None:
        refuse(
            *above(0, **{"lengths.mean": self.mean}),
            *at_least(0, **{"lengths.cv": self.cv}),
            *_ends(self.floor, self.cap),
        )

    def at(self, normal: Floats) -> Floats:
        """The lengths at standard normal deviates, before the cut."""
        sigma = math.sqrt(math.log1p(self.cv**2))
        return np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * normal)


@dataclass(frozen=True)
class BoundedPareto:
    """Lengths with the density ~ x^(-alpha - 1) between floor and cap."""

    alpha: float = 1.1
    floor: int = 500
    cap: int = 32000

    def __post_init__(self) -> None:
        refuse(*above(0, **{"lengths.alpha": self.alpha}), *_ends(self.floor, self.cap))

    def at(self, normal: Floats) -> Floats:
        """The lengths at standard normal deviates."""
        share = _share(normal)
        return np.asarray(self.floor * (1 - share * (1 - (self.floor / self.cap) ** self.alpha)) ** (-1 / self.alpha))


@dataclass(frozen=True)
class Replayed:
    """Lengths that were seen, drawn again with replacement. `Replayed.read` takes them from a file."""

    prompts: tuple[tuple[int, ...], ...]
    """Lengths by prompt: a group draws its prompt, and then its samples from that one. All in one if prompts are unknown."""

    def __post_init__(self) -> None:
        refuse(
            None if self.prompts and all(self.prompts) else "lengths.prompts is empty, or one of them is",
            *(f"lengths.prompts has {n} < 1" for prompt in self.prompts for n in prompt if n < 1),
        )

    @classmethod
    def read(cls, path: str | Path) -> Replayed:
        """JSON lines: a number each, or {"prompt": key, "tokens": number} each. Raises ValueError that names every bad line."""
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
            problems.append(f"{path}: has no length, not a single line")
        if None in by_prompt and len(by_prompt) > 1:
            problems.append(f"{path}: some lines name a prompt and {len(by_prompt[None])} do not")
        refuse(*problems)
        return cls(tuple(tuple(lengths) for lengths in by_prompt.values()))

    @property
    def cap(self) -> int:
        """The longest."""
        return max(map(max, self.prompts))

    @property
    def floor(self) -> int:
        """The shortest that drift makes of any."""
        return 1


type Lengths = Lognormal | BoundedPareto | Replayed


class Groups:
    """Lengths of the groups of a run. The same prompt gets the same ones under any policy, and others when it is drawn again."""

    def __init__(
        self, lengths: Lengths, group_size: int, correlation: float, drift: float, signal: float, seed: int
    ) -> None:
        self._lengths, self._size, self._seed = lengths, group_size, seed
        self._shared, self._own = math.sqrt(correlation), math.sqrt(1 - correlation)
        self._drift, self._signal = drift, signal
        self._blocks: dict[int, tuple[Floats, list[bool]]] = {}
        self._again: dict[int, int] = {}
        self._seen = -1

    def draw(self, position: int, batch: int) -> tuple[list[int], bool]:
        """Response tokens of a group's sequences, and whether there is signal. `batch`: the next one, for the drift."""
        again = 0
        if position <= self._seen:
            again = self._again[position] = self._again.get(position, 0) + 1
        self._seen = max(position, self._seen)
        block, at = divmod(position, BLOCK)
        if again:
            lengths, signal = self._block(block, position, again)
        else:
            if block not in self._blocks:
                self._blocks = {block: self._block(block)}
            lengths, signal = self._blocks[block]
        return self._cut(lengths[at], self._drift**batch), signal[at]

    def mean(self, batches: range) -> float:
        """The mean length of what is drawn while these are the next batches, in tokens."""
        factors = [1.0] if self._drift == 1 else [self._drift**batch for batch in batches]
        return float(np.mean([mean_of(self._lengths, factor) for factor in factors]))

    def _cut(self, lengths: Floats, factor: float) -> list[int]:
        scaled: list[int] = (
            np.clip(np.rint(lengths * factor), self._lengths.floor, self._lengths.cap).astype(int).tolist()
        )
        return scaled

    def _block(self, block: int, position: int = 0, again: int = 0) -> tuple[Floats, list[bool]]:
        """Lengths before the cut, (BLOCK, group size), and signals. Drawn again: of the same prompts, other samples."""
        prompts = np.random.default_rng((self._seed, 0, block))
        prompt, signal = prompts.standard_normal(BLOCK), (prompts.random(BLOCK) < self._signal).tolist()
        samples = np.random.default_rng((self._seed, 2, position, again)) if again else prompts
        if isinstance(self._lengths, Replayed):
            return self._replayed(_share(prompt), samples), signal
        normal = self._shared * prompt[:, None] + self._own * samples.standard_normal((BLOCK, self._size))
        return self._lengths.at(normal), signal

    def _replayed(self, prompt: Floats, samples: np.random.Generator) -> Floats:
        assert isinstance(self._lengths, Replayed)
        prompts = self._lengths.prompts
        chosen = np.minimum((prompt * len(prompts)).astype(int), len(prompts) - 1)
        return np.array([samples.choice(prompts[each], self._size) for each in chosen.tolist()], dtype=np.float64)


def mean_of(lengths: Lengths, factor: float = 1.0) -> float:
    """The mean of the lengths times `factor`, after the cut."""
    if isinstance(lengths, Replayed):
        means = [np.clip(np.rint(np.array(prompt) * factor), 1, lengths.cap).mean() for prompt in lengths.prompts]
        return float(np.mean(means))
    return float(np.clip(_quantiles(lengths) * factor, lengths.floor, lengths.cap).mean())


@cache
def _quantiles(lengths: Lognormal | BoundedPareto) -> Floats:
    """Lengths at the middles of equal shares of the distribution: their mean is exact to about 1e-4."""
    shares = (np.arange(20_000) + 0.5) / 20_000
    return lengths.at(np.vectorize(NORMAL.inv_cdf, otypes=[np.float64])(shares))


def _share(normal: Floats) -> Floats:
    """The share of a standard normal below each deviate."""
    return np.asarray(np.vectorize(NORMAL.cdf, otypes=[np.float64])(normal))


def _ends(floor: int, cap: int) -> list[str]:
    return [
        *at_least(1, **{"lengths.floor": floor}),
        *([] if floor <= cap < math.inf else [f"lengths.cap {cap} < lengths.floor {floor}"]),
    ]


def _parse(line: str) -> tuple[Any, int]:
    """(prompt or None, tokens) of a line."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(f"{line.strip()[:40]!r} is not numeric") from None
    key, tokens = (found.get("prompt"), found.get("tokens")) if isinstance(found, dict) else (None, found)
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not math.isfinite(tokens):
        raise ValueError(f"{line.strip()[:40]!r} is not numeric")
    if not isinstance(key, str | int | float | None):
        raise ValueError("the prompt's key is neither text nor a number")  # noqa: TRY004, a fault of the file
    if tokens < 1:
        raise ValueError(f"{tokens} tokens < 1" + (": negative" if tokens < 0 else ""))
    return key, round(tokens)
