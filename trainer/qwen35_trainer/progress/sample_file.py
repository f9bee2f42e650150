"""Sampled responses for people to read: samples.jsonl, one line per moment.

    groups ─► a few responses ─► SampleFile ─► samples.jsonl ─► the report

A *moment* is an update or an evaluation. However long the run is, the file keeps at most MAX_MOMENTS of each kind, spread
evenly over the updates, plus the newest. Long texts are shortened in their middle, so that the file has at most a few
million characters.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from qwen35_trainer.atomic_files import FolderWriter, write_all
from qwen35_trainer.progress.records import writable

type MomentKind = Literal["trained", "held out"]
type TextPiece = tuple[int | None, str]
"""A part of a response, as (lag of its tokens in versions, text).

A lag of None marks a note in place of omitted text.
"""

SAMPLES_FILE_NAME: Final = "samples.jsonl"
MAX_MOMENTS: Final = 32
"""Maximum number of moments of each kind, not counting the newest."""
MAX_FILE_LINES: Final = 4 * MAX_MOMENTS
"""Number of lines at which the file is rewritten with only the retained moments."""
MAX_PROMPT_CHARACTERS: Final = 2000
MAX_RESPONSE_CHARACTERS: Final = 4000
MAX_ANSWER_CHARACTERS: Final = 500
_JSON: Final = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt, with its rewards."""

    __pydantic_config__ = _JSON

    prompt_id: str
    prompt: str
    answer: str | None = None
    """The reference answer, if the data has one."""
    response: tuple[TextPiece, ...]
    """The text of the response that was scored, in pieces. A long text is shortened in its middle."""
    tokens: int
    truncated: bool = False
    """Whether the response reached the length limit."""
    reward: float | None
    """The reward of the response. None: the response could not be scored, so it neither trained nor counted in a mean."""
    scores: dict[str, float] = field(default_factory=dict)
    """Name of a reward → its unweighted score."""
    errors: dict[str, str] = field(default_factory=dict)
    """Name of a reward that failed → its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The samples of one update, or of one evaluation."""

    __pydantic_config__ = _JSON

    kind: MomentKind
    update: int
    version: int
    """Version of the weights: for an update, the version at which the samples trained; for an evaluation, the version
    that generated the samples."""
    samples: tuple[Sample, ...]


_ADAPTER: Final = TypeAdapter(Moment)


class SampleFile:
    """Appends moments, each with the samples of one update or evaluation, to samples.jsonl. For use by one thread.

    A resumed run keeps the samples of earlier attempts.

    writer: publishes the file in its folder; None: no other attempt of the run writes into this folder. Every attempt
    begins by replacing the file with a copy. What an earlier attempt appends to the replaced file is lost.

    Raises OSError if the file cannot be read or written, and ValueError if a complete line of it is not a moment.
    """

    def __init__(self, path: Path, writer: FolderWriter | None = None) -> None:
        self._path = path
        self._writer = writer or FolderWriter(path.parent)
        self._file: FileIO | None = None
        self._moments = read_samples(path)
        self._rewrite()  # removes a torn line that a killed process may have left

    def add(self, moment: Moment) -> None:
        """Append a moment (the samples of one update or evaluation) to the file.

        If the file already has MAX_FILE_LINES lines, the whole file is rewritten instead, with only the moments that
        `retained_moments` returns.
        """
        self._moments = retained_moments([*self._moments, moment])
        if self._lines >= MAX_FILE_LINES:
            self._rewrite()
            return
        assert self._file is not None, "the file was closed"
        self._writer.check()
        write_all(self._file, _line(moment).encode())
        self._lines += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self) -> None:
        made = self._writer.place(self._path.name)
        with self._writer.guarded():
            file = made.open(
                "wb", buffering=0
            )  # a buffer would keep what a full disk refused, and write it again later
        try:
            write_all(file, "".join(map(_line, self._moments)).encode())
            self._writer.publish(made, self._path)
        except BaseException:
            file.close()
            made.unlink(missing_ok=True)
            raise
        self.close()
        self._file, self._lines = file, len(self._moments)


def read_samples(path: Path) -> list[Moment]:
    """Read samples.jsonl, and return the moments (samples of one update or evaluation) to keep.

    `retained_moments` selects them. Returns an empty list if the file does not exist. A last line without a newline is
    ignored. Raises ValueError, with file and line, if any other line is not a moment.
    """
    if not path.is_file():
        return []
    moments: list[Moment] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            moments.append(_ADAPTER.validate_python(json.loads(line)))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()[:3]
            )
            raise ValueError(f"{path}, line {number}: {problems}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    return retained_moments(moments)


def retained_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments to keep, in order of their updates. A moment has the samples of one update or evaluation.

    At most MAX_MOMENTS moments of updates are kept, plus the newest one. The same limit holds for evaluations. An
    attempt that resumes from a checkpoint repeats the updates after that checkpoint. Moments that earlier attempts have
    added for these updates are left out.
    """
    retained: list[Moment] = []
    for kind in get_args(MomentKind.__value__):
        of_kind: list[Moment] = []
        for moment in moments:
            if moment.kind == kind:
                while of_kind and of_kind[-1].update >= moment.update:
                    of_kind.pop()
                of_kind.append(moment)
        retained += _thinned(of_kind)
    return sorted(retained, key=lambda moment: moment.update)


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Return the first moment in every `stride` updates, plus the newest moment.

    The stride is the smallest power of two that leaves at most MAX_MOMENTS, not counting the newest. A moment that is
    kept at one stride is also kept at all smaller strides.
    """
    stride = 1
    while len(chosen := {moment.update // stride: moment for moment in reversed(moments)}) > MAX_MOMENTS:
        stride *= 2
    return [moment for moment in moments if moment is chosen[moment.update // stride] or moment is moments[-1]]


def newest_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments (samples) of the latest update and of the latest evaluation, if `moments` has them."""
    return list({moment.kind: moment for moment in moments}.values())


def shorten(text: str, limit: int) -> str:
    """Shorten a text to its first and last characters, `limit` in all, with a note of the number of omitted characters.

    A text of at most `limit` characters is returned unchanged, except for characters that UTF-8 cannot encode.
    """
    return "".join(part for _, part in shorten_pieces([(0, text)], limit))


def shorten_pieces(pieces: Sequence[TextPiece], limit: int) -> tuple[TextPiece, ...]:
    """Shorten the concatenated text of the pieces to its first and last characters, `limit` in all.

    pieces: pairs (lag in versions, text). If characters are omitted, a separate piece in the middle, whose lag is None,
    states their number.
    """
    pieces = [(lag, writable(text)) for lag, text in pieces]
    missing = sum(len(text) for _, text in pieces) - limit
    if missing <= 0:
        return tuple(pieces)
    head = limit - limit // 2
    note: TextPiece = (None, f" … {missing:,} characters omitted … ")
    return (*_between(pieces, 0, head), note, *_between(pieces, head + missing, limit + missing))


def _between(pieces: Sequence[TextPiece], start: int, end: int) -> list[TextPiece]:
    """Return the characters from `start` to `end` of the concatenated pieces."""
    selected: list[TextPiece] = []
    offset = 0
    for lag, text in pieces:
        if part := text[max(0, start - offset) : max(0, end - offset)]:
            selected.append((lag, part))
        offset += len(text)
    return selected


def _line(moment: Moment) -> str:
    return f"{json.dumps(asdict(moment), separators=(',', ':'), ensure_ascii=False)}\n"
