"""The interface between a rollout worker and its engine.

A *sequence* is one sample of a prompt; a *group* is all samples of a prompt. Every token carries its log-probability
under the distribution that it was sampled from, and the version of the weights that computed it. Weights may change
between any two tokens, and a sequence may continue in another engine with the tokens that it has.

    submit ─► waiting ─► running ─► Completed: STOP, LENGTH or ERROR      receive ─► received ─► commit: the version in service
      └─► refused: Completed with ERROR, for that sequence alone                         └─► discard

An engine may start a step before `step` returns the output of the one before it. `settle` ends the step in flight, so that the next
step begins after whatever is called in between.

waits on             unblocked by                                     deadline
step, settle         nothing: they compute                            the pool's StepWatch
receive, commit      nothing: they check, copy and replace tensors    publication.timeoutSeconds, in the driver; also
                                                                      for the `settle` before a commit

The laws of every engine, which `tests/rollout/test_laws.py` checks:

1. The version of a token is the version of the weights that computed the logits from which the token was sampled.
2. A sequence gets no more tokens after `take`, or after it has ended.
3. `commit` is atomic: every token is of the version before the commit or of the version after it. No token is of a
   mixture of both, even after a failed commit.
4. `progress` and `Completed` contain each token once, in order; kept tokens are never changed.
5. At temperature 0, a sequence that continues from any of its prefixes gets the tokens that it would get without interruption.
6. Log-probs are those of the distribution from which the token was drawn.
7. No call raises because of one sequence: a sequence that cannot be generated completes with ERROR, and all others continue.
8. While the engine is busy, steps end, and every sequence that is not taken completes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data import expert_choices
from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.data.picture_arrays import PictureSource
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.version_runs import VersionRuns

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_trainer.weights.memory_change import MemoryChange

ENVIRONMENT_VERSION = -1
"""Version of a token that an environment added to a response, such as a tool's output.

No weights computed this token, so it does not train and has no lag. Its log-prob is 0.
"""


@dataclass(frozen=True)
class Sampling:
    """Parameters for drawing the next token. Temperature 0 takes the most likely token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of the most likely tokens among which one is drawn; 0: all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token that can be drawn, relative to that of the most likely token; 0: no minimum."""
    stop: tuple[int, ...] = ()
    """Tokens that end the response, in addition to the engine's end token."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary.

        False at temperature 0, which takes the most likely token of the whole vocabulary.
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class GeneratedTokens:
    """Response tokens of one sequence.

    An engine has generated them, or an environment has added them (a tool's output).
    """

    ids: NDArray[np.int32]
    """(tokens,) token ids, including the end token if the model produced it."""
    log_probs: NDArray[np.float32]
    """(tokens,) log-probability of each token under its sampling distribution; 0 for tokens of the environment."""
    versions: VersionRuns
    """The version of the weights that computed each token; ENVIRONMENT_VERSION for tokens of the environment."""
    candidates: Candidates | None = None
    """The tokens that could have been drawn at each position. None: at each position, all tokens of the vocabulary."""
    choices: RecordedChoices | None = None
    """The experts that were chosen for the inputs from which the tokens were computed, and before them for the other inputs
    of the prompt, if the tokens are the first of the response. None: they were not recorded."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> GeneratedTokens:
        candidates = None if self.candidates is None else self.candidates[part]
        start, end, _ = part.indices(len(self))
        choices = None if self.choices is None else expert_choices.cut(self.choices, len(self), start, max(start, end))
        return GeneratedTokens(self.ids[part], self.log_probs[part], self.versions[part], candidates, choices)

    @classmethod
    def join(cls, parts: Iterable[GeneratedTokens]) -> GeneratedTokens:
        """Concatenate the tokens of consecutive parts of a response."""
        all_parts = [NO_TOKENS, *parts]
        return cls(
            np.concatenate([part.ids for part in all_parts]),
            np.concatenate([part.log_probs for part in all_parts]),
            VersionRuns.join(part.versions for part in all_parts),
            Candidates.join((part.candidates for part in all_parts), map(len, all_parts)),
            expert_choices.joined((part.choices for part in all_parts), map(len, all_parts)),
        )


NO_TOKENS = GeneratedTokens(np.empty(0, np.int32), np.empty(0, np.float32), VersionRuns())


@dataclass(frozen=True)
class SequenceRequest:
    """A request to generate one sequence.

    Sequences of a group that are submitted together may share the prefill of their prompt.
    """

    sequence: SequenceId
    prompt: NDArray[np.int32]
    """Token ids of the prompt, (prompt tokens,). Pictures are represented by placeholder tokens."""
    max_tokens: int
    """Maximum number of response tokens, including `kept`."""
    sampling: Sampling = field(default_factory=Sampling)
    kept: GeneratedTokens = NO_TOKENS
    """Response tokens that the sequence has already, including tokens of the environment.

    Generation continues after them.
    """
    pictures: PictureSource | None = None
    """Pictures of the prompt, which the engine reads when it computes the prompt. None: the prompt has only text."""
    trains: bool = True
    """Whether the response may train. If not, the choices of its experts are not kept."""


class EndReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"
    """The last token is the end token or a token of `Sampling.stop`."""
    LENGTH = "length"
    """The sequence was cut at its token limit."""
    ERROR = "error"
    """The sequence could not be generated completely. It does not train."""


@dataclass(frozen=True)
class Completed:
    """A finished sequence with all its tokens, including those with which it was submitted."""

    sequence: SequenceId
    tokens: GeneratedTokens
    reason: EndReason
    error: str = ""
    """What went wrong; empty unless the reason is ERROR."""

    @property
    def truncated(self) -> bool:
        """Whether the sequence was cut at its token limit."""
        return self.reason is EndReason.LENGTH


@dataclass(frozen=True)
class EngineLimits:
    """The limits of the sequences that an engine can generate."""

    max_length: int
    """Maximum length of a prompt and its response together, in tokens."""
    vocabulary: int
    """Number of tokens for which the model has embeddings."""
    min_prefill: int = 1
    """Minimum number of tokens of a prompt and the kept tokens together."""
    reads_pictures: bool = False
    """Whether the engine computes prompts with pictures."""

    def problem(self, request: SequenceRequest) -> str:
        """Return a text that says why a sequence cannot be generated; empty if it can."""
        group, prompt, kept = request.sequence[0], len(request.prompt), len(request.kept)
        if prompt + request.max_tokens > self.max_length:
            return (
                f"group {group}: prompt {prompt} + response {request.max_tokens} tokens exceed the engine's "
                f"{self.max_length}; lower data.maxPromptTokens or data.maxResponseTokens"
            )
        if request.pictures is not None and not self.reads_pictures:
            return f"group {group}: the prompt has pictures, and the engine or its model reads text only"
        if prompt == 0:
            return f"group {group}: the prompt is empty"
        if prompt + kept < self.min_prefill:
            return f"group {group}: the prompt has {prompt} token, and the engine needs at least {self.min_prefill}"
        if kept >= request.max_tokens:
            return f"group {group}: the response has {kept} tokens already, and its limit is {request.max_tokens}"
        for ids in (request.prompt, request.kept.ids):
            lowest, highest = int(np.min(ids, initial=0)), int(np.max(ids, initial=0))
            if lowest < 0 or highest >= self.vocabulary:
                return (
                    f"group {group}: token {lowest if lowest < 0 else highest} is not one of the model's {self.vocabulary}; "
                    "the tokenizer and the model do not fit together"
                )
        return ""

    def divide(self, requests: Sequence[SequenceRequest]) -> tuple[list[SequenceRequest], list[Completed]]:
        """Divide requests into those that can be generated and those that are refused.

        Returns the accepted requests, and for each refused request a completed sequence with the reason ERROR.
        """
        accepted, refused = list[SequenceRequest](), list[Completed]()
        for request in requests:
            if problem := self.problem(request):
                refused.append(failed(request, problem))
            else:
                accepted.append(request)
        return accepted, refused


def failed(request: SequenceRequest, error: str) -> Completed:
    """Return the result for a sequence that cannot be generated.

    The end reason of the sequence is ERROR. Its tokens are those that `request` already contains (`kept`). error: why
    the sequence cannot be generated.
    """
    return Completed(request.sequence, request.kept, EndReason.ERROR, error)


@dataclass(frozen=True)
class StepOutput:
    """The result of one call of `RolloutEngine.step`."""

    finished: tuple[Completed, ...] = ()
    started: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequences whose first response token was generated in this step → version of the weights that computed it."""
    tokens: int = 0
    """Number of tokens that were generated."""
    prefilled: int = 0
    """Number of tokens, of prompts and kept responses, in the prefills that this step completed.

    The tokens of a prefill that took several steps all count in the last step. Tokens from the prefix cache do
    not count.
    """
    prefills: bool = False
    """Whether the step computed tokens of a prefill, so that it took longer than a step that only decodes."""
    probed: tuple[NDArray[np.float32], ...] | None = None
    """The result of a probe that ended in this step: log-probs (T - 1,) for each sequence of T tokens.

    None: no probe ended.
    """
    probing: bool = False
    """Whether the step computed tokens of a probe, and the probe has not ended.

    False while a probe waits for free slots.
    """


class RolloutEngine(Protocol):
    """An engine that generates sequences.

    One thread calls `step` repeatedly, and all other methods between two steps. The only exceptions are `receive` and
    `discard`, which one other thread may call at any time.
    """

    @property
    def version(self) -> int:
        """Version of the weights that will compute the next token."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has something to do: the engine has unfinished sequences, or log-probs to compute for `probe`."""
        ...

    @property
    def token_room(self) -> int:
        """Number of tokens, of prompts and responses together, for which memory is free.

        Keys, values and states of the tokens take this memory.
        """
        ...

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        """Queue sequences for generation. Returns the refused sequences, which end with ERROR.

        Never raises because of one sequence. The engine must not already have a sequence of the same id.
        """
        ...

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        """Drop running and waiting sequences, and return their tokens.

        Sequences that the engine does not have, for example because they have just finished, are left out of the result.
        What a step in flight computes for the sequences is lost; after `settle`, nothing is.
        """
        ...

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        """Return the new tokens of each running sequence since the previous call.

        Sequences without new tokens are left out.
        """
        ...

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Check a version of the weights, and prepare it for `commit`.

        weights: all weights of the model, or adapters (`weights/adapters.py`) that replace earlier adapters. The call
        may run during steps. The new version replaces a version that was received and not committed. The version in
        service stays in service, even after an error. The engine may keep the tensors, because the caller never changes
        them. Raises ValueError, naming all tensors that are missing, unexpected, or of another shape or type.
        """
        ...

    def commit(self, version: int) -> None:
        """Put the received version in service: all further tokens are computed with it.

        Running sequences keep their keys, values and states, which older weights have computed. No step may be in
        flight: call `settle` before. Raises ValueError if this version was not received, and RuntimeError if a step is in
        flight; in both cases the earlier version stays in service. After any other error the engine makes no more
        steps.
        """
        ...

    def discard(self) -> None:
        """Drop the received version, if there is one."""
        ...

    def step(self) -> StepOutput:
        """Run one step: start waiting sequences if there is room, and generate the next token of each running sequence.

        In a step in which only a part of a prompt is computed, the sequence of that prompt gets no token.
        """
        ...

    def settle(self) -> StepOutput:
        """End the step in flight, if there is one, and start none.

        Returns the output of that step, as `step` does, or an empty one. The version in service has computed its tokens.
        """
        ...

    def probe(self, sequences: Sequence[NDArray[np.int32]]) -> None:
        """Compute the log-probs of the tokens of `sequences` in the next steps, at temperature 1.

        sequences: token ids, (T,) each, where T is at least 2. The version in service computes them. The engine is busy
        until `StepOutput.probed` has the result. A later `probe` or `commit` drops a probe that has not ended. With
        empty `sequences`, the call only drops an earlier probe.
        """
        ...

    def sleep(self) -> MemoryChange:
        """Free the device memory of weights and caches, so that the train ranks can use the devices.

        The engine must have no sequences. Drops a version that was received, and a probe that has not ended. A step in
        flight ends before. Returns the bytes of device memory in use before and after.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory again that `sleep` has freed.

        The next `step` needs a `commit` before it, because `sleep` may have dropped the weights.
        """
        ...

    def checksums(self) -> Mapping[str, tuple[int, ...]]:
        """Return the checksums of all parameters in service, by the engine's names of the parameters.

        Each parameter has one checksum for each process that has a part of it.
        """
        ...
