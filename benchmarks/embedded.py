"""Our trainer against TRL on one machine without a GPU: prints one JSON object.

    for each part:   model folder ─► round 1: async, sync, trl, halves ─► round 2: the same ─► … ─► medians, ratios

    python benchmarks/embedded.py [--part short|longTail|all] [--rounds 3] [--updates N] [--variants async sync trl]

Each run is a separate process with all cores. Variants alternate, so that a slow phase of the machine affects all of
them; ratios are formed within a round. Needs the dependency group `bench`. docs/benchmarks.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from halves import Halves, halves
from jobs import PARTS, PROMPTS, SAMPLES, Part, PartName, save_model
from variants import VARIANTS, Measured, Variant, measure
from watch import cores

PACKAGES = ("qwen35", "torch", "transformers", "ray", "trl")
RATIOS: tuple[tuple[Variant, Variant], ...] = (("async", "trl"), ("async", "sync"), ("sync", "trl"))


@dataclass(frozen=True)
class Round:
    """One run of each variant, and each half of `async` alone."""

    variants: dict[Variant, Measured]
    halves: Halves

    @property
    def overlap(self) -> float:
        return self.halves.overlap(self.variants["async"].seconds_per_update)


def main() -> None:
    """Measure, and print."""
    arguments = _arguments()
    chosen = list(PARTS.values()) if arguments.part == "all" else [PARTS[arguments.part]]
    if arguments.updates is not None:
        chosen = [replace(part, updates=arguments.updates) for part in chosen]
    variants = tuple(variant for variant in VARIANTS if variant in arguments.variants)
    rounds = {part.name: _rounds(part, arguments.rounds, variants) for part in chosen}
    print(json.dumps(_report(rounds, chosen, variants), indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our trainer against TRL on this machine's CPU.")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="which job to measure [default: all]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant [default: 3]")
    parser.add_argument("--updates", type=int, help="updates per run, at least 10 [default: the job's own]")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="what to compare; async always runs"
    )
    arguments = parser.parse_args()
    arguments.variants = {"async", *arguments.variants}
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if arguments.updates is not None and arguments.updates < 10:
        parser.error(f"--updates {arguments.updates}: at least 10, or no steady window is left")
    return arguments


def _rounds(part: Part, rounds: int, variants: Sequence[Variant]) -> list[Round]:
    """Every variant and the halves in turn, `rounds` times; progress goes to stderr."""
    with TemporaryDirectory(prefix="benchmark-") as name:
        root = Path(name)
        save_model(part, root / "model")
        results: list[Round] = []
        for number in range(1, rounds + 1):
            measured: dict[Variant, Measured] = {}
            for variant in variants:
                measured[variant] = measure(variant, part, _folder(root, f"{number}-{variant}"))
                print(
                    f"{part.name} round {number}/{rounds} {variant}: {measured[variant].samples_per_second:.0f} samples/s, "
                    f"{measured[variant].others_cores:.2f} cores taken by others",
                    file=sys.stderr,
                )
            alone = halves(part, _folder(root, f"{number}-halves"), measured["async"].response_tokens_mean)
            results.append(Round(measured, alone))
            print(f"{part.name} round {number}/{rounds} overlap: {results[-1].overlap:.3f} of {alone}", file=sys.stderr)
        return results


def _folder(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


def _report(results: dict[PartName, list[Round]], parts: Sequence[Part], variants: Sequence[Variant]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_model(), "cores": cores(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "parts": {part.name: _part(part, results[part.name], variants) for part in parts},
    }


def _part(part: Part, rounds: Sequence[Round], variants: Sequence[Variant]) -> dict[str, Any]:
    names = [field.name for field in fields(Measured)]
    measured = [each.variants for each in rounds]
    return {
        "job": {_camel(name): value for name, value in asdict(part).items()}
        | {"promptsPerUpdate": PROMPTS, "samplesPerPrompt": SAMPLES},
        "ratios": {
            f"{over}/{under}": _spread([r[over].samples_per_second / r[under].samples_per_second for r in measured])
            for over, under in RATIOS
            if over in variants and under in variants
        }
        | {"overlap": _spread([each.overlap for each in rounds])},
        "halves": {
            "trainingSeconds": _spread([each.halves.training for each in rounds]),
            "generationSeconds": _spread([each.halves.generation for each in rounds]),
        },
        "variants": {
            variant: {_camel(name): _spread([getattr(r[variant], name) for r in measured]) for name in names}
            for variant in variants
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
