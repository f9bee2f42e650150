"""A program that checks the laws of a replica of two devices that schedules ahead: its processes compute a step while this one schedules the next.

python -m tests.rollout.ahead_replica [HISTORIES] ─► one line of JSON: the number of sequences that have ended
"""

import json
import sys
from dataclasses import replace

import torch

from qwen35_trainer.manifest import VLLMSpec
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core
from qwen35_trainer.rollout.vllm_environment import set_variables
from tests.rollout.ahead import WORKER, scheduling_ahead
from tests.rollout.laws import check_histories, check_versions
from tests.rollout.test_vllm import END, MAX_LENGTH, SHAPE, SLOTS, Replica, laws_of, library_model

SETTINGS = CoreSettings(
    slots=SLOTS,
    max_length=MAX_LENGTH,
    seed=5,
    memory_fraction=0.1,
    on_cpu=True,
    devices=2,
    options=VLLMSpec(extraArguments={"worker_cls": WORKER}),
)


def main() -> None:
    torch.set_num_threads(1)
    set_variables()
    models = {seed: library_model(seed, SHAPE) for seed in (0, 1)}
    with scheduling_ahead():
        core = build_core(models[0].config, SETTINGS)
        engine = VLLMEngine(core, models[0].config, end_token=END, max_length=MAX_LENGTH, on_cpu=True)
        replica = Replica(engine, core, models, set())
        replica.load(0)
        test = replace(laws_of(replica), starts_ahead=1)
        check_versions(test)
        print(json.dumps({"ended": check_histories(test, range(int(sys.argv[1])))}), flush=True)
        core.engine_core.shutdown()


if __name__ == "__main__":
    main()
