"""The experts that vLLM's routers chose for the inputs of each sequence, for router replay (spec.train.router.replay).

    first worker    routers ─► RoutedStep: the experts of a step's inputs ─► output of the step      vllm_choice_worker.py
    scheduler       output of the step ─► ChoiceTable: a row for each place in vLLM's blocks ─► EngineCoreOutput.routed_experts
    engine          NewTokens.choices ─► ChoiceRecord: the rows of a sequence

A request gets the rows of all its inputs with its first token, and with each further token the row of the input from which the token
was computed. Where vLLM computes inputs again, after it has preempted a request, the rows of earlier tokens are not returned again:
they are those with which the tokens were computed. Nothing is kept for a request, so there is nothing to remove when one is aborted.

Rows are stored by the place of an input's keys and values in vLLM's blocks. A prompt may be computed in several steps, and its
beginning may come from the prefix cache, with blocks that another request has computed. The rows are then in the same blocks.

Where vLLM schedules ahead, it plans a step before the output of the one before it is processed, and may give blocks to other requests in
between. So places are looked up when a step is planned, and rows are stored when its output is processed, in the order of the steps: the
order in which the workers fill the blocks.

vLLM has an option for this, `enable_return_routed_experts`, which cannot be used on the CPU. In vLLM 0.32 it needs Model Runner
V2, which needs Triton, and the prefix cache, which a manifest can switch off. In vLLM 0.23, the CPU kernels choose experts without the
routers to which the option listens. This file therefore does what the option does in vLLM 0.23, on all devices: `ChoiceTable` is
like its RoutedExpertsManager. It also uses the option's field of EngineCoreOutput.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen35_trainer.data.expert_choices import RecordedChoices, recorded_type
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.rollout.vllm_choice_worker import STEP_CHOICES, record_steps
from qwen35_trainer.rollout.vllm_versions import copied_blocks

type VLLMObject = Any
"""An object of vLLM. mypy does not follow its types (pyproject.toml)."""

SETUP_SECONDS = 600.0
"""Maximum time in which worker processes prepare the recording."""


@dataclass(frozen=True)
class RouterSizes:
    """The sizes of the routers of a mixture of experts."""

    layers: int
    """Number of layers. Each has a router."""
    experts: int
    """Number of experts of a layer."""
    chosen: int
    """Number of experts that a router chooses for an input."""

    @classmethod
    def of(cls, config: HFConfig) -> RouterSizes:
        """Return the sizes for a model's configuration. The model must be a mixture of experts."""
        text = config.get_text_config()
        return cls(text.num_hidden_layers, text.num_experts, text.num_experts_per_tok)

    @property
    def row(self) -> tuple[int, int]:
        """The shape of the row of an input."""
        return self.layers, self.chosen


class RecordingExecutor:
    """Builds vLLM's executor, whose first worker then adds the chosen experts to the output of each step.

    vLLM's engine core calls it in the place of a class of executors, before graphs of steps are recorded: these would not
    contain what is added later. executor: class of executors. sizes: of the model's routers.
    """

    def __init__(self, executor: VLLMObject, sizes: RouterSizes) -> None:
        self._executor, self._sizes = executor, sizes

    def __call__(self, *arguments: Any, **options: Any) -> VLLMObject:  # noqa: ANN401  # those of vLLM's class
        executor = self._executor(*arguments, **options)
        kind = recorded_type(self._sizes.experts).name
        executor.collective_rpc(record_steps, timeout=SETUP_SECONDS, args=(self._sizes.row, kind))
        return executor


@dataclass(frozen=True)
class _Planned:
    """What a step computes for a request."""

    places: Sequence[int]
    """Places of the inputs that the step computes, as numbers of rows."""
    earlier: Sequence[int]
    """Places of the inputs before them, if the step computes the first token of the request."""
    gets_token: bool
    """Whether the request gets a token, and is not the request of a probe."""


class ChoiceTable:
    """The chosen experts of all inputs whose keys and values are in vLLM's blocks.

    scheduler: vLLM's scheduler, in this process. sizes: of the model's routers. Raises ValueError if the scheduler fills
    blocks from elsewhere, such as host memory (KV offloading).
    """

    def __init__(self, scheduler: VLLMObject, sizes: RouterSizes) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        if getattr(scheduler, "connector", None) is not None:
            # Blocks that it fills would have the rows of the inputs that they held before.
            raise ValueError(
                "router replay cannot be combined with a KV connector of vLLM: keys and values come back without the chosen experts; "
                "remove kv_offloading_size from spec.rollout.vllm.extraArguments, or spec.train.router.replay"
            )
        caches = scheduler.kv_cache_config
        specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
        # Layers of full attention keep the blocks of all inputs. Those of Gated DeltaNet keep a few states.
        self._group = next(number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
        self._block_size: int = specs[self._group].block_size
        # The system provides the memory of a row when the row is first written.
        self._blocks = np.zeros((caches.num_blocks, self._block_size, *sizes.row), recorded_type(sizes.experts))
        self._rows = self._blocks.reshape(-1, *sizes.row)
        self._scheduler, self._plan, self._update = scheduler, scheduler.schedule, scheduler.update_from_output
        self._planned: deque[Mapping[str, _Planned]] = deque()
        """The steps whose outputs have not been processed, in their order: what each computes, by vLLM's id of the request."""

    def attach(self) -> None:
        """Let the scheduler return requests with their chosen experts."""
        self._scheduler.schedule, self._scheduler.update_from_output = self._schedule, self._update_from_output

    def _schedule(self, *arguments: Any) -> VLLMObject:  # noqa: ANN401  # those of the scheduler's method
        """Replace the scheduler's method of this name, which plans a step."""
        scheduled = self._plan(*arguments)
        if scheduled.total_num_scheduled_tokens:
            spans = _spans(scheduled).items()
            self._planned.append({name: self._planned_for(name, start, end) for name, (start, end) in spans})
        return scheduled

    def _planned_for(self, name: str, start: int, end: int) -> _Planned:
        """Return what the step that was planned last computes for a request: the inputs from `start` to `end` (exclusive)."""
        request = self._scheduler.requests[name]
        gets_token = not request.is_prefill_chunk and request.sampling_params.prompt_logprobs is None
        # A later step may be planned before the first token is known. vLLM then counts two tokens in flight.
        is_first = gets_token and request.num_output_tokens == 0 and request.num_output_placeholders <= 1
        places = self._places(name, 0 if is_first else start, end)
        computed = len(places) - (end - start)
        return _Planned(places[computed:], places[:computed], gets_token)

    def _update_from_output(self, scheduled: VLLMObject, output: VLLMObject) -> VLLMObject:
        """Replace the scheduler's method of this name. scheduled: what the step computed. output: the output of the step."""
        # Before the scheduler frees the blocks of requests that end.
        choices = self._record(scheduled, output) if scheduled.total_num_scheduled_tokens else {}
        updated = self._update(scheduled, output)
        for of_client in updated.values():
            for request in of_client.outputs:
                request.routed_experts = choices.get(request.request_id)
        return updated

    def _record(self, scheduled: VLLMObject, output: VLLMObject) -> dict[str, RecordedChoices]:
        """Store the rows of a step. Returns the rows of the requests that get a token in this step, by vLLM's id."""
        if copies := copied_blocks(scheduled):
            sources, targets = zip(*copies, strict=True)
            self._blocks[list(targets)] = self._blocks[list(sources)]
        rows, places, ends = getattr(output, STEP_CHOICES), list[int](), dict[str, int]()
        planned = self._planned.popleft()
        for name in output.req_ids:
            places += planned[name].places
            ends[name] = len(places)
        self._rows[places] = rows
        # A request may begin with blocks that another one has filled in this step, so reading starts when all rows are written.
        return {
            name: self._new(name, planned[name], rows[:end])
            for name, end in ends.items()
            if self._gets_token(name, planned[name])
        }

    def _gets_token(self, name: str, planned: _Planned) -> bool:
        """Return whether a request gets a token. It does not if it ended, or was aborted, while the step was in flight."""
        return planned.gets_token and name in self._scheduler.requests

    def _new(self, name: str, planned: _Planned, rows: RecordedChoices) -> RecordedChoices:
        """Return the rows that a request gets with a token. rows: those of the step up to the last one of the request."""
        has_tokens = self._scheduler.requests[name].num_output_tokens > 0
        return rows[-1:] if has_tokens else self._rows[[*planned.earlier, *planned.places]]

    def _places(self, name: str, start: int, end: int) -> list[int]:
        """Return the places of inputs `start` to `end` (exclusive) of a request, as numbers of rows."""
        blocks, size = self._scheduler.kv_cache_manager.get_blocks(name).blocks[self._group], self._block_size
        places: list[int] = []
        for number in range(start // size, -(-end // size)):
            first = (blocks[number].block_id - number) * size
            places.extend(range(first + max(start, number * size), first + min(end, (number + 1) * size)))
        return places


def _spans(scheduled: VLLMObject) -> Mapping[str, tuple[int, int]]:
    """Return which inputs of each request a step computes: the first and the last (exclusive)."""
    continued = scheduled.scheduled_cached_reqs
    starts = dict(zip(continued.req_ids, continued.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    return {name: (starts[name], starts[name] + count) for name, count in scheduled.num_scheduled_tokens.items()}


class ChoiceRecord:
    """The chosen experts of a sequence's inputs, in the order of the inputs."""

    def __init__(self, sizes: RouterSizes) -> None:
        self._shape = sizes.row
        self._type: np.dtype[Any] = recorded_type(sizes.experts)
        self._rows = bytearray()

    def add(self, rows: RecordedChoices | None) -> None:
        """Add the rows that came with a new token. Raises RuntimeError if there are none."""
        if rows is None:
            raise RuntimeError(
                "vLLM returned a token without its experts: its engine core was not built to record them"
            )
        self._rows += rows.tobytes()

    def all(self) -> RecordedChoices | None:
        """Return the rows of all inputs, (inputs, layers, k). None: no token has been added yet."""
        return self._from(0) if self._rows else None

    def last(self, inputs: int) -> RecordedChoices:
        """Return the rows of the last inputs, (inputs, layers, k)."""
        return self._from(len(self._rows) - inputs * math.prod(self._shape) * self._type.itemsize)

    def _from(self, offset: int) -> RecordedChoices:
        """Return a copy of the rows from an offset in bytes on."""
        rows: RecordedChoices = np.frombuffer(self._rows[offset:], self._type).reshape(-1, *self._shape)
        return rows
