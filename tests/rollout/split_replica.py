"""A program that generates with a replica of two devices, and then waits to be killed.

The model has the form of the small published ones: with a vision tower, and the output layer tied to the embedding. Some of the prompts
have pictures.

python -m tests.rollout.split_replica ─► one line of JSON: responses, log-probs of a probe, the number of processes that have
                                          a part of each parameter, and the ids of the processes of its workers
"""

import json
import time
from unittest.mock import Mock, patch

import numpy as np
import psutil
import torch

from qwen35_trainer.rollout import vllm_core
from qwen35_trainer.rollout.rollout_engine import Sampling, SequenceRequest
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.weights.division import ReplicaShape
from tests.publications import received
from tests.rollout.loading import load
from tests.rollout.shown import shown_scenes
from tests.rollout.test_vllm import END, MAX_LENGTH, SHAPE, prompt_of
from tests.rollout.test_vllm_pictures import pictured

AS_PUBLISHED = SHAPE | {"tieEmbeddings": True, "vision": {}}
SEEDS = (0, 1, 2)
SHARED = (1, 2)
"""Seeds of models whose weights are in shared memory, staged for replicas of as many ranks as the seed says."""
PROMPTS = (3, 300)
"""Numbers of tokens."""
SHOWN = 10
"""Number that is added to a seed in the names of its sequences with pictures."""


def main() -> None:
    torch.set_num_threads(1)
    set_variables()
    models = {seed: pictured(seed, AS_PUBLISHED) for seed in SEEDS}
    config = models[0].config
    settings = CoreSettings(
        slots=4,
        max_length=MAX_LENGTH,
        seed=5,
        memory_fraction=0.1,
        on_cpu=True,
        devices=2,
        picture_tokens=MAX_LENGTH,
    )
    core = build_core(config, settings)
    engine = VLLMEngine(core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True, reads_pictures=True)
    responses, probes = {}, []
    for seed in SEEDS:
        parameters = dict(models[seed].named_parameters())
        weights = received(parameters.items(), seed, ReplicaShape(seed)) if seed in SHARED else parameters
        # The workers read shared memory themselves, so that no tensor is sent to them.
        sent = vllm_core.portions if seed not in SHARED else Mock(side_effect=AssertionError("a tensor was sent"))
        with patch.object(vllm_core, "portions", sent):
            load(engine, weights, seed)
        prompts = {(seed, length): np.array(prompt_of(length), np.int32) for length in PROMPTS}
        engine.submit([SequenceRequest(name, prompt, 12, Sampling(0.0)) for name, prompt in prompts.items()])
        engine.submit([each.request(SHOWN + seed, index) for index, each in enumerate(shown_scenes())])
        while engine.busy:
            for completed in engine.step().finished:
                tokens = completed.tokens
                responses[str(completed.sequence)] = (tokens.ids.tolist(), tokens.log_probs.tolist())
        engine.probe([np.array(prompt_of(length), np.int32) for length in PROMPTS])
        probed = None
        while engine.busy:
            probed = engine.step().probed or probed
        probes.append([each.tolist() for each in probed])
    parts = {name: len(each) for name, each in engine.checksums().items()}
    workers = [child.pid for child in psutil.Process().children(recursive=True)]
    print(json.dumps({"responses": responses, "probes": probes, "parts": parts, "workers": workers}), flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
