"""Measures the bytes of publications that contain only the changes to the version before: prints one JSON object.

    python benchmarks/weight_changes.py [--rates 1e-6 1e-5 1.5e-3] [--updates 12] [--manifest examples/tiny-grpo.yaml]

    qwen35 run, for each learning rate ─► versions in a folder, all but the first one as changes ─► sizes of their files

Each rate trains a real run of the manifest, with a model in bfloat16 whose master weights are in float32, and publishes a version after each
update through the transport Folder. A share is the bytes of a version's changes, as they are encoded, divided by those of the whole version.
Tensors of which too much has changed are included whole, so that no share is above 1. The speed of the encoding is measured apart, on
random values of which some change.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from qwen35_trainer.weights.changed_values import apply_changes, encoded_changes
from qwen35_trainer.weights.publication_folder import latest
from qwen35_trainer.weights.published import FolderBuckets, VersionStep

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 600.0
SPEED_BYTES = 32 * 2**20
"""Number of bytes that are encoded for the speed: a part of a tensor has at most this number."""
ROUNDS = 5


def measured(manifest: Path, rate: float, updates: int) -> dict[str, Any]:
    """Train with a learning rate, and return the shares of all versions after the first one."""
    with tempfile.TemporaryDirectory() as room:
        settings = {
            "model.precision": "BF16",
            "train.updates": updates,
            "train.optimizer.learningRate": rate,
            "train.optimizer.schedule": "Constant",
            "checkpoint.everyUpdates": 1_000_000,
            "evaluation.everyUpdates": 1_000_000,
            "publication.transport": "Folder",
            "publication.folder": f"{room}/publications",
            "publication.wholeEvery": 100,
        }
        command = [sys.executable, "-m", "qwen35_trainer.cli", "run", str(manifest), "--output", f"{room}/run"]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_SECONDS)
        [folder] = (Path(room) / "publications").iterdir()
        published = latest(folder)
    assert published is not None, "a run publishes its first version"
    assert isinstance(published.source, FolderBuckets)
    whole, *changes = map(_bytes, published.source.steps)
    shares = [step / whole for step in changes]
    return {
        "learning rate": rate,
        "bytes of a whole version": whole,
        "versions": len(shares),
        "share of the bytes, median": median(shares),
        "share of the bytes, minimum": min(shares),
        "share of the bytes, maximum": max(shares),
    }


def speed(share: float) -> dict[str, float]:
    """Return GB/s of encoding and applying changes of `share` of the values, next to a memcpy of the same bytes, each on one core."""
    random = np.random.default_rng(0)
    before = random.integers(0, 2**16, SPEED_BYTES // 2, np.uint16)
    after = np.where(random.random(before.size) < share, before ^ 1, before).view(np.uint8)
    target, before = before.copy().view(np.uint8), before.view(np.uint8)
    encoding = encoded_changes(before, after, 2)
    assert encoding is not None, "few values change"
    works: dict[str, Callable[[], object]] = {
        "GB/s of memcpy": lambda: np.copyto(target, before),
        "GB/s of encoding": lambda: encoded_changes(before, after, 2),
        "GB/s of applying": lambda: apply_changes(target, *encoding, 2),
    }
    return {"changed": share} | {name: SPEED_BYTES / _seconds(work) / 1e9 for name, work in works.items()}


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of ROUNDS."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _bytes(step: VersionStep) -> int:
    return sum(part.size for bucket in step.buckets for part in bucket.parts)


def main() -> None:
    """Measure all learning rates, and print them."""
    parser = argparse.ArgumentParser(description="Bytes of publications as changes, from real training steps.")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1.5e-3])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "tiny-grpo.yaml")
    arguments = parser.parse_args()
    cases = [measured(arguments.manifest, rate, arguments.updates) for rate in arguments.rates]
    speeds = [speed(share) for share in (0.001, 0.01, 0.1)]
    print(json.dumps({"manifest": arguments.manifest.name, "cases": cases, "speed": speeds}, indent=2))


if __name__ == "__main__":
    main()
