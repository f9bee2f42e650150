"""Real process groups over gloo: two ranks make the step that one makes, and read what another number wrote."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen35_trainer.engines.batch import TrainBatch

RANK = Path(__file__).with_name("rank.py")
DEADLINE_SECONDS = 180


def batch_of(samples: int, seed: int) -> TrainBatch:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, samples)
    total = int(lengths.sum())
    return TrainBatch(
        prompts=random.integers(3, 20, 4 * samples).astype(np.int32),
        prompt_lengths=np.full(samples, 4),
        responses=random.integers(3, 20, total).astype(np.int32),
        response_lengths=lengths,
        trainable=random.random(total) < 0.9,
        log_probs=random.normal(-3.0, 0.3, total).astype(np.float32),
        rewards=random.normal(size=samples).astype(np.float32),
        group=np.arange(samples) // 4,
    )


def spec_of(ranks: int, kl: str, layout: dict[str, object], **changes: object) -> dict[str, object]:
    random = {"hiddenSize": 32, "intermediateSize": 48, "headDim": 8, "linearHeadDim": 8, "initializerRange": 0.2}
    return {
        "accelerator": {"profile": "cpu", "perNode": ranks},
        "model": {"name": "tiny", "precision": "FP32", "source": {"random": random | dict(changes)}},
        "data": {
            "train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}],
            "maxPromptTokens": 8,
            "maxResponseTokens": 12,
        },
        "rewards": [{"type": "ExactMatch"}],
        "algorithm": {
            "groupSize": 4,
            "correction": {"type": "None"},
            "kl": {"placement": kl, "coefficient": 0.1},
        },
        "rollout": {"engine": "Torch"},
        "train": {
            "batch": {"promptsPerUpdate": 2} | layout,
            "optimizer": {"weightDecay": 0.0, "gradientClip": 1000.0},
        },
    }


def train(
    folder: Path,
    ranks: int,
    batches,
    *,
    restore: Path | None = None,
    save: Path | None = None,
    seed=0,
    kl="None",
    layout=None,
    **changes,
):
    """Metrics of each update and the final weights."""
    folder.mkdir()
    if save is not None:
        save.mkdir()
    spec = spec_of(ranks, kl, layout or {}, **changes)
    job = {"spec": spec, "seed": seed, "batches": batches, "restore": restore, "save": save}
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    command = [sys.executable, str(RANK)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
    return pickle.loads((folder / "result.pickle").read_bytes())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


LAYOUTS = {"three at a time": {"microBatchPerDevice": 3}, "by tokens": {"dynamic": True, "maxTokensPerDevice": 40}}


@pytest.mark.parametrize(
    ("experts", "samples", "layout"),
    [(0, 8, None), (4, 8, None), (0, 1, None), *((0, 8, layout) for layout in LAYOUTS.values())],
    ids=["dense", "experts", "an idle rank", *LAYOUTS],
)
def test_two_ranks_make_the_update_that_one_makes(tmp_path: Path, experts: int, samples: int, layout) -> None:
    batches = [batch_of(samples, seed) for seed in (0, 1)]
    alone, _ = train(tmp_path / "one", 1, batches, kl="Reward", experts=experts)
    together, _ = train(tmp_path / "two", 2, batches, kl="Reward", layout=layout, experts=experts)
    for expected, actual, tolerance in zip(alone, together, (1e-5, 1e-2), strict=True):
        assert actual.tokens == expected.tokens
        assert actual.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
        assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=tolerance, abs=tolerance)


def test_a_checkpoint_of_one_rank_goes_on_with_two_and_back_with_one(tmp_path: Path) -> None:
    first, second = batch_of(8, 0), batch_of(8, 1)
    # Other seeds than the saved run's: what the restored ones know, they have read.
    [_, expected], _ = train(tmp_path / "whole", 1, [first, second])
    _, saved = train(tmp_path / "one", 1, [first], save=tmp_path / "from-one")
    _, widened = train(tmp_path / "two", 2, [], seed=5, restore=tmp_path / "from-one", save=tmp_path / "from-two")
    assert same(widened, saved)
    [after], _ = train(tmp_path / "back", 1, [second], seed=5, restore=tmp_path / "from-two")
    assert (after.loss, after.gradient_norm) == (expected.loss, expected.gradient_norm)
