"""Memory and time that a batch takes on the driver and on each train rank, without the model: prints one JSON object.

    python benchmarks/batch_memory.py [--samples 2048] [--longest 8192] [--shares 1 8]

assemble    seconds in which the driver packs the scored groups of a batch
divide      seconds in which the driver copies the shares of all ranks
signal      peak memory and seconds of a rank that holds the reference's log-probs of its share and computes the advantages

Lengths are log-normal, with a coefficient of variation of 1 and a mean of 3/8 of the longest, at which they are cut.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from qwen35_trainer.algorithms.advantages import OneShare
from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.learning_signal import LearningSignal
from qwen35_trainer.engines.micro_batch import Offsets, TokenTable
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import AlgorithmSpec
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import Completed, EndReason, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime.assembly import ScoredGroup, assemble
from qwen35_trainer.runtime.process import return_freed_tensors, trim

GROUP, PROMPT = 16, 500
"""Samples of a prompt, and its tokens."""
ALGORITHMS: dict[str, dict[str, object]] = {
    "GRPO, KL in the loss": {"advantage": "GRPO", "kl": {"placement": "Loss"}},
    "ReinforcePlusPlus, KL in the reward": {
        "advantage": "ReinforcePlusPlus",
        "gamma": 0.99,
        "kl": {"placement": "Reward"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a batch before the model runs.")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--shares", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    return_freed_tensors()
    groups = _groups(options.samples, options.longest)
    started = time.perf_counter()
    batch, _ = assemble(groups, version=4, max_lag=4, mask_old=False, updates=1)
    seconds = time.perf_counter() - started
    del groups
    result = {"samples": batch.samples, "responseTokens": int(batch.responses.size), "assembleSeconds": seconds}
    print(json.dumps(result | {"shares": [_of_shares(batch, shares) for shares in options.shares]}, indent=2))


def _of_shares(batch: TrainBatch, shares: int) -> dict[str, object]:
    division = BatchDivision(shares, max_tokens=65_536, packed=True)
    started = time.perf_counter()
    for share in division.shares_of(batch):
        tokens = share.responses.nbytes + share.trainable.nbytes + share.prompts.nbytes
    seconds = time.perf_counter() - started
    signals = {}
    for name, fields in ALGORITHMS.items():
        algorithm = AlgorithmSpec.model_validate({"groupSize": GROUP, **fields})
        signals[name] = _peak(lambda algorithm=algorithm: _signal(share, algorithm))  # type: ignore[misc]
    return {"ranks": shares, "divideSeconds": seconds, "shareMiB": tokens / 2**20, "signal": signals}


def _signal(share: TrainBatch, algorithm: AlgorithmSpec) -> LearningSignal:
    offsets = Offsets.of(share)
    reference = TokenTable.zeros(share, offsets)
    reference.values.fill_(-1.0)
    return LearningSignal.of(share, offsets, algorithm, OneShare(), reference=reference, proximal=None)


def _peak(act: Callable[[], object]) -> dict[str, float]:
    """Return how far the memory of this process grew during `act`, and the seconds that it took."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # Linux starts to record the maximum again
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    act()
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text().split()
    return {"peakMiB": int(status[status.index("VmHWM:") + 1]) / 2**10 - before / 2**20, "seconds": seconds}


def _groups(samples: int, longest: int) -> list[ScoredGroup]:
    random = np.random.default_rng(0)
    mean = 3 * longest / 8
    lengths = random.lognormal(np.log(mean / np.sqrt(2)), np.sqrt(np.log(2)), samples).clip(1, longest).astype(int)
    lengths[0] = longest
    prompt = EncodedPrompt(Prompt("p/0", "p", "question"), np.arange(PROMPT, dtype=np.int32))
    groups = []
    for number, own in enumerate(lengths.reshape(-1, GROUP)):
        sequences = [
            Completed(
                (number, sample),
                GeneratedTokens(
                    np.arange(length, dtype=np.int32),
                    np.full(length, -1.5, dtype=np.float32),
                    VersionRuns.of(np.sort(random.integers(0, 5, length))),
                ),
                EndReason.STOP,
            )
            for sample, length in enumerate(own.tolist())
        ]
        scores = [CombinedScore(float(reward), {}, {}) for reward in random.normal(size=GROUP)]
        groups.append(ScoredGroup(number, prompt, tuple(sequences), tuple(scores)))
    return groups


if __name__ == "__main__":
    main()
