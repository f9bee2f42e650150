"""Each half of an asynchronous run alone on one core: what the other half's work and the way between them add.

    training alone      our synchronous run on one core: while it trains, nothing else runs
    generation alone    the rollout engine on one core, with sequences always waiting, without Ray and the driver

    overlap = seconds per update of the asynchronous run, one core for each half, over the larger half

1.0 is ideal: the larger half never waits. `async/sync` cannot show this, because the synchronous run also differs in its threads and
in the tail of each batch.

    python benchmarks/halves.py FOLDER   generates alone with the model in FOLDER; used by `generation_alone`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from jobs import DATA, PROMPT_TOKENS, PROMPTS, SAMPLES, Part, write_manifest
from watch import run

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import UpdateRecord

LAST = 3
"""Updates at the end that do not count, as in `variants`."""
ONE_CORE = ["taskset", "--cpu-list", "1"]
WARM_SECONDS, MEASURED_SECONDS = 10.0, 20.0


@dataclass(frozen=True)
class Halves:
    """Seconds of one update of each half of a run alone, on one core."""

    training: float
    generation: float

    def overlap(self, seconds_per_update: float) -> float:
        """Return the duration of an update, relative to the larger half."""
        return seconds_per_update / max(self.training, self.generation)


def halves(part: Part, folder: Path, response_tokens: float) -> Halves:
    """Measure both halves. response_tokens: mean length of the responses of the asynchronous run."""
    return Halves(_training_alone(part, folder), response_tokens * PROMPTS * SAMPLES / _generation_alone(part, folder))


def _training_alone(part: Part, folder: Path) -> float:
    """Return the seconds in which the train pool trains and copies weights, per update of a synchronous run on one core."""
    manifest, output = write_manifest(part, "Colocated", folder), folder / "output"
    command = [*ONE_CORE, sys.executable, "-m", "qwen35_trainer.cli", "run", str(manifest), "--output", str(output)]
    run(command, environment=_environment(), log=folder / "log")
    updates = [record for record in read_records(output / "metrics.jsonl") if isinstance(record, UpdateRecord)]
    return fmean(record.seconds_training + record.seconds_copying for record in updates[part.skipped : -LAST])


def _generation_alone(part: Part, folder: Path) -> float:
    """Return the generated tokens per second."""
    settings = json.dumps({"tokens": part.response_tokens, "slots": PROMPTS * SAMPLES})
    command = [*ONE_CORE, sys.executable, str(Path(__file__)), str(folder.parent / "model"), settings]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    rate: float = json.loads(done.stdout)["tokensPerSecond"]
    return rate


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}


def _generate(folder: Path, tokens: int, slots: int) -> float:
    """Keep an engine full, and return its tokens per second."""
    import numpy as np
    import torch

    from qwen35_trainer.data.tokenizer import load_tokenizer
    from qwen35_trainer.manifest import ModelSourceSpec, ModelSpec
    from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
    from qwen35_trainer.rollout.rollout_engine import SequenceRequest
    from qwen35_trainer.rollout.torch import TorchEngine

    torch.set_num_threads(1)
    spec = ModelSpec(name="tiny-qwen3.5", source=ModelSourceSpec(path=str(folder)), precision="FP32")
    tokenizer = load_tokenizer(spec, folder)
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()]
    prompts = [np.array(tokenizer(row["prompt"])["input_ids"], np.int32) for row in rows]
    length = PROMPT_TOKENS + tokens
    model = build(ModelSettings(spec, seed=0, vocabulary=len(tokenizer), max_length=length, base=folder))
    engine = TorchEngine(model, end_token=tokenizer.eos_token_id, slots=slots, max_length=length, seed=0)
    submitted = generated = 0
    began = time.monotonic()
    measured = 0.0
    while measured < MEASURED_SECONDS:
        while len(engine._waiting) < slots // 4:
            prompt = prompts[submitted % len(prompts)]
            engine.submit([SequenceRequest((submitted, sample), prompt, tokens) for sample in range(SAMPLES)])
            submitted += 1
        new = engine.step().tokens
        if (measured := time.monotonic() - began - WARM_SECONDS) > 0:
            generated += new
    return generated / measured


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    print(json.dumps({"tokensPerSecond": _generate(Path(sys.argv[1]), settings["tokens"], settings["slots"])}))
