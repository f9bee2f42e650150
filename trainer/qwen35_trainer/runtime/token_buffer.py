"""The tokens that replicas report: packed on their way to the driver, and in one buffer per sequence in the driver.

The experts that were chosen for the tokens are not here; a buffer refers to them (`stored_choices.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRun, VersionRuns
from qwen35_trainer.runtime.stored_choices import NO_CHOICES, StoredPart

type TokenRows = tuple[memoryview, memoryview]
"""T tokens as two rows of T items of four bytes: the token ids (int32) and the log-probs (float32). Slices of memoryviews
take a fraction of the time of slices of arrays."""
type _Part = tuple[bytes, bytes, Candidates | None]
"""The bytes of two rows, and the candidates of their tokens."""

_ITEM_BYTES = 4


class TokenBlock(Mapping[SequenceId, GeneratedTokens]):
    """A mapping from sequences to their new tokens, in which the tokens of all sequences are stored in one array.

    One array is cheaper than many, because each array in a pickle costs as much as a hundred tokens.
    """

    def __init__(self, parts: Mapping[SequenceId, Sequence[GeneratedTokens]] = {}) -> None:
        """Join tokens into one block. parts: sequence → its new tokens, in one or several pieces."""
        self._names = tuple(parts)
        self._ends = np.cumsum([sum(map(len, pieces)) for pieces in parts.values()], dtype=np.int64)
        all_tokens = GeneratedTokens.join(piece for pieces in parts.values() for piece in pieces)
        assert all_tokens.choices is None, "chosen experts do not travel with the tokens"
        self._data: NDArray[np.int32] = np.stack(  # (2, tokens)
            [all_tokens.ids, np.asarray(all_tokens.log_probs, np.float32).view(np.int32)]
        )
        runs = [VersionRuns.join(piece.versions for piece in pieces).runs for pieces in parts.values()]
        self._runs = np.array([run for each in runs for run in each], np.int64).reshape(-1, 2)  # of all sequences
        self._run_ends = np.cumsum([len(each) for each in runs], dtype=np.int64)
        self._candidates = all_tokens.candidates

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._names)

    @property
    def token_count(self) -> int:
        """The number of tokens of all sequences together."""
        return int(self._data.shape[1])

    def __getitem__(self, name: SequenceId) -> GeneratedTokens:
        if name not in self._names:
            raise KeyError(name)
        index = self._names.index(name)
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        ids, log_probs = self._data[:, start:end]
        first = int(self._run_ends[index - 1]) if index else 0
        versions = VersionRuns(tuple(map(tuple, self._runs[first : self._run_ends[index]].tolist())))
        return GeneratedTokens(ids, log_probs.view(np.float32), versions, self._candidates_of(start, end))

    def parts(self) -> Iterator[tuple[SequenceId, TokenRows, list[VersionRun], Candidates | None]]:
        """Yield (sequence, tokens, versions, candidates) for each sequence, as `TokenBuffer.append` takes them.

        candidates: for each token, the tokens that truncated sampling could have drawn; None: sampling was not
        truncated. The rows and the candidates share the memory of this block.
        """
        ids, log_probs = (memoryview(row) for row in self._data)
        runs = list(zip(*self._runs.T.tolist(), strict=True))
        start = first = 0
        for name, end, last in zip(self._names, self._ends.tolist(), self._run_ends.tolist(), strict=True):
            candidates = None if self._candidates is None else self._candidates_of(start, end)
            yield name, (ids[start:end], log_probs[start:end]), runs[first:last], candidates
            start, first = end, last

    def _candidates_of(self, start: int, end: int) -> Candidates | None:
        if self._candidates is None:
            return None
        candidates = self._candidates[start:end]
        # Without any, only other sequences of the block are sampled with truncation.
        return candidates if candidates.counts.any() else None


class TokenBuffer:
    """The tokens of one sequence, to which new tokens are appended in parts.

    The buffer takes 8 bytes per token and about 400 bytes per part. Candidates, the tokens that truncated sampling could
    have drawn at each position, take further memory. Parts are joined only when the tokens are read, because growing one
    array would copy each token several times. There are few parts, because a long sequence reports new tokens only when
    they are at least a certain share of its earlier tokens (`rollout_worker.PROGRESS_SHARE`).
    """

    __slots__ = ("_length", "_part_start", "_parts", "_runs", "choices")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._parts: list[_Part] = []
        self._runs: list[VersionRun] = []  # of each part, in order; neighbours may have the same version
        self._length = self._part_start = 0
        self.choices = NO_CHOICES
        """Where the experts are that were chosen for the tokens."""
        if len(tokens):
            self._append(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: TokenRows, versions: Iterable[VersionRun], candidates: Candidates | None = None) -> int:
        """Append a copy of `tokens`. Returns the number of all tokens in the buffer.

        versions: the versions of the weights that computed `tokens`. candidates: for each of `tokens`, the tokens that
        truncated sampling could have drawn in its place, which are copied too; None: sampling was not truncated, so it
        could have drawn any token of the vocabulary.
        """
        ids, log_probs = tokens
        copied = None if candidates is None else candidates.copy()
        self._parts.append((ids.tobytes(), log_probs.tobytes(), copied))
        self._runs += versions
        self._length += len(ids)
        return self._length

    def begin_part(self) -> None:
        """Record that the next tokens come from another replica than the tokens before them."""
        self._part_start = self._length

    def refer(self, call: object, index: int) -> None:
        """Record where the choices of the tokens since `begin_part` are. call, index: as for `StoredPart`."""
        self.choices = self.choices.with_part(StoredPart(call, index, self._part_start, self._length))

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError if the buffer has fewer tokens."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        self.choices = self.choices.up_to(length)
        if length < self._length:
            kept = self.tokens()[:length]
            self._parts, self._runs, self._length = [], [], 0
            self._append(kept)

    def tokens(self) -> GeneratedTokens:
        """Return all tokens, in arrays that cannot be written. Later changes of the buffer do not change the result."""
        if not self._parts:
            return NO_TOKENS
        if len(self._parts) > 1:
            ids, log_probs, candidates = zip(*self._parts, strict=True)
            lengths = (len(part) // _ITEM_BYTES for part in ids)
            self._parts = [(b"".join(ids), b"".join(log_probs), Candidates.join(candidates, lengths))]
        [(all_ids, all_log_probs, all_candidates)] = self._parts
        return GeneratedTokens(
            np.frombuffer(all_ids, np.int32),
            np.frombuffer(all_log_probs, np.float32),
            VersionRuns.of_runs(self._runs),
            all_candidates,
        )

    def _append(self, tokens: GeneratedTokens) -> None:
        ids, log_probs = np.asarray(tokens.ids, np.int32), np.asarray(tokens.log_probs, np.float32)
        self.append((memoryview(ids), memoryview(log_probs)), tokens.versions.runs, tokens.candidates)
