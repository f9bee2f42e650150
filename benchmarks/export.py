"""Export of a checkpoint next to a plain copy of the same bytes: prints one JSON object.

    python benchmarks/export.py [--gigabytes 2] [--shard 256] [--rounds 3]

It first writes a folder of random bfloat16 weights in shards, and a checkpoint with the same number of float32 values. Then it
alternates `cp -r` of the folder with `sync`, and `qwen35 export`, each into a new folder. Both read from the page cache. Memory is
the anonymous memory (RssAnon) of the exporting process in addition to that after its imports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 6144, 32_000


def main() -> None:
    """Measure, and print; or, with --measure, export once and print its cost."""
    parser = argparse.ArgumentParser(description="Export of a checkpoint next to a copy of the same bytes.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the folder [default: 2]")
    parser.add_argument("--shard", type=int, default=256, help="MB of a shard [default: 256]")
    parser.add_argument("--rounds", type=int, default=3, help="of both [default: 3]")
    parser.add_argument("--measure", nargs=2, metavar=("RUN", "OUTPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(_export(*map(Path, arguments.measure))))
        return
    with TemporaryDirectory(prefix="benchmark-export-") as name:
        room = Path(name)
        size = _write(room, arguments.gigabytes * 1e9, arguments.shard)
        rounds = [_round(room, number) for number in range(arguments.rounds)]
    copied, exported = (median(each[name]["seconds"] for each in rounds) for name in ("cp", "export"))
    memory = max(each["export"]["anonymous"] for each in rounds)
    print(
        json.dumps(
            {
                "gigabytes": size / 1e9,
                "seconds": {"cp": copied, "export": exported},
                "rate of cp": copied / exported,
                "core-seconds of an export": median(each["export"]["core-seconds"] for each in rounds),
                "anonymous MB above the start": memory / 1e6,
                "in shards": memory / (arguments.shard * 1e6),
                "rounds": rounds,
            },
            indent=2,
        )
    )


def _round(room: Path, number: int) -> dict[str, Any]:
    started = time.monotonic()
    subprocess.run(["cp", "-r", room / "model", room / f"cp-{number}"], check=True)
    subprocess.run(["sync", "-f", room], check=True)
    copied = time.monotonic() - started
    subprocess.run(["rm", "-r", room / f"cp-{number}"], check=True)
    command = [sys.executable, __file__, "--measure", str(room / "run"), str(room / f"export-{number}")]
    exported = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    subprocess.run(["rm", "-r", room / f"export-{number}"], check=True)
    return {"cp": {"seconds": copied}, "export": exported}


def _export(run: Path, output: Path) -> dict[str, float]:
    # Modules are imported before the measurement begins, since these seconds do not depend on the model.
    from transformers import Qwen3_5ForCausalLM  # noqa: F401

    import qwen35_trainer.engines.fsdp.saved_weights
    import qwen35_trainer.models.qwen3_5.hub_folder  # noqa: F401
    from qwen35_trainer.runtime.export_command import export

    before, peak, over = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, _anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    started, processor = time.monotonic(), time.process_time()
    export(run, output)
    seconds, processor = time.monotonic() - started, time.process_time() - processor
    over.set()
    watching.join()
    return {"seconds": seconds, "core-seconds": processor, "anonymous": peak - before}


def _anonymous() -> int:
    """Return the bytes of this process that are not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _write(room: Path, size: float, shard: int) -> int:
    """Write the folder of a model, and a run with its checkpoint. Returns the bytes of the folder."""
    import torch.distributed.checkpoint as dcp
    from transformers import Qwen3_5TextConfig

    from qwen35_trainer.models.qwen3_5 import classes
    from qwen35_trainer.models.qwen3_5.precision import stored_in
    from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore

    layer = 2 * (3 * HIDDEN * INTERMEDIATE + 6 * HIDDEN * HIDDEN)
    layers = max(4, round((size - 4 * VOCABULARY * HIDDEN) / layer / 4) * 4)
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers, vocab_size=VOCABULARY
    )
    model = classes.construct(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    async def write(folder: Path) -> None:
        dcp.save({"model": weights}, checkpoint_id=folder / "state", no_dist=True)

    progress = CheckpointMeta(update=1, batch=1, position=0, pending=(), elapsed=0.0)
    asyncio.run(CheckpointStore(room / "run" / "checkpoints", 1).save(progress, write))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(stored_in(name, torch.bfloat16))
    model.save_pretrained(room / "model", max_shard_size=f"{shard}MB")
    manifest = yaml.safe_load((Path(__file__).parents[1] / "examples" / "tiny-sft.yaml").read_text())
    manifest["spec"]["model"]["source"] = {"path": str(room / "model")}
    (room / "run" / "run.yaml").write_text(yaml.safe_dump(manifest))
    return sum(path.stat().st_size for path in (room / "model").iterdir())


if __name__ == "__main__":
    main()
