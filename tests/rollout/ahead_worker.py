"""vLLM's worker for CPUs in a replica of several devices that schedules ahead. `ahead.py` says what it needs."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.rollout.ahead import with_stand_ins


class AheadWorker(CPUWorker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._stand_ins = with_stand_ins()  # kept until its process ends, because they end with this object
        self._stand_ins.__enter__()
        super().__init__(*arguments, **options)
