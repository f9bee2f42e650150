"""The prompt of a data row, in the form that all later stages use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

type ChatMessage = Mapping[str, object]
"""A message with `role` and `content`. The content is a text or a list of parts ({type: text, text: …}, {type: image},
{type: video}). A message of an assistant may also have `reasoning_content`, `tool_calls` and `weight: 0` (it does not train in
SFT), and a message of a tool `name` and `tool_call_id`."""

type Tool = Mapping[str, object]
"""The JSON schema of a function that the model may call, in the form that chat templates expect."""

type Image = Path | bytes
"""An image: the path of its file, or the bytes of the file (PNG, JPEG …)."""


@dataclass(frozen=True)
class Video:
    """The frames of a video, in order.

    fps: frames per second; the model gets the time of each frame from this number.
    """

    frames: tuple[Image, ...]
    fps: float


@dataclass(frozen=True)
class Prompt:
    """The input of the model, and the data that a reward needs to judge the response.

    id: `<source>/<row>`, the same in every run. source: name of the source. text: a plain text, or chat messages.
    answer: the reference answer, if there is one. metadata: in a source of files, the row's fields that are not used
    otherwise; in a source of a reasoning-gym task, `gym` and `entry` (`GymPrompts`). tools: functions that the model
    may call. images, videos: one for each image and video part of the messages, in order. place: file and row of a
    prompt from a file, for errors. All values are plain, so that a prompt can be sent between processes.
    """

    id: str
    source: str
    text: str | tuple[ChatMessage, ...]
    answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    images: tuple[Image, ...] = ()
    videos: tuple[Video, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def described(self) -> str:
        """The prompt's id, and its file and row if they are known, for errors."""
        return f"prompt {self.id} ({self.place})" if self.place else f"prompt {self.id}"

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The prompt as a conversation. A plain text becomes one user message."""
        return ({"role": "user", "content": self.text},) if isinstance(self.text, str) else self.text
