"""Requests to vLLM's engine core, and the tokens that its steps generate.

    CoreRequests.add ─► EngineCoreRequest ─► scheduler of the engine core
    CoreRequests.step ◄─ EngineCoreOutputs ◄─ one step of the engine core

Where vLLM schedules ahead, as it does by default on accelerators, the scheduler plans a step and the workers start it before the
output of the step before it is processed. Between two calls of `CoreRequests.step`, one step is then in flight:

    step      starts n + 1 ─► waits for n ─► output of n       n + 1 is in flight
    settle                    waits for n + 1 ─► its output    nothing is in flight: weights may change
    step      starts n + 2, then n + 3 ─► waits for n + 2 ─► output of n + 2

`LLMEngine.step` passes every token through vLLM's OutputProcessor, which builds several Python objects for each of them and for each
of its log-probs. A trainer needs no text, so this file uses the engine core directly and leaves the OutputProcessor out. vLLM's
InputProcessor still checks each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.rollout.vllm_pictures import PlacedPictures, prompt_input

_NO_IDS, _NO_LOG_PROBS = np.empty((0, 1), np.int32), np.empty((0, 1), np.float32)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The n tokens that a step of vLLM generated for one request, with the m most likely tokens of each position.

    The arrays share memory with the arrays of the whole step, so copy the values that are kept longer.
    """

    request: str
    """Name of the request."""
    ids: Sequence[int]
    """(n,) the drawn tokens. n is 0 if vLLM gives the request up."""
    returned_ids: NDArray[np.int32]
    """(n, 1 + m) the drawn token of each position, then the m most likely ones, which may contain it again."""
    log_probs: NDArray[np.float32]
    """(n, 1 + m) log-probs of `returned_ids` in the distribution from which the token was drawn; -inf: dropped by the sampler."""
    finish_reason: str | None
    """vLLM's reason why the request ended: "stop", "length", "abort", "error" or "repetition". None: it continues."""
    prefilled: int = 0
    """Number of tokens of the prompt that the prefill computed, if these are the first new tokens; otherwise 0.

    The prefill may have taken several steps, of which this is the last. Tokens from the prefix cache do not count.
    """
    prompt_log_probs: NDArray[np.float32] | None = None
    """Log-probs of the prompt's tokens at temperature 1, without the first token, (prompt tokens - 1,).

    They come with the first new token, if the request's parameters have `prompt_logprobs`; otherwise None.
    """
    choices: RecordedChoices | None = None
    """The experts that were chosen for inputs, (inputs, layers, k). With the first new token: for all inputs of the request. With a
    later one: for the input from which it was computed. None: the engine core does not record them (`vllm_choices.py`)."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A request that is in the engine core."""

    name: str
    columns: int
    """1 + m: number of log-probs for each token of this request.

    The arrays of a step have as many columns as its request with the most log-probs, so further columns are cut.
    """


class CoreRequests:
    """The requests of an engine core, each with a name that is unique among the present requests.

    core: vLLM's LLMEngine, whose scheduler runs in this process. While this object has requests, requests must be added
    and steps must be made only through it.
    """

    def __init__(self, core: Any) -> None:  # noqa: ANN401  # vLLM's, untyped
        self._core = core
        self._engine = core.engine_core.engine_core
        self._prefilled_in_part: frozenset[str] = frozenset()  # by the last step; vLLM's ids
        self._submitted: dict[str, _Submitted] = {}  # by vLLM's id
        self._ids: dict[str, str] = {}  # name → vLLM's id

    def add(
        self,
        name: str,
        prompt: list[int],
        parameters: Any,  # noqa: ANN401
        *,
        salt: str,
        pictures: Sequence[PlacedPictures] = (),
        lora_request: Any = None,  # noqa: ANN401
        first: bool = False,
    ) -> None:
        """Add a request for one sequence.

        name: name of the request. prompt: token ids. parameters: vLLM's SamplingParams, with `logprobs`. salt: only
        requests with the same salt share cached blocks. pictures: pictures of the prompt, in any order. lora_request:
        vLLM's LoRARequest of the adapter that generates; None: no adapter. first: whether the request gets the next
        free slot, before all other waiting requests.

        Raises vLLM's error if vLLM refuses the request; the engine core does not have the request in this case.
        """
        core = self._core
        request = core.input_processor.process_inputs(
            name,
            prompt_input(prompt, pictures, salt),
            parameters,
            supported_tasks=core.get_supported_tasks(),
            lora_request=lora_request,
        )
        core.input_processor.assign_request_id(
            request
        )  # the name and eight random letters: vLLM never uses an id again
        try:
            core.engine_core.add_request(request)
        except Exception:
            core.engine_core.abort_requests([request.request_id])  # part of vLLM may have it
            raise
        if first:
            scheduler = self._engine.scheduler
            waiting = scheduler.requests[request.request_id]
            scheduler.waiting.remove_request(waiting)
            scheduler.waiting.prepend_request(waiting)
        self._submitted[request.request_id] = _Submitted(name, 1 + parameters.logprobs)
        self._ids[name] = request.request_id

    def abort(self, names: Iterable[str]) -> None:
        """Remove requests from the engine core. Unknown names are ignored.

        A token that the step in flight computes for such a request is lost.
        """
        ids = [self._ids.pop(name) for name in names if name in self._ids]
        for request_id in ids:
            del self._submitted[request_id]
        self._core.engine_core.abort_requests(ids)

    @property
    def in_flight(self) -> bool:
        """Whether the engine core has started a step that computes tokens, and has not processed its output."""
        queue = self._engine.batch_queue or ()  # None: vLLM does not schedule ahead
        return any(scheduled.total_num_scheduled_tokens for _, scheduled, *_ in queue)

    def step(self) -> list[NewTokens]:
        """Make one step of the engine core. Returns the new tokens of each request that has some, or that has ended.

        Where vLLM schedules ahead, this starts a further step, which is in flight afterwards if requests are left.
        """
        outputs: list[NewTokens] = []
        if self._engine.batch_queue is not None and not self.in_flight:
            outputs += self._outputs()  # starts a step, and does not wait for it
        if is_ahead := self.in_flight:
            self._prefilled_in_part = self._prefilling()  # by the step in flight, which the scheduler planned last
        outputs += self._outputs()
        if not is_ahead:
            self._prefilled_in_part = frozenset() if self.in_flight else self._prefilling()
        if not self._submitted:
            self._end_steps()  # all requests have ended, so nobody needs the output of these steps
        return outputs

    def settle(self) -> list[NewTokens]:
        """Wait for the step in flight, if there is one, and start none. Returns its output, as `step` does.

        Nothing is in flight afterwards, so weights and caches may change.
        """
        self._prefilled_in_part = self._prefilling() if self.in_flight else frozenset()
        return self._end_steps()

    def _end_steps(self) -> list[NewTokens]:
        from vllm.v1.core.sched.interface import PauseState

        outputs: list[NewTokens] = []
        state = self._engine.scheduler.pause_state  # a sleeping core is paused
        self._engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self.in_flight:
                outputs += self._outputs()
        finally:
            self._engine.scheduler.set_pause_state(state)
        return outputs

    @property
    def prefills(self) -> bool:
        """Whether the last step computed a part of a prompt whose prefill has not ended."""
        return bool(self._prefilled_in_part)

    def prefilling(self, names: Iterable[str]) -> bool:
        """Return whether the last step computed a part, but not the end, of the prompt of one of these requests."""
        return any(self._ids.get(name) in self._prefilled_in_part for name in names)

    def _outputs(self) -> list[NewTokens]:
        """Let the engine core start a step, process the output of one, or both. Returns the processed output."""
        return [self._new_tokens(output) for output in self._core.engine_core.get_output().outputs]

    def _prefilling(self) -> frozenset[str]:
        """Return vLLM's ids of the requests of which the step that was planned last computes a part, but not the end, of the prompt."""
        running = self._engine.scheduler.running
        return frozenset(request.request_id for request in running if request.is_prefill_chunk)

    def _new_tokens(self, output: Any) -> NewTokens:  # noqa: ANN401  # vLLM's EngineCoreOutput
        submitted = self._submitted[output.request_id]
        ids, log_probs = _NO_IDS, _NO_LOG_PROBS
        if output.new_token_ids:  # a request that vLLM gives up ends without a token
            returned = output.new_logprobs
            ids = returned.logprob_token_ids[:, : submitted.columns]
            log_probs = returned.logprobs[:, : submitted.columns]
        reason = output.finish_reason
        if reason is not None:
            del self._submitted[output.request_id], self._ids[submitted.name]
        prefill = output.prefill_stats
        prompt = output.new_prompt_logprobs_tensors
        return NewTokens(
            submitted.name,
            output.new_token_ids,
            ids,
            log_probs,
            None if reason is None else str(reason),
            0 if prefill is None else prefill.num_computed_tokens,
            None if prompt is None else prompt.logprobs[:, 0].numpy(),
            output.routed_experts,
        )
