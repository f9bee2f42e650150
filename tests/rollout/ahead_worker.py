"""vLLM's worker for CPUs in a replica of several devices that schedules ahead. `ahead.py` says what it needs."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.rollout.ahead import with_stand_ins


class AheadWorker(CPUWorker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        with_stand_ins().__enter__()  # until its process ends
        super().__init__(*arguments, **options)
