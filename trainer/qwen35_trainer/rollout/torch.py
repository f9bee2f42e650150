"""The embedded engine: continuous batching, token by token, in plain torch.

    submit ─► waiting ──(slots free: prefill, one prompt once for all its samples)──► running ──(end or limit)──► result
                                                                                        │ ▲
                                                                                step ───┘ │ every running sequence, one token
                                                                                load ─────┘ between two steps, nothing drained

It serves small models on any device without another process; large ones run on vLLM behind the same contract.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.decoder import Decoder
from qwen35_trainer.rollout.base import Completed, GroupRequest, GroupResult, StepOutput
from qwen35_trainer.rollout.sampling import sample


@dataclass
class _Group:
    request: GroupRequest
    completed: list[Completed] = field(default_factory=list)


class TorchEngine:
    """Generates with `slots` sequences at a time. `max_length` bounds prompt and response together, in tokens."""

    def __init__(self, model: HFModule, *, end_token: int, slots: int, max_length: int, seed: int) -> None:
        self._model = model.eval()
        device = model.model.embed_tokens.weight.device
        self._decoder = Decoder(model, slots, max_length)
        self._end_token, self._slots, self._max_length = end_token, slots, max_length
        self._generator = torch.Generator(device).manual_seed(seed)
        self._version = 0
        self._waiting: deque[GroupRequest] = deque()  # one entry per sequence
        self._groups: dict[int, _Group] = {}
        self._running: list[GroupRequest] = []  # by slot
        # Of the token that each slot is about to get, and the version that computed its distribution.
        self._logits = torch.empty(slots, model.config.vocab_size, device=device)
        self._logits_version = torch.zeros(slots, dtype=torch.int32, device=device)
        self._generated = torch.zeros(slots, dtype=torch.int64, device=device)
        self._limit = torch.zeros(slots, dtype=torch.int64, device=device)
        self._sampling = torch.zeros(slots, 3, device=device)  # temperature, top-p, top-k
        self._tokens = torch.zeros(slots, max_length, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(slots, max_length, device=device)
        self._versions = torch.zeros(slots, max_length, dtype=torch.int32, device=device)

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. Raises ValueError for one that does not fit into `max_length`."""
        for request in requests:
            if len(request.prompt) + request.max_tokens > self._max_length:
                raise ValueError(
                    f"group {request.group}: prompt {len(request.prompt)} + response {request.max_tokens} tokens exceed "
                    f"the engine's {self._max_length}; lower data.maxPromptTokens or data.maxResponseTokens"
                )
            self._groups[request.group] = _Group(request)
            self._waiting.extend([request] * request.samples)

    def cancel(self, groups: Sequence[int]) -> None:
        dropped = {group for group in groups if self._groups.pop(group, None) is not None}
        self._waiting = deque(request for request in self._waiting if request.group not in dropped)
        self._free([slot for slot, request in enumerate(self._running) if request.group in dropped])

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy `weights` over the model's. Raises ValueError naming missing, unexpected and misshapen tensors."""
        own = self._model.state_dict()
        # Compared, because a copy would stretch a smaller tensor over a larger one.
        misshapen = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
        if misshapen or own.keys() != weights.keys():
            raise ValueError(
                f"weights of version {version} do not fit the rollout model: missing {sorted(own.keys() - weights.keys())}, "
                f"unexpected {sorted(weights.keys() - own.keys())}, of another shape {misshapen}"
            )
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self._version = version

    @torch.inference_mode()
    def step(self) -> StepOutput:
        born = self._admit()
        n = len(self._running)
        if n == 0:
            return StepOutput()
        settings = self._sampling[:n]
        tokens, log_probs = sample(
            self._logits[:n], settings[:, 0], settings[:, 1], settings[:, 2].to(torch.int64), self._generator
        )
        rows, at = torch.arange(n, device=tokens.device), self._generated[:n]
        self._tokens[rows, at] = tokens.to(torch.int32)
        self._log_probs[rows, at] = log_probs
        self._versions[rows, at] = self._logits_version[:n]
        self._generated[:n] += 1
        ended = tokens == self._end_token
        done = ended | (self._generated[:n] >= self._limit[:n])
        finished: tuple[GroupResult, ...] = ()
        if bool(done.any()):
            tokens, finished = self._collect(tokens, ended, done)
        if self._running:
            running = len(self._running)
            self._logits[:running] = self._decoder.step(tokens[:running])
            self._logits_version[:running] = self._version
        return StepOutput(finished, born, n)

    def _admit(self) -> dict[int, int]:
        """Give free slots to waiting sequences; the samples of a prompt share one prefill."""
        start = len(self._running)
        admitted = [self._waiting.popleft() for _ in range(min(self._slots - start, len(self._waiting)))]
        if not admitted:
            return {}
        born = {r.group: self._version for r in admitted if self._is_first(r)}
        slots: dict[int, list[int]] = {}
        for slot, request in enumerate(admitted, start):
            slots.setdefault(request.group, []).append(slot)
        prompts = [self._groups[group].request.prompt for group in slots]
        logits = self._decoder.prefill(prompts, list(slots.values()))
        for row, held in enumerate(slots.values()):
            self._logits[held[0] : held[-1] + 1] = logits[row]
        new = slice(start, start + len(admitted))
        self._logits_version[new] = self._version
        self._generated[new] = 0
        self._limit[new] = torch.tensor([r.max_tokens for r in admitted])
        self._sampling[new] = torch.tensor(
            [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in admitted]
        )
        self._running += admitted
        return born

    def _is_first(self, request: GroupRequest) -> bool:
        return not self._groups[request.group].completed and not any(r.group == request.group for r in self._running)

    def _collect(self, tokens: Tensor, ended: Tensor, done: Tensor) -> tuple[Tensor, tuple[GroupResult, ...]]:
        """Take finished sequences out of their slots. Returns the tokens of those that go on, by slot."""
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
        results: list[GroupResult] = []
        for slot, (ids, log_probs, versions, length, complete) in zip(slots, rows, strict=True):
            group = self._groups[self._running[slot].group]
            group.completed.append(
                Completed(ids[:length], log_probs[:length], versions[:length], truncated=not complete)
            )
            if len(group.completed) == group.request.samples:
                results.append(GroupResult(group.request.group, tuple(group.completed)))
                del self._groups[group.request.group]
        tokens = tokens.clone()
        for source, target in self._free(slots):
            tokens[target] = tokens[source]
        return tokens, tuple(results)

    def _free(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Empty `slots` (ascending) and close the holes with the last running sequences. Returns the moves made."""
        emptied = set(slots)
        remaining = len(self._running) - len(emptied)
        sources = [slot for slot in range(remaining, len(self._running)) if slot not in emptied]
        moves = list(zip(sources, (slot for slot in slots if slot < remaining), strict=True))
        if moves:
            source, target = (torch.tensor(side) for side in zip(*moves, strict=True))
            self._decoder.move(source, target)
            tables = (self._logits, self._logits_version, self._generated, self._limit, self._sampling)
            for table in (*tables, self._tokens, self._log_probs, self._versions):
                table[target] = table[source]
            for old, new in moves:
                self._running[new] = self._running[old]
        del self._running[remaining:]
        return moves
