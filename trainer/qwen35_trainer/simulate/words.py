"""Loads and results as people read them."""

from __future__ import annotations

import math

from qwen35_trainer.simulate.load import Load, Policy
from qwen35_trainer.simulate.manifest import lengths_in_words
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.spec.problems import counted

NONE = "–"


def digits(value: float | None) -> str:
    """Three digits, thousands apart: 0.0123, 1.23, 213, 7,514."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share as 12%, below 10% with a decimal."""
    if share is None or not math.isfinite(share):
        return NONE
    if abs(share) < 0.0005:
        return "0%"
    decimals = 1 if abs(share) < 0.0995 else 0
    return f"{share:{'+' if signed else ''}.{decimals}%}"


def load_in_words(load: Load, seeds: int = 1) -> list[str]:
    """Rule and knobs; pools and batches; lengths and the length of the run."""
    window = load.settings.window
    knobs = [str(load.policy)]
    if load.policy is Policy.DEADLINE_FIRST:
        knobs += [f"s {window.staleness_threshold:g}, S {window.max_version_lag}", str(load.on_missed_deadline)]
        knobs += ["adaptive"] if load.adaptive else []
    elif window.staleness_threshold:
        knobs.append(f"s {window.staleness_threshold:g}")
    seed = f"seed {load.seed}" if seeds == 1 else f"seeds {load.seed} to {load.seed + seeds - 1}"
    return [
        " · ".join([*knobs, f"P {load.prompts_per_batch}, G {load.group_size}, K {load.batches_per_version}"]),
        " · ".join([_pool(load), *_lane(load), counted(load.train_pool.units, "trainer unit")]),
        f"{lengths_in_words(load)} · {load.batches - load.warm_up} batches after {load.warm_up}, {seed}",
    ]


def _pool(load: Load) -> str:
    slots = sorted({engine.slots for engine in load.engines})
    return f"{counted(len(load.engines), 'engine')} × {'/'.join(f'{n:,}' for n in slots)} slots"


def _lane(load: Load) -> list[str]:
    if (lane := load.lane) is None:
        return []
    return [f"lane: {counted(lane.engines, 'engine')}, {lane.speed:.3g} × as fast, after {lane.after_tokens:,} tokens"]


def lags_in_words(result: Result, most: int = 8) -> str:
    """Shares of the groups by lag: "1: 29%, 2: 47%"."""
    total = sum(result.lag_histogram) or 1
    shares = [(lag, count / total) for lag, count in enumerate(result.lag_histogram) if count]
    shown = [f"{lag}: {percent(share)}" for lag, share in shares[:most]]
    rest = sum(share for _, share in shares[most:])
    return ", ".join(shown + ([f"above: {percent(rest)}"] if rest else []))
