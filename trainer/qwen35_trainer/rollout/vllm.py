"""The engine on vLLM: vLLM's scheduler and kernels behind the interface `RolloutEngine`.

    submit ─► vLLM: waiting ──(slots and blocks free: prefill, in chunks)──► running ──(end or limit)──► completed
                                                                              │ ▲
                                                                      step ───┘ │ one token for every running sequence
                                    receive ─► received ─► settle ─► commit ────┘ between two steps; sequences stay
                                                           settle ─► take ─► its tokens, to continue elsewhere

Everything runs on the caller's thread (vllm_core.py says why), so nothing here waits. A step computes the logits of a token and
samples it, so the token's version is that of the last `commit`: also where vLLM schedules ahead, because `settle` ends the step in
flight before. The keys, values and states of a sequence's earlier tokens stay those of the weights that computed them, as in the
Torch engine.

In a run that trains adapters (LoRA), `load_base` loads the weights that do not train, once, and each version is an adapter, which
vLLM adds to them: `vllm_adapters.py`.

The prefix cache is salted with the version, so that no sequence starts from states of older weights. At a `commit`, sequences without
new tokens are submitted to vLLM again, with the new salt. The kept tokens of a submitted sequence are computed again, with the
weights that compute its next token.

A sequence that vLLM refuses or gives up ends with ERROR. An exception in a step ends the replica.

Requests go to vLLM's engine core, and tokens come from it, without vLLM's OutputProcessor: `vllm_requests.py`. Pictures of a prompt
are read when its sequence is submitted, and go with the request: `vllm_pictures.py`.

Under truncated sampling vLLM returns the most likely tokens of each position with their log-probabilities, -inf for those that
it dropped: `vllm_candidates.py`.

For router replay, tokens come with the experts that were chosen for them: `vllm_choices.py`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.manifest import LoRASpec
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    EngineLimits,
    GeneratedTokens,
    SequenceRequest,
    StepOutput,
    failed,
)
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.rollout.vllm_adapters import AdapterSlot
from qwen35_trainer.rollout.vllm_candidates import CandidateRecord, returned_tokens
from qwen35_trainer.rollout.vllm_choices import ChoiceRecord, RouterSizes
from qwen35_trainer.rollout.vllm_core import (
    REPLACEMENT_SECONDS,
    Core,
    fall_asleep,
    replace_weights,
    stepping,
    wake_up,
)
from qwen35_trainer.rollout.vllm_pictures import PlacedPictures, placed
from qwen35_trainer.rollout.vllm_probe import VLLMProbe
from qwen35_trainer.rollout.vllm_requests import CoreRequests, NewTokens
from qwen35_trainer.rollout.vllm_room import CacheRoom
from qwen35_trainer.rollout.vllm_worker import parameter_checksums
from qwen35_trainer.weights.adapters import are_adapters
from qwen35_trainer.weights.fit import check_shapes, check_types, shapes
from qwen35_trainer.weights.memory_change import MemoryChange

logger = logging.getLogger(__name__)

NO_VERSION = -1
"""The version of an engine that has not loaded weights yet."""
MIN_CPU_PREFILL = 2
"""Minimum number of tokens of a prompt and the kept tokens together on the CPU.

vLLM raises an error on the CPU in a step that prefills one token.
"""
_REASONS = {"stop": EndReason.STOP, "length": EndReason.LENGTH}
"""vLLM's finish reason of a complete sequence → end reason of this project.

vLLM's other reasons, such as "abort", become ERROR.
"""


@dataclass
class _Generating:
    """A sequence that vLLM holds, and the tokens that vLLM has generated for it."""

    request: SequenceRequest
    pictures: Sequence[PlacedPictures] = ()
    choices: ChoiceRecord | None = None
    """The chosen experts of all inputs: of the prompt, of the tokens with which the sequence was submitted, and of generated tokens.

    None: they are not recorded.
    """
    ids: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    candidates: CandidateRecord = field(default_factory=CandidateRecord)
    reported: int = 0
    """Number of generated tokens that `progress` has returned."""

    def new(self, start: int = 0) -> GeneratedTokens:
        """Return the generated tokens from index `start` on, without those with which the sequence was submitted."""
        return GeneratedTokens(
            np.array(self.ids[start:], np.int32),
            np.array(self.log_probs[start:], np.float32),
            VersionRuns.of(self.versions[start:]),
            self.candidates.since(start) if self.request.sampling.truncates else None,
            self._choices_since(start),
        )

    def _choices_since(self, start: int) -> RecordedChoices | None:
        """Return the chosen experts for `new`. The first tokens of the response come with those of the prompt."""
        if self.choices is None or (start == 0 and not len(self.request.kept)):
            return None if self.choices is None else self.choices.all()
        return self.choices.last(len(self.ids) - start)

    def add(self, new: NewTokens, version: int) -> None:
        """Add the tokens of a step. version: the weights that computed them."""
        truncates = self.request.sampling.truncates
        self.ids.extend(new.ids)
        self.log_probs.extend(self.candidates.add(new) if truncates else new.log_probs[:, 0].tolist())
        self.versions.extend([version] * len(new.ids))
        if self.choices is not None and new.ids:
            self.choices.add(new.choices)

    def all(self) -> GeneratedTokens:
        """Return all tokens, those with which the sequence was submitted first."""
        tokens = GeneratedTokens.join([self.request.kept, self.new()])
        # The tokens with which the sequence was submitted have no chosen experts, so joining loses those of the others.
        return replace(tokens, choices=None if self.choices is None else self.choices.all())


class VLLMEngine:
    """Generates with vLLM. Load a version before the first `step`: the core's first weights have no meaning.

    core: from `build_core`. config: the model's configuration. end_token: the token that ends a response. max_length:
    maximum length of prompt and response together, in tokens. on_cpu: whether the model is on the CPU. lora: settings
    of the adapters that train, as in the core's settings; None: all weights train. With adapters, `load_base` must be
    called before the first `commit`. reads_pictures: whether the core was built to read pictures. records_choices:
    whether tokens are returned with the experts that were chosen for them; only with a core that was built to record
    them.
    """

    def __init__(
        self,
        core: Core,
        config: HFConfig,
        *,
        end_token: int,
        max_length: int,
        on_cpu: bool,
        lora: LoRASpec | None = None,
        reads_pictures: bool = False,
        records_choices: bool = False,
    ) -> None:
        self._core, self._config, self._tied = core, config, bool(config.tie_word_embeddings)
        self._routers = RouterSizes.of(config) if records_choices else None
        self._shapes = shapes(dict(classes.without_weights(config).named_parameters()))  # as in a publication
        self._adapters = None if lora is None else AdapterSlot(core, config, lora)
        self._has_base = False
        self._end_token, self._on_cpu = end_token, on_cpu
        vocabulary = config.get_text_config().vocab_size
        min_prefill = MIN_CPU_PREFILL if on_cpu else 1
        self._limits = EngineLimits(max_length, vocabulary, min_prefill, reads_pictures)
        self._requests, self._room = CoreRequests(core), CacheRoom(core, max_length)
        self._probe = VLLMProbe(self._requests)
        self._version = NO_VERSION
        self._received: tuple[int, Mapping[str, Tensor]] | None = None
        self._sequences: dict[str, _Generating] = {}  # by the name of the request, in the order of submission

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._sequences) or self._probe.running

    @property
    def token_room(self) -> int:
        """The number of tokens that vLLM's free blocks hold. Blocks that only the prefix cache uses count as free."""
        return self._room.tokens

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        accepted, refused = self._limits.divide(requests)
        for request in accepted:
            name = _name(request.sequence)
            try:
                held = _Generating(request, self._pictures_of(request), self._new_record())
            except (DataError, ValueError) as reason:
                refused.append(failed(request, str(reason)))
                continue
            try:
                self._add(name, held)
            except Exception as error:  # whatever vLLM has against it, the others can be generated
                logger.warning("vLLM refused sequence %s", name, exc_info=True)
                refused.append(failed(request, f"vLLM refused the sequence: {type(error).__name__}: {error}"))
            else:
                self._sequences[name] = held
        return tuple(refused)

    def _pictures_of(self, request: SequenceRequest) -> Sequence[PlacedPictures]:
        """Read the pictures of a request. Raises DataError if they cannot be read, and ValueError if they do not match the prompt."""
        return () if request.pictures is None else placed(request.prompt, request.pictures.read(), self._config)

    def _new_record(self) -> ChoiceRecord | None:
        return None if self._routers is None else ChoiceRecord(self._routers)

    def _add(self, name: str, held: _Generating) -> None:
        request = held.request
        prompt = np.concatenate((request.prompt, request.kept.ids)).tolist()
        self._requests.add(
            name,
            prompt,
            self._parameters(request),
            salt=str(self._version),
            pictures=held.pictures,
            lora_request=self._adapter,
        )

    @property
    def _adapter(self) -> Any:  # noqa: ANN401  # vLLM's LoRARequest
        """The adapter with which vLLM computes a request, or None if the engine has none."""
        return None if self._adapters is None else self._adapters.request

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        taken = {name: self._sequences.pop(_name(name)).all() for name in sequences if _name(name) in self._sequences}
        self._requests.abort([_name(name) for name in taken])
        return taken

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        grown = {}
        for held in self._sequences.values():
            if len(held.ids) > held.reported:
                grown[held.request.sequence] = held.new(held.reported)
                held.reported = len(held.ids)
        return grown

    def load_base(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights that do not train in a run with adapters.

        weights: all weights of the model, by the trainer's names. Raises ValueError, naming the parameters, if some
        parameters of vLLM's model got no tensor, and RuntimeError if a step is in flight.
        """
        self._check_settled()
        replace_weights(self._core, weights, tied=self._tied)
        self._has_base = True

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Check a version and keep its tensors, which `commit` copies into vLLM's parameters.

        Raises ValueError if the tensors do not fit the model, if an engine without adapters gets adapters, or if an
        engine with adapters gets other weights.
        """
        if self._adapters is None:
            if are_adapters(weights):
                raise ValueError(
                    f"weights of version {version} are adapters, but the engine was built without adapters"
                )
            check_shapes(self._shapes, weights, version)
            check_types(weights, version)
        else:
            if not are_adapters(weights):
                raise ValueError(
                    f"weights of version {version} are not adapters, but the engine was built with adapters"
                )
            self._adapters.check(weights, version)
        self._received = version, weights

    def commit(self, version: int) -> None:
        if self._received is None or self._received[0] != version:
            raise ValueError(f"version {version} was not received, so it cannot be committed")
        self._check_settled()
        (_, weights), self._received = self._received, None
        self._probe.drop()
        self._version = NO_VERSION  # if vLLM fails midway, no token is generated from a mixture of two versions
        if self._adapters is None:
            replace_weights(self._core, weights, tied=self._tied)
        elif self._has_base:
            self._adapters.replace(weights)
        else:
            raise RuntimeError("the engine has no base weights for its adapters: call load_base first")
        self._version = version
        self._submit_again([name for name, held in self._sequences.items() if not held.ids])

    def _submit_again(self, names: list[str]) -> None:
        """Submit sequences without new tokens to vLLM again, with the salt of the committed version.

        vLLM then computes their prompts with the committed weights. Without this, the first token of such a sequence
        would count as a token of the committed version, although older weights have computed its prompt.
        """
        self._requests.abort(names)
        for name in names:
            self._add(name, self._sequences[name])

    def discard(self) -> None:
        self._received = None

    def probe(self, sequences: Sequence[NDArray[np.int32]]) -> None:
        """Begin to compute the log-probs of the tokens of `sequences`, with the kernels that vLLM uses for prefill.

        `StepOutput.probed` has the log-probs after the step that computes the end of the last sequence.
        """
        self._probe.start(sequences, self._adapter)

    def sleep(self) -> MemoryChange:
        """Let vLLM free the memory of its devices. With adapters, the base weights are kept in host memory.

        On the CPU vLLM cannot sleep, so no memory is freed there.
        """
        self._received = None
        self._probe.drop()
        self._requests.settle()
        if self._on_cpu:
            return MemoryChange(0, 0)
        if self._limits.reads_pictures:
            self._core.reset_encoder_cache()  # the features of pictures; vLLM keeps them while it sleeps
        change = fall_asleep(self._core, keep_weights=self._adapters is not None)
        self._version = NO_VERSION
        return change

    def wake(self) -> None:
        if not self._on_cpu:
            wake_up(self._core)

    def checksums(self) -> dict[str, tuple[int, ...]]:
        of_workers: list[dict[str, int]] = self._core.collective_rpc(parameter_checksums, timeout=REPLACEMENT_SECONDS)
        names = sorted(set().union(*of_workers))
        return {name: tuple(worker[name] for worker in of_workers if name in worker) for name in names}

    def step(self) -> StepOutput:
        if self._version == NO_VERSION:
            raise RuntimeError(
                "the engine has no complete weights: none were loaded, or a version was committed in part"
            )
        with stepping(on_cpu=self._on_cpu):
            return self._output(self._requests.step())

    def settle(self) -> StepOutput:
        with stepping(on_cpu=self._on_cpu):
            return self._output(self._requests.settle())

    def _check_settled(self) -> None:
        """Raise RuntimeError if a step is in flight: its tokens would get the version of other weights than those that compute them."""
        if self._requests.in_flight:
            raise RuntimeError("a step of vLLM is in flight, so weights cannot be replaced: call settle before")

    def _output(self, outputs: Sequence[NewTokens]) -> StepOutput:
        """Add the new tokens of a step to their sequences. Returns the output of the step."""
        started: dict[SequenceId, int] = {}
        finished: list[Completed] = []
        tokens, prefilled, probed = 0, 0, None
        probing = self._probe.computed_in_part
        for new in outputs:
            if self._probe.has(new):
                probing, probed = True, self._probe.add(new)
                continue
            held = self._sequences[new.request]
            if new.ids and not held.ids and not len(held.request.kept):
                started[held.request.sequence] = self._version
            held.add(new, self._version)
            tokens += len(new.ids)
            prefilled += new.prefilled
            if new.finish_reason is not None:
                del self._sequences[new.request]
                finished.append(_completed(held, new.finish_reason))
        prefills = prefilled > 0 or self._requests.prefills
        probing = probing and probed is None
        return StepOutput(
            tuple(finished), started, tokens, prefilled, prefills=prefills, probed=probed, probing=probing
        )

    def _parameters(self, request: SequenceRequest) -> Any:  # noqa: ANN401  # vLLM's SamplingParams
        from vllm import SamplingParams

        return SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            max_tokens=request.max_tokens - len(request.kept),
            # The end token is the tokenizer's, whatever config.json says. Without seeds of their own, sequences are drawn together.
            ignore_eos=True,
            stop_token_ids=[self._end_token, *request.sampling.stop],
            detokenize=False,
            logprobs=returned_tokens(request.sampling, self._limits.vocabulary),
        )


def _name(sequence: SequenceId) -> str:
    group, index = sequence
    return f"{group}-{index}"


def _completed(held: _Generating, reason: str) -> Completed:
    error = "" if reason in _REASONS else f"vLLM ended the sequence with the reason {reason}"
    return Completed(held.request.sequence, held.all(), _REASONS.get(reason, EndReason.ERROR), error)
