"""Writes a few responses of each batch and evaluation to samples.jsonl, for people to read.

    loop: trained, evaluated ─► choose ─► queue ─► sampler's thread: decode ─► SampleFile
                                           │ full                    │ fails
                                           └─────── warns once ◄─────┘         training continues without samples

waits on                 unblocked by          deadline
trained, evaluated       never wait            –
sampler's thread: queue  samples, or close     daemon: ends with the process
close                    everything written    2 · CLOSE_SECONDS

The functions after the sampler choose and format the responses, without side effects.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from pathlib import Path
from typing import Final

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.data.prompt import ChatMessage, Image, Prompt, Video
from qwen35_trainer.epoch import Superseded
from qwen35_trainer.progress.sample_file import (
    MAX_ANSWER_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    MAX_RESPONSE_CHARACTERS,
    Moment,
    MomentKind,
    Sample,
    SampleFile,
    TextPiece,
    shorten,
    shorten_pieces,
)
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rollout.rollout_engine import ENVIRONMENT_VERSION, GeneratedTokens
from qwen35_trainer.runtime import process
from qwen35_trainer.runtime.assembly import ScoredGroup

logger = logging.getLogger(__name__)

type DecodeTokens = Callable[[list[int]], str]
"""A function that decodes token ids to the text that rewards get."""
type SequencePick = tuple[ScoredGroup, int]
"""A group, and the index of one of the group's sequences."""

CLOSE_SECONDS = 30.0
_MAX_QUEUED_MOMENTS = 64
HELD_OUT_PROMPTS: Final = 4
"""Maximum number of held-out prompts for which an evaluation writes a sample.

They are the same prompts in every evaluation, so that responses can be compared.
"""
_MAX_ERROR_CHARACTERS: Final = 300


class Sampler:
    """Writes samples of the responses of one run to the file `path`, for reports.

    decoder: turns tokens into text. writer: publishes the file in its folder; None: no other attempt of the run writes
    into this folder. Errors do not end the run, and only the first one is logged.
    """

    def __init__(self, path: Path, decoder: ResponseDecoder, writer: FolderWriter | None = None) -> None:
        self._path, self._decoder, self._writer = path, decoder, writer
        self._warned = False
        self._queue: queue.Queue[tuple[MomentKind, int, int, list[SequencePick]] | None] = queue.Queue(
            _MAX_QUEUED_MOMENTS
        )
        self._thread = threading.Thread(target=self._write, name="samples", daemon=True)
        self._thread.start()

    def trained(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """Add samples of a batch that trained at `version`. update: number of the batch's last update."""
        self._put("trained", update, version, trained(groups))

    def evaluated(self, groups: Sequence[ScoredGroup], *, update: int, version: int) -> None:
        """Add samples of an evaluation of `version`, after `update` updates."""
        self._put("held out", update, version, held_out(groups))

    def close(self) -> None:
        """Wait until all samples are written, at most 2 · CLOSE_SECONDS."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._warn("the disk is slower than the run")
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"the disk did not take them within {CLOSE_SECONDS:g} s")

    def _put(self, kind: MomentKind, update: int, version: int, picks: list[SequencePick]) -> None:
        try:
            self._queue.put_nowait((kind, update, version, picks))
        except queue.Full:
            self._warn("the disk is slower than the run")

    def _write(self) -> None:
        try:
            decode = self._decoder.load()
            process.trim()
            with closing(SampleFile(self._path, self._writer)) as file:
                while (moment := self._queue.get()) is not None:
                    kind, update, version, picks = moment
                    try:
                        texts = tuple(sample(pick, version, decode) for pick in picks)
                        file.add(Moment(kind=kind, update=update, version=version, samples=texts))
                    except Exception as error:  # noqa: BLE001  # the texts or the tokenizer cause it, and the next samples may work
                        self._warn(f"{type(error).__name__}: {error}")
        except (OSError, ValueError, Superseded) as error:
            self._warn(str(error))
            while self._queue.get() is not None:  # `close` must not wait for room
                pass

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("samples of responses are missing in %s and in the report: %s", self._path, reason)


def trained(groups: Sequence[ScoredGroup]) -> list[SequencePick]:
    """Choose the samples of a batch: the best and the worst response of the first group whose rewards differ.

    If no group has different rewards, choose the first response of the first group.
    """
    for group in groups:
        scored = [(reward, index) for index, reward in enumerate(group.rewards) if reward is not None]
        if scored and min(scored)[0] < max(scored)[0]:
            return [(group, max(scored, key=lambda pair: pair[0])[1]), (group, min(scored)[1])]
    return [(group, 0) for group in groups[:1]]


def held_out(groups: Sequence[ScoredGroup]) -> list[SequencePick]:
    """Choose the samples of an evaluation: the first response of each of at most HELD_OUT_PROMPTS groups.

    The chosen groups are evenly spaced, because prompts are ordered by source and all sources should be represented.
    """
    places = sorted({place * len(groups) // HELD_OUT_PROMPTS for place in range(HELD_OUT_PROMPTS)}) if groups else []
    return [(groups[place], 0) for place in places]


def sample(pick: SequencePick, version: int, decode: DecodeTokens) -> Sample:
    """Return one response as a sample for people to read.

    version: for a trained response, the version at which it trained; in an evaluation, the version that generated it.
    decode: turns tokens into text.
    """
    group, index = pick
    sequence, scored, prompt = group.sequences[index], group.scores[index], group.prompt.prompt
    return Sample(
        prompt_id=prompt.id,
        prompt=shorten(prompt_text(prompt), MAX_PROMPT_CHARACTERS),
        answer=None if prompt.answer is None else shorten(prompt.answer, MAX_ANSWER_CHARACTERS),
        response=shorten_pieces(pieces(sequence.tokens, version, decode), MAX_RESPONSE_CHARACTERS),
        tokens=len(sequence.tokens),
        truncated=sequence.truncated,
        reward=scored.value,
        scores=dict(scored.parts),
        errors={name: shorten(error, _MAX_ERROR_CHARACTERS) for name, error in scored.errors.items()},
    )


def pieces(tokens: GeneratedTokens, version: int, decode: DecodeTokens) -> list[TextPiece]:
    """Split the text of a response into pieces (lag, text), so that all tokens of a piece have the same lag.

    The lag of a token is `version` minus the version that generated the token. A character that consists of several
    tokens belongs to the last of these tokens. Tokens of the environment, which have no lag, count as lag 0.
    """
    ids = tokens.ids.tolist()
    whole = decode(ids)
    text_pieces: list[TextPiece] = []
    count = at = 0
    lags = [(0 if by == ENVIRONMENT_VERSION else version - by, length) for by, length in tokens.versions.runs]
    for lag, part in groupby(lags, key=itemgetter(0)):
        count += sum(length for _, length in part)
        start = whole if count == len(ids) else decode(ids[:count])
        if not whole.startswith(start):  # its last character is not complete yet
            start = commonprefix([whole, start])  # noqa: RUF071  # characters, not paths
        end = max(at, len(start))
        if end > at:
            text_pieces.append((lag, whole[at:end]))
        at = end
    return text_pieces


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as text for people.

    In a conversation, each message follows its role, and pictures are replaced by their names.
    """
    if isinstance(prompt.text, str):
        return prompt.text
    images, videos = iter(prompt.images), iter(prompt.videos)
    return "\n\n".join(f"{message.get('role')}: {_content(message, images, videos)}" for message in prompt.text)


def _content(message: ChatMessage, images: Iterator[Image], videos: Iterator[Video]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]
    texts = [str(message["reasoning_content"])] if message.get("reasoning_content") else []
    for part in parts:
        match part.get("type"):
            case "text":
                texts.append(str(part["text"]))
            case "image":
                texts.append(_image(next(images, None)))
            case "video":
                texts.append(_video(next(videos, None)))
            case other:
                texts.append(f"[{other}]")
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, ensure_ascii=False, default=str))
    return "\n".join(texts)


def _image(image: Image | None) -> str:
    match image:
        case Path():
            return f"[image {image.name}]"
        case bytes():
            return f"[image of {len(image):,} bytes]"
        case None:
            return "[image]"


def _video(video: Video | None) -> str:
    return "[video]" if video is None else f"[video of {len(video.frames)} frames, {video.fps:g} per second]"
