"""The fields of the spec that a resumed training must keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from qwen35_trainer.manifest.training import TrainingSpec

FIXED: Final = (
    "mode",
    "seed",
    "model",
    "data",
    "algorithm.groupSize",
    "train.engine",
    "train.freeze",
    "train.lora",
    "train.multiTokenPrediction",
    "train.optimizer.type",
)
"""Fields and sections of the spec that a checkpoint depends on: its weights, its optimizer state, and its position in the order of
the prompts. The custom resource definition fixes these and a few more that only a cluster depends on.
"""
MAX_SHOWN_CHARACTERS: Final = 200
"""Maximum length of a value in a message, in characters."""


@dataclass(frozen=True)
class Difference:
    """A difference between an earlier spec and the present one, in a field that a resumed training must keep.

    earlier, now: the two values; None: the field is not set.
    """

    field: str
    earlier: object
    now: object

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.earlier)} there, {shown(self.now)} here"


def differences(earlier: Mapping[str, Any], now: TrainingSpec) -> list[Difference]:
    """Return the differences of the spec `now` from an earlier spec, in the fields that a resumed training must keep.

    earlier: a spec as an earlier release stored it, with all defaults of that release. A field that this release added
    counts only if `now` sets the field to a value other than its default.
    """
    written = now.model_dump(mode="json", by_alias=True)
    chosen = now.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return [each for each in _compared("spec", earlier, written, chosen) if _is_fixed(each.field)]


def _compared(place: str, earlier: object, now: object, chosen: object) -> Iterator[Difference]:
    """Compare the values that two specs have at the path `place`, and yield each field in which they differ.

    earlier, now: the values. chosen: `now` without the fields that have their defaults.
    """
    if isinstance(earlier, Mapping) and isinstance(now, Mapping):
        inside = chosen if isinstance(chosen, Mapping) else {}
        for key in {**earlier, **now}:
            if key in earlier or key in inside:
                yield from _compared(f"{place}.{key}", earlier.get(key), now.get(key), inside.get(key))
    elif isinstance(earlier, list) and isinstance(now, list) and len(earlier) == len(now):
        items = chosen if isinstance(chosen, list) else [None] * len(now)
        for index, (before, after, item) in enumerate(zip(earlier, now, items, strict=True)):
            yield from _compared(f"{place}[{index}]", before, after, item)
    elif earlier != now:
        yield Difference(place, earlier, now)


def _is_fixed(field: str) -> bool:
    return any(field == f"spec.{path}" or field.startswith((f"spec.{path}.", f"spec.{path}[")) for path in FIXED)


def shown(value: object) -> str:
    """Return the value of a field as text for a message, shortened to MAX_SHOWN_CHARACTERS.
    None becomes "not set" in the text.
    """
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 1]}…"
