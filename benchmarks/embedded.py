"""Our trainer against TRL on one machine without a GPU: prints one JSON object.

    for each part:   model folder ─► round 1: async, sync, trl ─► round 2: async, sync, trl ─► … ─► medians, ratios

    python benchmarks/embedded.py [--part short|longTail|all] [--rounds 3] [--updates N]

Each run is a separate process with all cores. Variants alternate, so that a slow phase of the machine affects all of
them; ratios are formed within a round. Needs the dependency group `bench`. docs/benchmarks.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from jobs import PARTS, PROMPTS, SAMPLES, Part, save_model
from variants import VARIANTS, Measured, Variant, measure
from watch import cores

PACKAGES = ("qwen35", "torch", "transformers", "ray", "trl")
RATIOS: tuple[tuple[Variant, Variant], ...] = (("async", "trl"), ("async", "sync"), ("sync", "trl"))

type Round = dict[Variant, Measured]


def main() -> None:
    """Measure, and print."""
    arguments = _arguments()
    chosen = list(PARTS.values()) if arguments.part == "all" else [PARTS[arguments.part]]
    if arguments.updates is not None:
        chosen = [replace(part, updates=arguments.updates) for part in chosen]
    print(json.dumps(_report({part.name: _rounds(part, arguments.rounds) for part in chosen}, chosen), indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our trainer against TRL on this machine's CPU.")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="which job to measure [default: all]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant [default: 3]")
    parser.add_argument("--updates", type=int, help="updates per run, at least 10 [default: the job's own]")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if arguments.updates is not None and arguments.updates < 10:
        parser.error(f"--updates {arguments.updates}: at least 10, or no steady window is left")
    return arguments


def _rounds(part: Part, rounds: int) -> list[Round]:
    """Every variant in turn, `rounds` times; progress goes to stderr."""
    with TemporaryDirectory(prefix="benchmark-") as name:
        root = Path(name)
        save_model(part, root / "model")
        results: list[Round] = []
        for number in range(1, rounds + 1):
            results.append({})
            for variant in VARIANTS:
                folder = root / f"{number}-{variant}"
                folder.mkdir()
                results[-1][variant] = measured = measure(variant, part, folder)
                print(
                    f"{part.name} round {number}/{rounds} {variant}: {measured.samples_per_second:.0f} samples/s, "
                    f"{measured.others_cores:.2f} cores taken by others",
                    file=sys.stderr,
                )
        return results


def _report(results: dict[str, list[Round]], parts: Sequence[Part]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_model(), "cores": cores(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "parts": {part.name: _part(part, results[part.name]) for part in parts},
    }


def _part(part: Part, rounds: Sequence[Round]) -> dict[str, Any]:
    names = [field.name for field in fields(Measured)]
    return {
        "job": {_camel(name): value for name, value in asdict(part).items()}
        | {"promptsPerUpdate": PROMPTS, "samplesPerPrompt": SAMPLES},
        "ratios": {
            f"{over}/{under}": _spread([r[over].samples_per_second / r[under].samples_per_second for r in rounds])
            for over, under in RATIOS
        },
        "variants": {
            variant: {_camel(name): _spread([getattr(r[variant], name) for r in rounds]) for name in names}
            for variant in VARIANTS
        },
    }


def _camel(name: str) -> str:
    """Convert a field's name to the camel case of JSON and the manifest."""
    first, *rest = name.split("_")
    return first + "".join("MiB" if word == "mib" else word.capitalize() for word in rest)


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Return median, minimum, maximum and the values of all rounds; the first three are None if a value is missing."""
    present = [value for value in values if value is not None]
    whole = bool(present) and len(present) == len(values)
    return {
        "median": round(median(present), 4) if whole else None,
        "min": round(min(present), 4) if whole else None,
        "max": round(max(present), 4) if whole else None,
        "rounds": [None if value is None else round(value, 4) for value in values],
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unpresent")


if __name__ == "__main__":
    main()
