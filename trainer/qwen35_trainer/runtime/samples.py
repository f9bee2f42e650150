"""Which responses of a group people get to read, and how: pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from os.path import commonprefix
from pathlib import Path
from typing import Final

from qwen35_trainer.data.prompt import Image, Message, Prompt, Video
from qwen35_trainer.progress.samples import (
    ANSWER_CHARACTERS,
    PROMPT_CHARACTERS,
    RESPONSE_CHARACTERS,
    Piece,
    Sample,
    shortened,
    shortened_pieces,
)
from qwen35_trainer.rollout.base import Tokens
from qwen35_trainer.runtime.assembly import ScoredGroup

type Decode = Callable[[list[int]], str]
"""The text of tokens, as rewards get it."""
type Pick = tuple[ScoredGroup, int]
"""A group, and which of its sequences."""

HELD_OUT: Final = 4
"""Held-out prompts that are shown: the same ones at every evaluation, so that one can follow them."""
_ERROR_CHARACTERS: Final = 300


def trained(groups: Sequence[ScoredGroup]) -> list[Pick]:
    """The best and the worst response of the first group whose rewards differ; else one response of the first group."""
    for group in groups:
        scored = [(reward, index) for index, reward in enumerate(group.rewards) if reward is not None]
        if scored and min(scored)[0] < max(scored)[0]:
            return [(group, max(scored, key=lambda pair: pair[0])[1]), (group, min(scored)[1])]
    return [(group, 0) for group in groups[:1]]


def held_out(groups: Sequence[ScoredGroup]) -> list[Pick]:
    """The first response to a few prompts, spread over all of them, since sources stand one after the other."""
    places = sorted({place * len(groups) // HELD_OUT for place in range(HELD_OUT)}) if groups else []
    return [(groups[place], 0) for place in places]


def sample(pick: Pick, version: int, decode: Decode) -> Sample:
    """The response as people read it. version: of the weights at which its tokens are trained or measured."""
    group, index = pick
    sequence, scored, prompt = group.sequences[index], group.scores[index], group.prompt.prompt
    return Sample(
        prompt_id=prompt.id,
        prompt=shortened(prompt_text(prompt), PROMPT_CHARACTERS),
        answer=None if prompt.answer is None else shortened(prompt.answer, ANSWER_CHARACTERS),
        response=shortened_pieces(pieces(sequence.tokens, version, decode), RESPONSE_CHARACTERS),
        tokens=len(sequence.tokens),
        truncated=sequence.truncated,
        reward=scored.value,
        scores=dict(scored.parts),
        errors={name: shortened(error, _ERROR_CHARACTERS) for name, error in scored.errors.items()},
    )


def pieces(tokens: Tokens, version: int, decode: Decode) -> list[Piece]:
    """The text of a response, parted where the lag of its tokens changes.

    A character may be made of several tokens: it goes with the last of them.
    """
    ids = tokens.ids.tolist()
    whole = decode(ids)
    parted: list[Piece] = []
    count = at = 0
    for lag, part in groupby((version - tokens.versions).tolist()):
        count += len(list(part))
        start = whole if count == len(ids) else decode(ids[:count])
        if not whole.startswith(start):  # its last character is not complete yet
            start = commonprefix([whole, start])  # noqa: RUF071  # characters, not paths
        end = max(at, len(start))
        if end > at:
            parted.append((int(lag), whole[at:end]))
        at = end
    return parted


def prompt_text(prompt: Prompt) -> str:
    """The prompt as the data has it; of a conversation each message after its role, and pictures by their names."""
    if isinstance(prompt.text, str):
        return prompt.text
    images, videos = iter(prompt.images), iter(prompt.videos)
    return "\n\n".join(f"{message.get('role')}: {_content(message, images, videos)}" for message in prompt.text)


def _content(message: Message, images: Iterator[Image], videos: Iterator[Video]) -> str:
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
