"""A program that checks the laws of a replica of two devices that schedules ahead: its processes compute a step while this one schedules the next.

python -m tests.rollout.ahead_replica [HISTORIES] ─► one line of JSON: the number of sequences that have ended
"""

import json
import sys

import torch

from qwen35_trainer.manifest import VLLMSpec
from qwen35_trainer.rollout.vllm import MIN_CPU_PREFILL, VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core
from qwen35_trainer.rollout.vllm_environment import set_variables
from tests.rollout.ahead import WORKER, scheduling_ahead
from tests.rollout.laws import Replay, UnderTest, check_histories, check_versions
from tests.rollout.test_vllm import END, MAX_LENGTH, SHAPE, SLOTS, VOCABULARY, library_model

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
        test = UnderTest(
            engine,
            models,
            Replay(models, MAX_LENGTH),
            end_token=END,
            vocabulary=VOCABULARY,
            max_length=MAX_LENGTH,
            computes_ahead=0,
            mean_difference=0.02,
            history_difference=0.15,
            near_tie=0.2,
            min_prompt=MIN_CPU_PREFILL,
            starts_ahead=1,
        )
        check_versions(test)
        print(json.dumps({"ended": check_histories(test, range(int(sys.argv[1])))}), flush=True)
        core.engine_core.shutdown()


if __name__ == "__main__":
    main()
