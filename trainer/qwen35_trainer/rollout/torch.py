"""The embedded engine: continuous batching, token by token, in plain torch.

    submit ─► waiting ──(slots free: prefill, one prompt once for all its new samples)──► running ──(end or limit)──► completed
                                                                                            │ ▲
                                                                                    step ───┘ │ every running sequence, one token
                                                            receive ─► received ─► commit ────┘ between two steps, nothing drained
                                                                                    take ─► its tokens, to continue elsewhere

It generates with small models on any device, without another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.expert_choices import RecordedChoices, recorded_type
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.models.adapted_linear import attach, detach
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.decoder import Decoder
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.multimodal import kinds_and_positions
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.candidate_log import CandidateLog
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    EngineLimits,
    GeneratedTokens,
    SequenceRequest,
    StepOutput,
    failed,
)
from qwen35_trainer.rollout.sampling import sample
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.weights.adapters import DOWN, SCALE, UP, adapted, are_adapters, misfits
from qwen35_trainer.weights.fit import check_shapes, check_types, shapes
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.parked_tensors import ParkedTensors, bytes_on
from qwen35_trainer.weights.staging import tensor_checksum

_NO_TOKEN = -1
"""Number that fills empty entries of the table of stop tokens. It is never sampled."""


@dataclass(frozen=True)
class _Adapter:
    """The low-rank matrices of one adapted layer, in the layer's type and on its device.

    down: (rank, in). up: (out, rank).
    """

    layer: nn.Linear
    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class _Received:
    """A version that `commit` can put in service: all parameters, or adapters. The tensors are never written to."""

    version: int
    parameters: Mapping[str, Tensor]
    """Tensors by name, each in the type and on the device of the model's parameter; empty for adapters."""
    adapters: Sequence[_Adapter] = ()
    scale: float = 0.0


class TorchEngine:
    """Generates sequences with small models in plain torch, at most `slots` sequences at a time.

    end_token: the token that ends a response. max_length: maximum length of prompt and response together, in tokens.
    seed: seed of the random numbers with which tokens are drawn. float32_logits: whether logits stay float32 instead
    of being rounded to the model's precision (train.headPrecision). records_choices: whether tokens are returned with the
    experts that were chosen for them; only for a mixture of experts.
    """

    def __init__(
        self,
        model: HFModule,
        *,
        end_token: int,
        slots: int,
        max_length: int,
        seed: int,
        float32_logits: bool = False,
        records_choices: bool = False,
    ) -> None:
        self._model = model.eval()
        text = text_model(model)
        device = text.embed_tokens.weight.device
        self._decoder = Decoder(
            model, slots, max_length, float32_logits=float32_logits, records_choices=records_choices
        )
        self._end_token, self._slots = end_token, slots
        has_tower = hasattr(model.model, "visual")
        self._limits = EngineLimits(max_length, text.config.vocab_size, reads_pictures=has_tower)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._version = 0
        self._parameters = dict(model.named_parameters())  # tied parameters once, as in a publication
        self._shapes = shapes(self._parameters)
        self._parked: list[ParkedTensors] = []  # while the engine sleeps
        self._adapted: list[nn.Linear] = []
        self._received: _Received | None = None
        self._probe: list[list[int]] = []
        self._waiting: deque[SequenceRequest] = deque()
        self._running: list[SequenceRequest] = []  # by slot
        # Logits of each slot's next token, and the version that computed them.
        self._logits = torch.empty(slots, text.config.vocab_size, device=device)
        self._logits_version = torch.zeros(slots, dtype=torch.int32, device=device)
        self._generated = torch.zeros(slots, dtype=torch.int64, device=device)
        self._reported = torch.zeros(
            slots, dtype=torch.int64, device=device
        )  # number of tokens that `progress` has returned
        self._limit = torch.zeros(slots, dtype=torch.int64, device=device)
        self._sampling = torch.zeros(slots, 4, device=device)  # temperature, top-p, top-k, min-p
        self._stop = torch.full((slots, 1), _NO_TOKEN, dtype=torch.int64, device=device)  # tokens that end a sequence
        self._tokens = torch.zeros(slots, max_length, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(slots, max_length, device=device)
        self._versions = torch.zeros(slots, max_length, dtype=torch.int32, device=device)
        self._candidates = CandidateLog(slots)
        self._choices: Tensor | None = None  # of the inputs of each slot
        if records_choices:
            config = text.config
            self._recorded_type = recorded_type(config.num_experts)
            shape = (slots, max_length, config.num_hidden_layers, config.num_experts_per_tok)
            stored = torch.uint8 if self._recorded_type == np.uint8 else torch.int16
            self._choices = torch.zeros(shape, dtype=stored, device=device)

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._probe)

    @property
    def token_room(self) -> int:
        """Number of tokens that fit into the free slots, not counting the slots that waiting sequences will take.

        Each slot has memory for a sequence of the maximum length.
        """
        return max(0, self._slots - len(self._running) - len(self._waiting)) * self._limits.max_length

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[Completed, ...]:
        accepted, refused = self._limits.divide(requests)
        self._waiting.extend(accepted)
        return tuple(refused)

    @torch.inference_mode()  # as `step`, because the table of stop tokens grows there
    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        names = set(sequences)
        taken = {request.sequence: request.kept for request in self._waiting if request.sequence in names}
        self._waiting = deque(request for request in self._waiting if request.sequence not in names)
        slots = [slot for slot, request in enumerate(self._running) if request.sequence in names]
        taken |= {self._running[slot].sequence: self._tokens_of(slot, 0) for slot in slots}
        self._free(slots)
        return taken

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        n = len(self._running)
        new = (self._generated[:n] > self._reported[:n]).nonzero().squeeze(1).tolist()
        starts = self._reported[:n].tolist()
        grown = {self._running[slot].sequence: self._tokens_of(slot, starts[slot]) for slot in new}
        self._reported[:n] = self._generated[:n]
        return grown

    @torch.no_grad()
    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Check a version, and prepare it for `commit`. Raises ValueError if the tensors do not fit the model.

        Tensors that are on the model's device and in the model's type are kept without a copy. The engine never writes
        to them, because other replicas may compute with the same memory.
        """
        check_types(weights, version)
        self._received = self._adapters(weights, version) if are_adapters(weights) else self._whole(weights, version)

    @torch.no_grad()
    def commit(self, version: int) -> None:
        received = self._received
        if received is None or received.version != version:
            raise ValueError(f"version {version} was not received, so it cannot be committed")
        self._detach()
        for name, tensor in received.parameters.items():
            self._parameters[name].data = tensor
        for adapter in received.adapters:
            attach(adapter.layer, adapter.down, adapter.up, received.scale)
            self._adapted.append(adapter.layer)
        self._version, self._received = version, None
        self._probe.clear()

    def discard(self) -> None:
        self._received = None

    def settle(self) -> StepOutput:
        return StepOutput()  # a step has ended when `step` returns

    def _adapters(self, adapters: Mapping[str, Tensor], version: int) -> _Received:
        if wrong := misfits(self._parameters, adapters):
            raise ValueError(f"adapters of version {version} do not fit the rollout model: {'; '.join(wrong)}")
        parts = []
        for name in adapted(adapters):
            path = name.removesuffix(".weight")
            layer = self._model.get_submodule(path)
            # In the type of the layer, as in the trainer.
            parts.append(_Adapter(layer, *(adapters[f"{path}.{part}"].to(layer.weight) for part in (DOWN, UP))))
        return _Received(version, {}, parts, adapters[SCALE].item())

    def _whole(self, weights: Mapping[str, Tensor], version: int) -> _Received:
        check_shapes(self._shapes, weights, version)
        return _Received(version, {name: weights[name].to(own) for name, own in self._parameters.items()})

    def _detach(self) -> None:
        for layer in self._adapted:
            detach(layer)
        self._adapted.clear()

    def probe(self, sequences: Sequence[NDArray[np.int32]]) -> None:
        self._probe = [sequence.tolist() for sequence in sequences]

    def sleep(self) -> MemoryChange:
        """Free the memory of the slots and of the weights.

        If the model has adapters, the base weights are kept in host memory, because the next version does not contain
        them. Otherwise the weights are dropped, because the next version replaces them.
        """
        assert not self._running, "an engine with running sequences does not sleep"
        self._received = None
        self._probe.clear()
        device = self._logits.device
        before = self._bytes
        self._parked = [ParkedTensors(self._slot_tensors, device, keep_values=False)]
        if self._adapted:
            self._parked.append(ParkedTensors(self._model.parameters(), device))
        else:
            for parameter in self._parameters.values():
                parameter.data = parameter.data.new_empty(0)
        return MemoryChange(before, self._bytes)

    def wake(self) -> None:
        for parked in self._parked:
            parked.restore()
        self._parked = []

    @property
    def _bytes(self) -> int:
        """Bytes of the weights and of the slots, without weights that are mapped from memory of the trainer."""
        tensors = [*self._slot_tensors, *self._model.parameters()]
        return bytes_on(tensors, self._logits.device)

    @property
    def _slot_tensors(self) -> list[Tensor]:
        numbers = [self._generated, self._reported, self._limit, self._logits_version]
        tables = [self._logits, self._sampling, self._stop, self._tokens, self._log_probs, self._versions]
        choices = [] if self._choices is None else [self._choices]
        return [*numbers, *tables, *choices, *self._decoder.tensors]

    def checksums(self) -> dict[str, tuple[int, ...]]:
        return {name: (tensor_checksum(parameter),) for name, parameter in self._model.named_parameters()}

    @torch.inference_mode()
    def step(self) -> StepOutput:
        probed = self._probed()
        started, prefilled, unreadable = self._admit()
        n = len(self._running)
        if n == 0:
            return StepOutput(tuple(unreadable), probed=probed)
        temperature, top_p, top_k, min_p = self._sampling[:n].unbind(1)
        tokens, log_probs, candidates = sample(
            self._logits[:n], temperature, top_p, top_k.to(torch.int64), min_p, self._generator
        )
        self._candidates.append(candidates, [request.sampling.truncates for request in self._running])
        rows, at = torch.arange(n, device=tokens.device), self._generated[:n]
        self._tokens[rows, at] = tokens.to(torch.int32)
        self._log_probs[rows, at] = log_probs
        self._versions[rows, at] = self._logits_version[:n]
        self._generated[:n] += 1
        ended = (tokens.unsqueeze(1) == self._stop[:n]).any(1)
        done = ended | (self._generated[:n] >= self._limit[:n])
        finished: tuple[Completed, ...] = ()
        if bool(done.any()):
            tokens, finished = self._collect(tokens, ended, done)
        if self._running:
            running = len(self._running)
            self._logits[:running] = self._decoder.step(tokens[:running])
            self._logits_version[:running] = self._version
            if self._choices is not None:
                last = self._decoder.lengths[:running] - 1
                slots = torch.arange(running, device=last.device)
                self._choices[slots, last] = self._decoder.chosen.to(self._choices.dtype)
        return StepOutput((*unreadable, *finished), started, n, prefilled, prefills=prefilled > 0, probed=probed)

    def _probed(self) -> tuple[NDArray[np.float32], ...] | None:
        """Compute the log-probs of the probe with the decoder, and end the probe; None if there is no probe."""
        if not self._probe:
            return None
        sequences, self._probe = self._probe, []
        return tuple(values.cpu().numpy() for values in self._decoder.log_probs(sequences))

    def _admit(self) -> tuple[dict[SequenceId, int], int, list[Completed]]:
        """Start waiting sequences in free slots. New samples of a prompt share one prefill.

        Returns three values: the started sequences without kept tokens, each with the version that computes its first
        token; the number of tokens that the prefills computed; and the sequences that ended because their pictures
        could not be read.
        """
        start = len(self._running)
        readable, unreadable = self._readable(self._slots - start)
        if not readable:
            return {}, 0, unreadable
        admitted = [request for request, _ in readable]
        # A sequence that already has tokens has a prefix of its own.
        prefixes: dict[tuple[int, int], list[int]] = {}
        for slot, request in enumerate(admitted, start):
            group, index = request.sequence
            prefixes.setdefault((group, index if len(request.kept) else -1), []).append(slot)
        firsts = [admitted[held[0] - start] for held in prefixes.values()]
        prompts = [np.concatenate((request.prompt, request.kept.ids)).tolist() for request in firsts]
        pictures = [readable[held[0] - start][1] for held in prefixes.values()]
        generated = [len(request.kept) for request in firsts]
        logits = self._decoder.prefill(prompts, list(prefixes.values()), pictures, generated)
        for row, held in enumerate(prefixes.values()):
            self._logits[held] = logits[row]
        if self._choices is not None:
            chosen = self._decoder.chosen.to(self._choices.dtype)
            for row, (prompt, held) in enumerate(zip(prompts, prefixes.values(), strict=True)):
                self._choices[held, : len(prompt)] = chosen[row, : len(prompt)]
        new = slice(start, start + len(admitted))
        self._logits_version[new] = self._version
        self._generated[new] = self._reported[new] = torch.tensor([len(request.kept) for request in admitted])
        self._limit[new] = torch.tensor([request.max_tokens for request in admitted])
        self._sampling[new] = torch.tensor(
            [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.sampling.min_p) for r in admitted]
        )
        self._set_stop_tokens(new, admitted)
        self._running += admitted
        for slot, request in enumerate(admitted, start):
            self._put_back(slot, request.kept)
            self._candidates.begin(slot, request.kept, truncates=request.sampling.truncates)
        started = {request.sequence: self._version for request in admitted if not len(request.kept)}
        return started, sum(map(len, prompts)), unreadable

    def _readable(self, most: int) -> tuple[list[tuple[SequenceRequest, PictureArrays | None]], list[Completed]]:
        """Take waiting sequences from the queue until `most` of them can start: their pictures, if any, can be read.

        Returns these sequences with the patches of their pictures, and the sequences that ended because their pictures
        could not be read.
        """
        readable: list[tuple[SequenceRequest, PictureArrays | None]] = []
        unreadable: list[Completed] = []
        while self._waiting and len(readable) < most:
            request = self._waiting.popleft()
            try:
                readable.append((request, self._pictures_of(request)))
            except (DataError, ValueError) as reason:
                unreadable.append(failed(request, str(reason)))
        return readable, unreadable

    def _pictures_of(self, request: SequenceRequest) -> PictureArrays | None:
        """Read the pictures of a request; None if it has none.

        Raises DataError if a picture cannot be read, and ValueError if the pictures do not match the placeholders of
        the prompt.
        """
        if request.pictures is None:
            return None
        arrays = request.pictures.read()
        kinds_and_positions(np.asarray(request.prompt, np.int64), arrays, self._model.config, None)
        return arrays

    def _set_stop_tokens(self, slots: slice, admitted: Sequence[SequenceRequest]) -> None:
        stop = [(self._end_token, *request.sampling.stop) for request in admitted]
        if (missing := max(map(len, stop)) - self._stop.shape[1]) > 0:
            self._stop = nn.functional.pad(self._stop, (0, missing), value=_NO_TOKEN)
        width = self._stop.shape[1]
        self._stop[slots] = torch.tensor([(*tokens, *[_NO_TOKEN] * (width - len(tokens))) for tokens in stop])

    def _put_back(self, slot: int, kept: GeneratedTokens) -> None:
        length = len(kept)
        if length:
            for table, values in (
                (self._tokens, kept.ids),
                (self._log_probs, kept.log_probs),
                (self._versions, kept.versions),
            ):
                table[slot, :length] = torch.from_numpy(np.array(values))

    def _tokens_of(self, slot: int, start: int) -> GeneratedTokens:
        end = int(self._generated[slot])
        tables = (self._tokens, self._log_probs, self._versions)
        ids, log_probs, versions = (table[slot, start:end].cpu().numpy().copy() for table in tables)
        candidates = self._candidates.candidates(slot, start, end)
        return GeneratedTokens(ids, log_probs, VersionRuns.of(versions), candidates, self._choices_of(slot, start, end))

    def _choices_of(self, slot: int, start: int, end: int) -> RecordedChoices | None:
        """Return the experts of tokens `start` to `end` (exclusive) in a slot; None if they are not recorded."""
        if self._choices is None:
            return None
        prompt = len(self._running[slot].prompt)
        first = 0 if start == 0 else prompt + start - 1
        rows: RecordedChoices = self._choices[slot, first : prompt + end - 1].cpu().numpy().astype(self._recorded_type)
        return rows

    def _collect(self, tokens: Tensor, ended: Tensor, done: Tensor) -> tuple[Tensor, tuple[Completed, ...]]:
        """Remove finished sequences from their slots.

        tokens: (running sequences,) the token of each slot in this step. ended: (running sequences,) bool, whether the
        token is a stop token. done: (running sequences,) bool, whether the sequence is finished. Returns the tokens of
        the remaining sequences by slot, and the finished sequences.
        """
        index = done.nonzero().squeeze(1)
        lengths = self._generated[index]
        longest = int(lengths.max())
        rows = zip(
            *(table[index, :longest].cpu().numpy() for table in (self._tokens, self._log_probs, self._versions)),
            lengths.tolist(),
            ended[index].tolist(),
            strict=True,
        )
        slots: list[int] = index.tolist()
        finished = tuple(
            Completed(
                self._running[slot].sequence,
                GeneratedTokens(
                    ids[:length],
                    log_probs[:length],
                    VersionRuns.of(versions[:length]),
                    self._candidates.candidates(slot, 0, length),
                    self._choices_of(slot, 0, length),
                ),
                EndReason.STOP if complete else EndReason.LENGTH,
            )
            for slot, (ids, log_probs, versions, length, complete) in zip(slots, rows, strict=True)
        )
        tokens = tokens.clone()
        for source, target in self._free(slots):
            tokens[target] = tokens[source]
        return tokens, finished

    def _free(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Empty `slots` (ascending), and move the last running sequences into the emptied slots below them.

        Returns the moves as (source, target).
        """
        emptied = set(slots)
        remaining = len(self._running) - len(emptied)
        sources = [slot for slot in range(remaining, len(self._running)) if slot not in emptied]
        moves = list(zip(sources, (slot for slot in slots if slot < remaining), strict=True))
        if moves:
            source, target = (torch.tensor(side) for side in zip(*moves, strict=True))
            self._decoder.move(source, target)
            tables = (self._logits, self._logits_version, self._generated, self._reported, self._limit, self._sampling)
            choices = [] if self._choices is None else [self._choices]
            for table in (*tables, self._stop, self._tokens, self._log_probs, self._versions, *choices):
                table[target] = table[source]
            for old, new in moves:
                self._running[new] = self._running[old]
                self._candidates.move(old, new)
        del self._running[remaining:]
        return moves
