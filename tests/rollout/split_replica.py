"""A program that generates with a replica of two devices, and then waits to be killed.

The model has the form of the small published ones: with a vision tower, and the output layer tied to the embedding. Some of the prompts
have pictures.

python -m tests.rollout.split_replica [NODES] ─► one line of JSON: responses, log-probs of a probe, the number of processes that
                                                  have a part of each parameter, the ids of the processes of its workers, and the
                                                  names of the memory that they share

NODES: 2: each device is on a node of its own. The program starts itself again for the second node, whose processes only the network
connects with those of the first. Without it, both devices are on one node.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import psutil
import torch

from qwen35_trainer.rollout import vllm_core
from qwen35_trainer.rollout.rollout_engine import Sampling, SequenceRequest
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import Core, CoreSettings, NodePlace, build_core, start_workers
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.weights.division import ReplicaShape
from qwen35_trainer.weights.host_weights import HostWeights
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


SETTINGS = CoreSettings(
    slots=4,
    max_length=MAX_LENGTH,
    seed=5,
    memory_fraction=0.1,
    on_cpu=True,
    devices=2,
    picture_tokens=MAX_LENGTH,
)
LOCAL = "127.0.0.1"


def names_of_shared_memory(core: Core) -> list[str]:
    """The names, in the file system, of the memory that the replica's processes share."""
    nodes = set(core.collective_rpc(lambda _: os.environ["VLLM_DIST_IDENT"]))
    return [file.name for node in nodes for file in Path("/dev/shm").glob(f"{node}-*")]


def node(number: int, port: int) -> CoreSettings:
    """The settings of a node of a replica of two nodes."""
    return replace(SETTINGS, node=NodePlace(number, 2, LOCAL, LOCAL, port))


def shared(parameters: dict[str, torch.Tensor], seed: int, nodes: int) -> HostWeights:
    """The weights in shared memory, where every node of this machine finds them."""
    weights = received(parameters.items(), seed, ReplicaShape(seed))
    return weights.with_nodes([weights.shared] * (nodes - 1))


def second_node(port: int) -> None:
    """Run the processes of the second node until this process is killed, or one of them ends."""
    workers = start_workers(pictured(SEEDS[0], AS_PUBLISHED).config, node(1, port))
    print("joined", flush=True)
    while not workers.wait(1.0):
        if os.getppid() == 1:
            return
    sys.exit("a worker has ended")


def main() -> None:
    torch.set_num_threads(1)
    set_variables()
    settings = SETTINGS
    if len(sys.argv) > 1:
        with socket.create_server((LOCAL, 0)) as free:
            port = free.getsockname()[1]
        if sys.argv[1] != "2":
            second_node(int(sys.argv[1]))
            return
        subprocess.Popen([sys.executable, "-m", "tests.rollout.split_replica", str(port)], stdout=sys.stderr)
        settings = node(0, port)
    models = {seed: pictured(seed, AS_PUBLISHED) for seed in SEEDS}
    config = models[0].config
    core = build_core(config, settings)
    engine = VLLMEngine(core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True, reads_pictures=True)
    responses, probes = {}, []
    for seed in SEEDS:
        parameters = dict(models[seed].named_parameters())
        weights = shared(parameters, seed, settings.node.count) if seed in SHARED else parameters
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
    result = {"responses": responses, "probes": probes, "parts": parts, "workers": workers}
    print(json.dumps(result | {"named": names_of_shared_memory(core)}), flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
