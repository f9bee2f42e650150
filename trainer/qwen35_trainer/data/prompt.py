"""One prompt, as every later stage sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

type Message = Mapping[str, object]
"""`role` and `content`, a text or a list of parts ({type: text, text: …}, {type: image}, {type: video}); an assistant's
may have `reasoning_content` and `tool_calls`, a tool's `name` and `tool_call_id`."""

type Tool = Mapping[str, object]
"""The JSON schema of a function, as chat templates read it."""

type Image = Path | bytes
"""A file, or the bytes of one (PNG, JPEG …)."""


@dataclass(frozen=True)
class Video:
    """Frames in order. fps: frames per second of these frames; the model reads the time of each from it."""

    frames: tuple[Image, ...]
    fps: float


@dataclass(frozen=True)
class Prompt:
    """What the model is asked, and what a reward needs to judge the response.

    id: `<source>/<row>`, the same in every run. text: a plain text, or chat messages. answer: the reference answer,
    where the source has one. metadata: the row's other fields (files), or `gym` and `entry` (gym). tools: what the
    messages may call. images, videos: one for each image and video part of the messages, in order. Plain values only,
    so that it can be sent between processes.
    """

    id: str
    source: str
    text: str | tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    images: tuple[Image, ...] = ()
    videos: tuple[Video, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation; a plain text is a user's message."""
        return ({"role": "user", "content": self.text},) if isinstance(self.text, str) else self.text
