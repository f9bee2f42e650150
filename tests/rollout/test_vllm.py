"""The engine on vLLM, with vLLM itself: one engine for all tests of this file, on a tiny model with random weights."""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.build_model import build
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, Completed, GeneratedTokens, Sampling, SequenceRequest
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core, write_configuration
from qwen35_trainer.rollout.vllm_environment import VARIABLES

VOCABULARY, END, MAX_LENGTH, SLOTS = 23, 2, 640, 16
SHAPE = {"hiddenSize": 64, "headDim": 32, "linearHeadDim": 64, "initializerRange": 0.15}
GREEDY, AS_THE_MODEL_SAYS = Sampling(0.0), Sampling()


@dataclass
class Replica:
    """The engine, and a model of the library with the weights of the version that it has."""

    engine: VLLMEngine
    models: dict[int, Any]
    """Float32 models of the library by seed."""
    loaded: int = 0
    submitted: int = 0

    def load(self, seed: int) -> int:
        """Load the model of a seed as the next version."""
        self.loaded += 1
        self.engine.load(dict(self.models[seed].named_parameters()), self.loaded)
        return self.loaded

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling = AS_THE_MODEL_SAYS,
        *,
        samples: int = 1,
        kept: GeneratedTokens = NO_TOKENS,
    ) -> list[SequenceId]:
        """Submit a group."""
        self.submitted += 1
        names = [(self.submitted, index) for index in range(samples)]
        ids = np.array(prompt, np.int32)
        self.engine.submit([SequenceRequest(name, ids, max_tokens, sampling, kept) for name in names])
        return names

    def finish(self, limit: int = 1000) -> dict[SequenceId, Completed]:
        """Step until nothing is left. Every sequence finishes once."""
        finished: dict[SequenceId, Completed] = {}
        for _ in range(limit):
            if not self.engine.busy:
                return finished
            for completed in self.engine.step().finished:
                assert completed.sequence not in finished
                finished[completed.sequence] = completed
        raise AssertionError(f"still busy after {limit} steps")

    def generate(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, **options: Any) -> list[Completed]:
        names = self.submit(prompt, max_tokens, sampling, **options)
        finished = self.finish()
        return [finished[name] for name in names]


def library_model(seed: int) -> Any:
    source = {"random": SHAPE}
    spec = ModelSpec.model_validate({"name": "tiny", "source": source})
    built = build(spec, seed=seed, vocabulary=VOCABULARY, max_length=MAX_LENGTH, base=Path())
    model = classes.construct(built.config)
    model.load_state_dict(built.state_dict())
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):  # fresh weights forget within a few positions, which would hide a lost state
            layer.linear_attn.A_log.data.fill_(-3.0)
    return model.eval()


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """vLLM changes functions of torch, the environment and the garbage collector of its process, which here is pytest's."""
    environment, threads, random = os.environ.copy(), torch.set_num_threads, torch.get_rng_state()
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache
    os.environ.update(VARIABLES)
    try:
        yield
    finally:
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        torch.set_num_threads = threads
        torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache
        torch.set_rng_state(random)
        os.environ.clear()
        os.environ.update(environment)
        gc.unfreeze()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path_factory.mktemp("model")
    with process_restored():
        models = {seed: library_model(seed) for seed in (0, 1)}
        config = models[0].config
        write_configuration(config, folder)
        settings = CoreSettings(slots=SLOTS, max_length=MAX_LENGTH, seed=5, memory_fraction=0.1, on_cpu=True)
        core = build_core(folder, config, settings)
        yield Replica(VLLMEngine(core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True), models)
        core.engine_core.shutdown()


@pytest.fixture
def replica(built: Replica) -> Iterator[Replica]:
    """The engine with the weights of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.engine.take([(group, index) for group in range(built.submitted + 1) for index in range(64)])
    built.finish()


def logits_of(model: Any, prompt: Sequence[int], response: np.ndarray) -> torch.Tensor:
    """(T, V) logits of the library's forward pass in float32, from which each token of a response is drawn."""
    ids = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]


def log_probs_of(model: Any, prompt: Sequence[int], response: np.ndarray) -> np.ndarray:
    chosen = torch.from_numpy(response.astype(np.int64))[:, None]
    return logits_of(model, prompt, response).log_softmax(-1).gather(1, chosen).squeeze(1).numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def test_log_probabilities_are_those_of_the_trainers_forward_pass(replica: Replica) -> None:
    differences = []
    for length in (1, 7, 300):
        prompt = prompt_of(length)
        for completed in replica.generate(prompt, 24, AS_THE_MODEL_SAYS, samples=4):
            ids = completed.tokens.ids
            differences.append(np.abs(completed.tokens.log_probs - log_probs_of(replica.models[0], prompt, ids)))
    assert np.concatenate(differences).mean() <= 0.02
