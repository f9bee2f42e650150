"""The tokens that replicas report, which travel twice: new tokens while a sequence runs, and all tokens when it ends.

    replica ── progress: new tokens of running sequences ─► Progress: kept as they arrived ── the replica is lost ──┐
            ── tokens: all tokens of a sequence that ends ─────────────────────────────► group, or next replica ◄───┘

Nearly all progress is dropped unread, because its sequence ends and its replica is not lost. Reading only what is needed costs
the driver less time for each sequence than joining its tokens from parts would.

The experts that were chosen for the tokens are not here: `stored_choices.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens
from qwen35_trainer.rollout.version_runs import VersionRuns

LONG_TOKENS = 8192
"""Number of tokens of a sequence from which a block keeps them in an array of their own, which is not copied when they are read.

Such an array has at least 64 KiB, so it stays out of the pickle and arrives in memory of its own (`worker_connection.py`).
"""


class TokenBlock(Mapping[SequenceId, GeneratedTokens]):
    """A mapping from sequences to tokens, in which the tokens of all short sequences are stored in one array.

    One array is cheaper than many, because each array in a pickle costs as much as a hundred tokens. The tokens of each long
    sequence (LONG_TOKENS) have an array of their own.
    """

    def __init__(self, parts: Mapping[SequenceId, Sequence[GeneratedTokens]] = {}) -> None:
        """Join tokens into one block. parts: sequence → its tokens, in one or several pieces."""
        self._names = tuple(parts)
        lengths = np.array([sum(map(len, pieces)) for pieces in parts.values()], np.int64)
        self._ends = np.cumsum(lengths)
        all_tokens = GeneratedTokens.join(piece for pieces in parts.values() for piece in pieces)
        assert all_tokens.choices is None, "chosen experts do not travel with the tokens"
        data: NDArray[np.int32] = np.stack(  # (2, tokens): token ids, and the bits of log-probs
            [all_tokens.ids, np.asarray(all_tokens.log_probs, np.float32).view(np.int32)]
        )
        is_long = lengths >= LONG_TOKENS
        long = zip(self._ends[is_long].tolist(), lengths[is_long].tolist(), strict=True)
        self._long = [data[:, end - length : end].copy() for end, length in long] if len(parts) > 1 else []
        self._data = data.compress(~np.repeat(is_long, lengths), axis=1) if self._long else data
        runs = [VersionRuns.join(piece.versions for piece in pieces).runs for pieces in parts.values()]
        self._runs = np.array([run for each in runs for run in each], np.int64).reshape(-1, 2)  # of all sequences
        self._run_ends = np.cumsum([len(each) for each in runs], dtype=np.int64)
        self._candidates = all_tokens.candidates

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: SequenceId) -> GeneratedTokens:
        for each, tokens in self.copies():
            if each == name:
                return tokens
        raise KeyError(name)

    @property
    def token_count(self) -> int:
        """The number of tokens of all sequences together."""
        return int(self._ends[-1]) if self._names else 0

    def copies(self) -> Iterator[tuple[SequenceId, GeneratedTokens]]:
        """Yield each sequence with its tokens, in arrays that cannot be written and that keep no other tokens in memory.

        The tokens of short sequences are copies.
        """
        if not self._names:
            return
        ids, log_probs = (memoryview(row) for row in self._data)  # slices of these take less time than slices of arrays
        runs = list(zip(*self._runs.T.tolist(), strict=True))
        long = iter(self._long)
        start = first = read = 0  # read: tokens of `_data`
        for name, end, last in zip(self._names, self._ends.tolist(), self._run_ends.tolist(), strict=True):
            if end - start < LONG_TOKENS:
                until = read + end - start
                own_ids = np.frombuffer(ids[read:until].tobytes(), np.int32)
                own_log_probs = np.frombuffer(log_probs[read:until].tobytes(), np.float32)
                read = until
            else:
                own = next(long, self._data).view()  # `_data` is that of the only sequence
                own.flags.writeable = False
                own_ids, own_log_probs = own[0], own[1].view(np.float32)
            versions = VersionRuns(tuple(runs[first:last]))
            yield name, GeneratedTokens(own_ids, own_log_probs, versions, self._candidates_of(start, end))
            start, first = end, last

    def _candidates_of(self, start: int, end: int) -> Candidates | None:
        if self._candidates is None:
            return None
        candidates = self._candidates[start:end]
        # Without any, only other sequences of the block are sampled with truncation.
        return candidates.copy() if candidates.counts.any() else None


class Progress:
    """The tokens that one replica has reported of its running sequences, as they arrived, and which sequences these are.

    A report is dropped when no sequence is left that was there before the report. All reports therefore contain at most the
    tokens that the replica has generated while its oldest sequence ran. A token takes 8 bytes. Candidates, the tokens that
    truncated sampling could have drawn, take further memory.
    """

    def __init__(self) -> None:
        self._blocks: deque[TokenBlock] = deque()
        self._dropped = 0
        """Number of reports that were added and dropped."""
        self._began: dict[SequenceId, int] = {}
        """Sequence → number of reports that were added before it began. In this order."""

    @property
    def sequences(self) -> KeysView[SequenceId]:
        """The sequences that have begun and not ended."""
        return self._began.keys()

    def begin(self, name: SequenceId) -> None:
        """Record that the replica got a sequence, which it did not have before."""
        self._began[name] = self._dropped + len(self._blocks)

    def end(self, name: SequenceId) -> None:
        """Record that the tokens that were reported of a sequence are not needed any more."""
        if self._began.pop(name) > self._dropped:
            return  # there is an older sequence
        oldest = next(iter(self._began.values()), self._dropped + len(self._blocks))
        while self._dropped < oldest:
            self._blocks.popleft()
            self._dropped += 1

    def add(self, block: TokenBlock) -> None:
        """Keep the new tokens of a report, which keep nothing else of the report in memory (`ReplicaChannel`)."""
        if len(block) and self._began:
            self._blocks.append(block)

    def read(self, names: Collection[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        """Return the tokens that were reported of each of `names` since it began. It must not have ended."""
        parts: dict[SequenceId, list[GeneratedTokens]] = {name: [] for name in names}
        for number, block in enumerate(self._blocks, self._dropped):
            for name, tokens in block.copies() if not parts.keys().isdisjoint(block) else ():
                if name in parts and number >= self._began[name]:
                    parts[name].append(tokens)
        return {name: GeneratedTokens.join(each) for name, each in parts.items()}
