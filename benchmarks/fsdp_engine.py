"""The FSDP engine against a plain loop of the transformers library under FSDP2: prints one JSON object.

    for each number of processes, for each data set:
        start ours, plain, sorted ─► update 1: ours, then plain, then sorted ─► update 2: … ─► medians, ratios

    python benchmarks/fsdp_engine.py [--updates 12] [--shape cpu|gpu|smoke]

equal     sequences of one length, padded, so that only the engines differ
varied    log-normal lengths with a coefficient of variation of 1: ours is packed by tokens; plain pads micro-batches of equal
          numbers of sequences, in the order of the data (plain) or sorted by length (sorted)
head      only the output layer, with the published vocabulary: log-probs and entropies with their gradients, in chunks
          (ours) and from all logits (plain); one process

Model, data, optimizer, precision and sharding are the same. Every variant is a separate process group. Variants alternate
after every update, while the others wait for a line of text: a slow phase of the machine affects all of them, and ratios
are formed within an update. Padding does not count as tokens. With a GPU: one process, and model
FLOPs utilisation. Needs torch, transformers, pydantic and, on a GPU, flash-linear-attention.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.models.qwen3_5 import HFModule, classes
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.head import TokenScores, token_scores
from qwen35_trainer.models.qwen3_5.precision import PRECISIONS

type Data = Literal["equal", "varied", "head"]
type Step = Callable[[TrainBatch], None]
type Variant = Literal["ours", "plain", "sorted"]
VARIANTS: dict[Data, tuple[Variant, ...]] = {
    "equal": ("ours", "plain"),
    "varied": ("ours", "plain", "sorted"),
    "head": ("ours", "plain"),
}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by a part of the device's name, from the vendor's data sheets."""


@dataclass(frozen=True)
class Shape:
    """A model, and the data of one update."""

    model: dict[str, Any]
    vocabulary: int
    precision: str
    sequences: int
    """Sequences per update."""
    micro: int
    """Sequences per micro-batch of a padded run."""
    mean: int
    """Mean tokens of a sequence; the maximum is four times that."""
    head: tuple[int, int, int]
    """Rows, channels and vocabulary of the output layer in `head`."""


SHAPES = {
    "smoke": Shape({"hiddenSize": 32, "intermediateSize": 64}, 64, "FP32", 8, 4, 16, (32, 32, 500)),
    "cpu": Shape(
        {"hiddenSize": 256, "intermediateSize": 512, "headDim": 64, "linearHeadDim": 64},
        4096,
        "FP32",
        32,
        8,
        128,
        (2048, 64, 248_320),
    ),
    "gpu": Shape(
        {
            "hiddenSize": 2048,
            "intermediateSize": 6144,
            "layers": 24,
            "attentionHeads": 8,
            "headDim": 256,
            "linearKeyHeads": 16,
            "linearValueHeads": 16,
            "linearHeadDim": 128,
            "initializerRange": 0.02,
        },
        65_536,
        "BF16",
        64,
        8,
        1024,
        (8192, 2048, 248_320),
    ),
}


@dataclass(frozen=True)
class Run:
    """Settings of one process group."""

    shape: str
    variant: Variant
    data: Data
    ranks: int
    updates: int


@dataclass(frozen=True)
class Update:
    """An update to time."""

    step: Callable[[], None]
    tokens: int
    """Tokens of all ranks."""
    flops: float
    """FLOPs of one rank, counted by `_flops`."""


@dataclass(frozen=True)
class Started:
    """The processes of a run. Each does an update when it reads a line, and prints its measurements."""

    run: Run
    ranks: list[subprocess.Popen[str]]

    def update(self) -> dict[str, float | None]:
        """Do the next update, and return the measurements of rank 0. Exits if a process has failed."""
        for process in self.ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # a missing answer reports the failure
                process.stdin.write("\n")
                process.stdin.flush()
        answers = [process.stdout.readline() for process in self.ranks if process.stdout is not None]
        if not all(answers):
            sys.exit(f"{self.run}: a process failed")
        measurements: dict[str, float | None] = json.loads(answers[0])
        return measurements


def main() -> None:
    """Measure, and print."""
    arguments = _arguments()
    if arguments.run:
        _worker(Run(**json.loads(arguments.run)), arguments.rank, Path(arguments.folder))
        return
    chosen = arguments.shape or ("gpu" if torch.cuda.is_available() else "cpu")
    ranks = (1,) if torch.cuda.is_available() else (1, 2)
    results = {
        f"{data}, {count} {'process' if count == 1 else 'processes'}": _compare(
            [Run(chosen, variant, data, count, arguments.updates) for variant in VARIANTS[data]]
        )
        for count in ranks
        for data in VARIANTS
        if data != "head" or count == 1
    }
    print(json.dumps(_about(chosen) | {"results": results}, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The FSDP engine against a plain FSDP2 loop on this machine.")
    parser.add_argument("--updates", type=int, default=12, help="of each variant, the first not timed [default: 12]")
    parser.add_argument("--shape", choices=SHAPES, help="model and data [default: gpu where there is one, else cpu]")
    for hidden in ("--run", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.updates < 2:
        parser.error(f"--updates {arguments.updates}: at least 2")
    return arguments


def _about(shape: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": gpu, "cores": cores, "system": platform.platform()},
        "torch": torch.__version__,
        "shape": asdict(SHAPES[shape]),
    }


def _compare(runs: list[Run]) -> dict[str, Any]:
    measured: dict[str, list[dict[str, float | None]]] = {run.variant: [] for run in runs}
    with ExitStack() as stack:
        groups = [stack.enter_context(_started(run)) for run in runs]
        for number in range(runs[0].updates):
            for group in groups:
                measurements = group.update()
                if number > 0:
                    measured[group.run.variant].append(measurements)
                    _say(f"{group.run.data} {group.run.ranks} {group.run.variant} {number}: {measurements}")
    speeds = {variant: [row["tokensPerSecond"] or math.nan for row in rows] for variant, rows in measured.items()}
    ratios = {
        f"ours/{other}": _spread([ours / theirs for ours, theirs in zip(speeds["ours"], speeds[other], strict=True)])
        for other in speeds
        if other != "ours"
    }
    variants = {
        variant: {name: _spread([row[name] for row in rows]) for name in rows[0]} for variant, rows in measured.items()
    }
    return {"ratios": ratios, "variants": variants}


def _spread(values: list[float | None]) -> dict[str, Any]:
    """Return the median and the quartiles of the values."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return {"median": None}
    low, middle, high = quantiles(present, n=4, method="inclusive") if len(present) > 1 else present * 3
    return {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _started(run: Run) -> Iterator[Started]:
    """Start the processes of a run, which end when their input is closed."""
    threads = max(1, len(os.sched_getaffinity(0)) // run.ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    with TemporaryDirectory(prefix="benchmark-") as folder, ExitStack() as stack:
        base = [sys.executable, __file__, "--run", json.dumps(asdict(run)), "--folder", folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks = [
            stack.enter_context(subprocess.Popen([*base, "--rank", str(rank)], env=environment, **pipes))
            for rank in range(run.ranks)
        ]
        yield Started(run, ranks)


def _worker(run: Run, rank: int, folder: Path) -> None:
    shape, device = SHAPES[run.shape], torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if run.data == "head":
        _head_worker(run, shape, device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(str(folder / "store"), run.ranks), rank=rank, world_size=run.ranks
    )
    spec = _spec(run, shape)
    batches = [_batch(shape, run.data, seed) for seed in range(run.updates)]
    settings = ModelSettings(spec.model, seed=0, vocabulary=shape.vocabulary, max_length=4 * shape.mean, base=folder)
    construct = partial(build, settings)
    flops = _flops(construct(), batches)
    step = _ours(construct, spec, device) if run.variant == "ours" else _plain(construct(), run, shape, rank, device)
    _answer(
        [
            Update(partial(step, batch), int(batch.lengths.sum()), needed / run.ranks)
            for batch, needed in zip(batches, flops, strict=True)
        ],
        device,
    )
    dist.destroy_process_group()


def _head_worker(run: Run, shape: Shape, device: torch.device) -> None:
    """Compute scores and gradients of random rows by the output layer."""
    rows, channels, vocabulary = shape.head
    draw = partial(torch.randn, device=device, dtype=PRECISIONS[shape.precision], requires_grad=True)
    hidden, weight = draw(rows, channels), draw(vocabulary, channels)
    targets = torch.randint(vocabulary, (rows,), device=device)
    score = partial(token_scores, with_entropy=True) if run.variant == "ours" else _plain_scores

    def step() -> None:
        log_probs, entropy, _ = score(hidden, weight, targets)
        assert entropy is not None
        (log_probs + 0.01 * entropy).mean().backward()
        hidden.grad = weight.grad = None

    _answer([Update(step, rows, 6.0 * rows * channels * vocabulary)] * run.updates, device)


def _plain_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenScores:
    """Compute `token_scores` from all logits together."""
    log_softmax = (hidden @ weight.T).float().log_softmax(-1)
    log_probs = log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1)
    return TokenScores(log_probs, -torch.linalg.vecdot(log_softmax.exp(), log_softmax))


def _answer(updates: Sequence[Update], device: torch.device) -> None:
    """For each line of the input, do the next update and print its measurements."""
    for update, _ in zip(updates, sys.stdin, strict=False):
        _synchronise(device)
        started = time.perf_counter()
        update.step()
        _synchronise(device)
        print(json.dumps(_measured(update, time.perf_counter() - started, device)), flush=True)


def _measured(update: Update, seconds: float, device: torch.device) -> dict[str, float | None]:
    if device.type == "cuda":
        peak_memory = torch.cuda.max_memory_allocated()
        peak = next((value for name, value in PEAKS.items() if name in torch.cuda.get_device_name()), None)
    else:
        peak_memory, peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None
    return {
        "tokensPerSecond": update.tokens / seconds,
        "peakMemoryMiB": peak_memory / 2**20,
        "modelFlopsUtilisation": peak and update.flops / seconds / peak,
    }


def _synchronise(device: torch.device) -> None:
    if dist.is_initialized():
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _spec(run: Run, shape: Shape) -> TrainingSpec:
    packed = run.data == "varied"
    batch = {"promptsPerUpdate": shape.sequences, "microBatchSequences": shape.micro, "removePadding": packed}
    longest = 4 * shape.mean
    spec, problems = parse_spec(
        {
            "mode": "SFT",
            "accelerator": {"profile": "CPU", "devicesPerNode": run.ranks},
            "model": {"name": "m", "precision": shape.precision, "source": {"random": shape.model}},
            "data": {
                "train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}],
                "maxPromptTokens": 1,
                "maxResponseTokens": longest - 1,
            },
            # The mean number of tokens of a padded micro-batch, or those of the longest sequence.
            "train": {
                "batch": batch
                | {"dynamicMicroBatches": packed, "maxTokensPerDevice": max(longest, shape.micro * shape.mean)},
                "optimizer": {"learningRate": 1e-5},
            },
        }
    )
    assert spec is not None, problems
    return spec


def _batch(shape: Shape, data: Data, seed: int) -> TrainBatch:
    """Create supervised sequences in which every token except the first is trained."""
    random = np.random.default_rng(seed)
    lengths = np.full(shape.sequences, shape.mean)
    if data == "varied":
        sigma = math.sqrt(math.log(2))  # of a log-normal whose standard deviation is its mean
        drawn = random.lognormal(math.log(shape.mean) - sigma**2 / 2, sigma, shape.sequences)
        lengths = np.clip(drawn.astype(np.int64), 2, 4 * shape.mean)
    responses = lengths - 1
    return TrainBatch(
        prompts=random.integers(0, shape.vocabulary, shape.sequences).astype(np.int32),
        prompt_lengths=np.ones(shape.sequences, dtype=np.int64),
        responses=random.integers(0, shape.vocabulary, int(responses.sum())).astype(np.int32),
        response_lengths=responses,
        trainable=np.ones(int(responses.sum()), dtype=np.bool_),
    )


def _ours(construct: Callable[[], HFModule], spec: TrainingSpec, device: torch.device) -> Step:
    engine = FSDPEngine(Origin(construct), spec, device)

    def step(batch: TrainBatch) -> None:
        engine.train(batch, [1e-5])

    return step


def _plain(ours: HFModule, run: Run, shape: Shape, rank: int, device: torch.device) -> Step:
    """Create a plain loop: the library's forward, cross entropy over all logits, FSDP2 around each layer."""
    model = classes.construct(ours.config).train()
    mesh = init_device_mesh(device.type, (run.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[shape.precision], reduce_dtype=torch.float32)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: TrainBatch) -> None:
        order = np.argsort(-batch.lengths, kind="stable") if run.variant == "sorted" else np.arange(batch.samples)
        own = np.array_split(order, len(order) // shape.micro)[rank :: run.ranks]
        for position, samples in enumerate(own):
            model.set_requires_gradient_sync(position == len(own) - 1)
            tokens, mask = _padded(batch, samples, device)
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            labels = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * run.ranks / int(batch.trainable.sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(batch: TrainBatch, samples: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    longest, starts = int(batch.lengths[samples].max()), np.cumsum(batch.response_lengths) - batch.response_lengths
    tokens = np.zeros((len(samples), longest), dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, sample in enumerate(samples):
        start, length = starts[sample], int(batch.response_lengths[sample])
        tokens[row, 0], mask[row, : length + 1] = batch.prompts[sample], 1
        tokens[row, 1 : length + 1] = batch.responses[start : start + length]
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)


def _flops(model: HFModule, batches: list[TrainBatch]) -> list[float]:
    """Count FLOPs of forward and backward without recomputation and padding: 6 per matrix weight and token, and attention.

    The products of the delta rule are left out: they are below 3 % at these widths.
    """
    weights: int = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
    config = model.config
    full: int = sum(kind == "full_attention" for kind in config.layer_types)
    width: int = config.num_attention_heads * config.head_dim
    return [
        6.0 * weights * int(batch.lengths.sum()) + 6.0 * full * width * int((batch.lengths**2).sum())
        for batch in batches
    ]


if __name__ == "__main__":
    main()
