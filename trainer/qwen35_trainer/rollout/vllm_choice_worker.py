"""Functions that run in the process of vLLM's first worker, and record the experts that routers choose in each step.

    RecordingExecutor ─► record_steps     before the first step
    each step: execute_model ─► RoutedStep.record, once for each layer     sample_tokens ─► RoutedStep.take ─► output of the step

All workers of a replica compute the same choices, because none of them divides a router, and vLLM gets outputs from the first worker only.
The first argument of `record_steps` is the worker, as in vllm_worker.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.rollout.vllm_versions import pass_chosen_experts
from qwen35_trainer.rollout.vllm_worker import Worker

STEP_CHOICES = "_qwen35_choices"
"""Name of an attribute of vLLM's ModelRunnerOutput: the experts of the step's inputs, as `RoutedStep.take` returns them."""
_NOT_CHOSEN = -1


class RoutedStep:
    """The experts that the routers choose in the step that runs.

    max_inputs: maximum number of inputs of a step. row: number of layers, and of experts that a router chooses.
    kind: type of the result. device: where the model is.
    """

    def __init__(self, max_inputs: int, row: tuple[int, int], kind: np.dtype[Any], device: torch.device | str) -> None:
        # A recorded graph of a step writes to this memory, so it is never replaced.
        self._chosen = torch.full((max_inputs, *row), _NOT_CHOSEN, dtype=torch.int32, device=device)
        self._kind = kind
        self.inputs = 0
        """Number of inputs of the step, without those that only fill a recorded graph."""

    def record(self, layer: int, chosen: Tensor) -> None:
        """Record the experts of a layer. chosen: (inputs, k) numbers among all experts."""
        self._chosen[: len(chosen), layer] = chosen

    def take(self) -> RecordedChoices:
        """Return the experts of the step's inputs, (inputs, layers, k), in the order in which the step computed them.

        Raises RuntimeError if a layer has recorded nothing for an input.
        """
        step = self._chosen[: self.inputs]
        chosen = step.cpu().numpy()
        if (missing := (chosen == _NOT_CHOSEN).any(axis=(0, 2))).any():
            raise RuntimeError(
                f"vLLM computed a step without recording the experts of layers {np.flatnonzero(missing)}"
            )
        rows: RecordedChoices = chosen.astype(self._kind)
        step.fill_(_NOT_CHOSEN)
        return rows


def record_steps(worker: Worker, row: tuple[int, int], kind: str) -> None:
    """Let the first worker add the chosen experts to the output of each step. row, kind: as for `RoutedStep`."""
    if worker.rank != 0:
        return
    runner = worker.model_runner
    max_inputs = worker.vllm_config.scheduler_config.max_num_batched_tokens
    step = RoutedStep(max_inputs, row, np.dtype(kind), runner.device)
    pass_chosen_experts(runner.get_model(), step.record)
    execute, sample = worker.execute_model, worker.sample_tokens

    def execute_model(scheduled: Any) -> Any:  # noqa: ANN401  # vLLM's SchedulerOutput, and its output or None
        step.inputs = scheduled.total_num_scheduled_tokens
        return execute(scheduled)

    def sample_tokens(grammar: Any) -> Any:  # noqa: ANN401  # vLLM's GrammarOutput and ModelRunnerOutput
        output = sample(grammar)
        # The copy from the device has only begun in Model Runner V2, and where vLLM schedules ahead.
        if hasattr(output, "get_output"):
            output = output.get_output()
        setattr(output, STEP_CHOICES, step.take())
        return output

    worker.execute_model, worker.sample_tokens = execute_model, sample_tokens
