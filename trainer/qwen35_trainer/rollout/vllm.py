"""The engine on vLLM: its scheduler and kernels behind the interface of this project's engines.

    submit ─► vLLM: waiting ──(slots and blocks free: prefill, in chunks)──► running ──(end or limit)──► completed
                                                                              │ ▲
                                                                      step ───┘ │ one token for every running sequence
                                                                      load ─────┘ between two steps, nothing drained
                                                                      take ─► its tokens, to continue elsewhere

Everything runs on the caller's thread (vllm_core.py says why), so nothing here waits. A step computes the logits of a token and
samples it, so the token's version is that of the last `load`. The keys, values and states of a sequence's earlier tokens stay
those of the weights that computed them, as in the Torch engine.

The prefix cache is salted with the version at which a sequence was submitted: a sequence that is submitted after a `load` never
starts from the states of older weights. A sequence with kept tokens computes them again, with the weights of its submission.

Under truncated sampling vLLM returns the most likely tokens of each position with their log-probabilities, -inf for those that
it dropped: `vllm_candidates.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.hub_tensors import exported
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, SequenceRequest, StepOutput, check_lengths
from qwen35_trainer.rollout.vllm_candidates import CandidateRecord, returned_tokens
from qwen35_trainer.rollout.vllm_core import Core, replace_weights, stepping
from qwen35_trainer.weights.adapters import are_adapters
from qwen35_trainer.weights.weight_buckets import check_shapes, shapes

NO_VERSION = -1
"""The version of an engine that has not loaded weights yet."""
STOPPED, TRUNCATED = "stop", "length"
"""vLLM's reasons of a finished sequence."""


@dataclass
class _Generating:
    """A sequence that vLLM holds, and the tokens that it generated since it was submitted."""

    request: SequenceRequest
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: CandidateRecord = field(default_factory=CandidateRecord)
    reported: int = 0
    """Number of its tokens that `progress` has returned."""

    def new(self, start: int = 0) -> GeneratedTokens:
        """Return the generated tokens from number `start`, without the kept ones."""
        return GeneratedTokens(
            np.array(self.ids[start:], np.int32),
            np.array(self.log_probs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            self.candidates.since(start) if self.request.sampling.truncates else None,
        )

    def all(self) -> GeneratedTokens:
        return GeneratedTokens.join([self.request.kept, self.new()])


class VLLMEngine:
    """Generates with vLLM. Call `load` before `step`: the core's first weights have no meaning.

    core: from `build_core`. config: the model's configuration. max_length: prompt and response together, in tokens.
    """

    def __init__(self, core: Core, config: HFConfig, *, end_token: int, max_length: int, on_cpu: bool) -> None:
        self._core, self._tied = core, bool(config.tie_word_embeddings)
        self._shapes = shapes(dict(classes.without_weights(config).named_parameters()))  # as in a publication
        self._vocabulary: int = config.get_text_config().vocab_size
        self._end_token, self._max_length, self._on_cpu = end_token, max_length, on_cpu
        self._version = NO_VERSION
        self._sequences: dict[str, _Generating] = {}  # by vLLM's name of the request, in the order of submission

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Queue sequences for generation. Raises ValueError, and queues none, if one does not fit into `max_length`."""
        from vllm.inputs.engine import tokens_input

        check_lengths(requests, self._max_length)
        for request in requests:
            prompt = np.concatenate((request.prompt, request.kept.ids)).tolist()
            inputs = tokens_input(prompt, cache_salt=str(self._version))
            self._core.add_request(_name(request.sequence), inputs, self._parameters(request))
            self._sequences[_name(request.sequence)] = _Generating(request)

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        taken = {name: self._sequences.pop(_name(name)).all() for name in sequences if _name(name) in self._sequences}
        self._core.abort_request([_name(name) for name in taken])
        return taken

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        grown = {}
        for held in self._sequences.values():
            if len(held.ids) > held.reported:
                grown[held.request.sequence] = held.new(held.reported)
                held.reported = len(held.ids)
        return grown

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use `weights` for all further tokens. Raises ValueError naming missing, unexpected and misshapen tensors."""
        if are_adapters(weights):
            raise ValueError(f"weights of version {version} are adapters, which the vLLM engine cannot load")
        check_shapes(self._shapes, weights, version)
        replace_weights(self._core, exported(weights.items(), tied=self._tied))
        self._version = version

    def step(self) -> StepOutput:
        assert self._version != NO_VERSION, "load weights before the first step"
        with stepping(on_cpu=self._on_cpu):
            outputs: Iterable[Any] = self._core.step()
        started: dict[SequenceId, int] = {}
        finished: list[Completed] = []
        tokens = 0
        for output in outputs:
            held, [generated] = self._sequences[output.request_id], output.outputs
            if not held.ids and not len(held.request.kept):
                started[held.request.sequence] = self._version
            held.ids += generated.token_ids
            if held.request.sampling.truncates:
                held.log_probs += held.candidates.add(generated.logprobs)
            else:
                held.log_probs += generated.logprobs.logprobs
            held.versions += [self._version] * len(generated.token_ids)
            tokens += len(generated.token_ids)
            if output.finished:
                del self._sequences[output.request_id]
                finished.append(_completed(held, generated.finish_reason))
        return StepOutput(tuple(finished), started, tokens)

    def _parameters(self, request: SequenceRequest) -> Any:  # noqa: ANN401  # vLLM's SamplingParams
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            max_tokens=request.max_tokens - len(request.kept),
            # The end token is the tokenizer's, whatever config.json says. Without seeds of their own, sequences are drawn together.
            ignore_eos=True,
            stop_token_ids=[self._end_token],
            detokenize=False,
            logprobs=returned_tokens(request.sampling, self._vocabulary),
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )


def _name(sequence: SequenceId) -> str:
    group, index = sequence
    return f"{group}-{index}"


def _completed(held: _Generating, reason: str) -> Completed:
    if reason not in (STOPPED, TRUNCATED):
        raise RuntimeError(f"vLLM ended sequence {held.request.sequence} with the reason {reason}")
    return Completed(held.request.sequence, held.all(), truncated=reason == TRUNCATED)
