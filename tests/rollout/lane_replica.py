"""A program with one replica of vLLM, of any number of devices, which a test drives by lines of JSON.

python -m tests.rollout.lane_replica DEVICES

    {"load": SEED, "for": N}    the model of the seed becomes version SEED, in shared memory, staged for replicas of N devices
    {"submit": [SEQUENCE, …]}   each with its name, its prompt, and the tokens that it keeps
    {"steps": COUNT}            this many steps, or fewer if all sequences have ended
    {"take": true}              sequences that have not ended leave, with all their tokens

Each line gets one line as the answer: the sequences that ended or left, each with its tokens, by name.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens, SequenceRequest
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.weights.division import ReplicaShape
from tests.publications import received
from tests.rollout.loading import load
from tests.rollout.split_replica import AS_PUBLISHED
from tests.rollout.test_vllm import AS_THE_MODEL_SAYS, END, MAX_LENGTH, library_model

MAX_TOKENS = 40

type Tokens = Mapping[str, list[Any]]
"""ids, log_probs and versions of a sequence."""


def requested(sequence: Mapping[str, Any]) -> SequenceRequest:
    kept = NO_TOKENS
    if tokens := sequence["kept"]:
        ids, log_probs = np.array(tokens["ids"], np.int32), np.array(tokens["log_probs"], np.float32)
        kept = GeneratedTokens(ids, log_probs, VersionRuns.of(tokens["versions"]))
    prompt = np.array(sequence["prompt"], np.int32)
    return SequenceRequest((sequence["name"], 0), prompt, MAX_TOKENS, AS_THE_MODEL_SAYS, kept)


def written(tokens: GeneratedTokens) -> Tokens:
    return {name: getattr(tokens, name).tolist() for name in ("ids", "log_probs", "versions")}


def obey(engine: VLLMEngine, names: list[int], command: Mapping[str, Any]) -> dict[int, Tokens]:
    """Carry out a command. names: all sequences so far."""
    if "load" in command:
        seed = command["load"]
        weights = library_model(seed, AS_PUBLISHED).named_parameters()
        load(engine, received(weights, seed, ReplicaShape(command["for"])), seed)
    if "submit" in command:
        names += [sequence["name"] for sequence in command["submit"]]
        assert engine.submit([requested(sequence) for sequence in command["submit"]]) == ()
    answer: dict[int, Tokens] = {}
    for _ in range(command.get("steps", 0)):
        if engine.busy:
            answer |= {done.sequence[0]: written(done.tokens) for done in engine.step().finished}
    if "take" in command:
        answer |= {name: written(tokens) for (name, _), tokens in engine.take([(name, 0) for name in names]).items()}
    return answer


def main() -> None:
    torch.set_num_threads(1)
    set_variables()
    devices, config = int(sys.argv[1]), library_model(0, AS_PUBLISHED).config
    settings = CoreSettings(slots=16, max_length=MAX_LENGTH, seed=5, memory_fraction=0.1, on_cpu=True, devices=devices)
    engine = VLLMEngine(build_core(config, settings), config, end_token=END, max_length=MAX_LENGTH, on_cpu=True)
    names: list[int] = []
    for line in sys.stdin:
        print(json.dumps(obey(engine, names, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
