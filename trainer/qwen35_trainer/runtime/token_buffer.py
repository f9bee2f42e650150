"""The tokens that replicas report: packed on their way to the driver, and in one buffer per sequence in the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, GeneratedTokens

type TokenRows = tuple[memoryview, memoryview, memoryview]
"""T tokens as three rows of T items of four bytes: the token ids (int32), the log-probs (float32), and the versions of the
weights (int32). Slices of memoryviews take a fraction of the time of slices of arrays."""
type _Part = tuple[bytes, bytes, bytes, Candidates | None]
"""The bytes of three rows, and the candidates of their tokens."""

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
        self._data: NDArray[np.int32] = np.stack(  # (3, tokens)
            [all_tokens.ids, np.asarray(all_tokens.log_probs, np.float32).view(np.int32), all_tokens.versions]
        )
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
        ids, log_probs, versions = self._data[:, start:end]
        return GeneratedTokens(ids, log_probs.view(np.float32), versions, self._candidates_of(start, end))

    def parts(self) -> Iterator[tuple[SequenceId, TokenRows, Candidates | None]]:
        """Yield (sequence, tokens, candidates) for each sequence, in the format of the arguments of `TokenBuffer.append`.

        candidates: for each token, the tokens that truncated sampling could have drawn; None: sampling was not
        truncated. The rows and the candidates share the memory of this block.
        """
        ids, log_probs, versions = (memoryview(column) for column in self._data)
        start = 0
        for name, end in zip(self._names, self._ends.tolist(), strict=True):
            rows = ids[start:end], log_probs[start:end], versions[start:end]
            yield name, rows, None if self._candidates is None else self._candidates_of(start, end)
            start = end

    def _candidates_of(self, start: int, end: int) -> Candidates | None:
        if self._candidates is None:
            return None
        candidates = self._candidates[start:end]
        # Without any, only other sequences of the block are sampled with truncation.
        return candidates if candidates.counts.any() else None


class TokenBuffer:
    """The tokens of one sequence, to which new tokens are appended in parts.

    The buffer takes 12 bytes per token and about 300 bytes per part. Candidates, the tokens that truncated sampling could
    have drawn at each position, take further memory. Parts are joined only when the tokens are read, because growing one
    array would copy each token several times. There are few parts, because a long sequence reports new tokens only when
    they are at least a certain share of its earlier tokens (`rollout_worker.PROGRESS_SHARE`).
    """

    __slots__ = ("_length", "_parts")

    def __init__(self, tokens: GeneratedTokens = NO_TOKENS) -> None:
        self._parts: list[_Part] = []
        self._length = 0
        if len(tokens):
            self._append(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: TokenRows, candidates: Candidates | None = None) -> int:
        """Append a copy of `tokens`. Returns the number of all tokens in the buffer.

        candidates: for each of `tokens`, the tokens that truncated sampling could have drawn in its place, which are
        copied too; None: sampling was not truncated, so it could have drawn any token of the vocabulary.
        """
        ids, log_probs, versions = tokens
        copied = None if candidates is None else candidates.copy()
        self._parts.append((ids.tobytes(), log_probs.tobytes(), versions.tobytes(), copied))
        self._length += len(ids)
        return self._length

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens. Raises ValueError if the buffer has fewer tokens."""
        if length > self._length:
            raise ValueError(f"{length} tokens are to be kept, and there are {self._length}")
        if length < self._length:
            kept = self.tokens()[:length]
            self._parts, self._length = [], 0
            self._append(kept)

    def tokens(self) -> GeneratedTokens:
        """Return all tokens, in arrays that cannot be written. Later changes of the buffer do not change the result."""
        if not self._parts:
            return NO_TOKENS
        if len(self._parts) > 1:
            ids, log_probs, versions, candidates = zip(*self._parts, strict=True)
            lengths = (len(part) // _ITEM_BYTES for part in ids)
            joined = Candidates.join(candidates, lengths)
            self._parts = [(b"".join(ids), b"".join(log_probs), b"".join(versions), joined)]
        [(all_ids, all_log_probs, all_versions, all_candidates)] = self._parts
        return GeneratedTokens(
            np.frombuffer(all_ids, np.int32),
            np.frombuffer(all_log_probs, np.float32),
            np.frombuffer(all_versions, np.int32),
            all_candidates,
        )

    def _append(self, tokens: GeneratedTokens) -> None:
        ids, versions = np.asarray(tokens.ids, np.int32), np.asarray(tokens.versions, np.int32)
        log_probs = np.asarray(tokens.log_probs, np.float32)
        self.append((memoryview(ids), memoryview(log_probs), memoryview(versions)), tokens.candidates)
